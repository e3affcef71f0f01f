"""DIFF V2 as a transformers model."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import quantdiff
from quantdiff.attention import DifferentialAttentionV2
from quantdiff.calibration.text import text_windows
from quantdiff.errors import UsageError
from quantdiff.models import DiffV2Config, DiffV2ForCausalLM
from tests.attention import plain
from tests.tiny import build, save_tiny, tiny_diff_v2, tiny_ids, tiny_tokenizer


def plain_model(model, ids, attention_mask=None, grad=False):
    """The whole model in fp64, sequence by sequence and head by head."""
    parameters = dict(model.named_parameters()) if grad else model.state_dict()
    state = {name: p.double() for name, p in parameters.items()}
    config = model.config

    def norm(x, name):
        scale = (x.pow(2).mean(-1, keepdim=True) + config.rms_norm_eps).rsqrt()
        return x * scale * state[f"{name}.weight"]

    class Layer:
        rotary = "half"
        head_dim = config.head_dim

        def __init__(self, prefix):
            for name in ("q_proj", "k_proj", "v_proj", "o_proj", "lambda_proj"):
                weight = state[f"{prefix}.self_attn.{name}.weight"]
                setattr(self, name, type("Linear", (), {"weight": weight}))

    x = state["model.embed_tokens.weight"][ids]
    for i in range(config.num_hidden_layers):
        prefix = f"model.layers.{i}"
        normed = norm(x, f"{prefix}.input_layernorm")
        x = x + plain.run(plain.v2, Layer(prefix), normed, attention_mask)
        y = norm(x, f"{prefix}.post_attention_layernorm")
        gate, up, down = (
            state[f"{prefix}.mlp.{name}_proj.weight"].T for name in ("gate", "up", "down")
        )
        x = x + (torch.nn.functional.silu(y @ gate) * (y @ up)) @ down
    return norm(x, "model.norm") @ state["lm_head.weight"].T


@pytest.mark.parametrize("ratio", [1, 2, 4, 8])
@pytest.mark.parametrize("backend", ["eager", "sdpa", "flex_attention"])
def test_equals_the_plain_model(backend, ratio):
    model = tiny_diff_v2(num_attention_heads=16, num_key_value_heads=8 // ratio, head_dim=4)
    model.set_attn_implementation(backend)
    ids = tiny_ids(2, 12)
    with torch.no_grad():
        found = model(input_ids=ids).logits
        expected = plain_model(model, ids)
    assert (found - expected).abs().max() < 1e-5


@pytest.mark.parametrize("backend", ["eager", "sdpa"])
def test_gradients(backend):
    """Every parameter's, against those of the plain model."""
    model = tiny_diff_v2().double()
    model.set_attn_implementation(backend)
    ids = tiny_ids(2, 12)
    weight = torch.randn(2, 12, model.config.vocab_size, dtype=torch.float64)
    names = [name for name, _ in model.named_parameters()]
    parameters = list(model.parameters())
    found = torch.autograd.grad((model(input_ids=ids).logits * weight).sum(), parameters)
    expected = torch.autograd.grad((plain_model(model, ids, grad=True) * weight).sum(), parameters)
    for name, mine, theirs in zip(names, found, expected, strict=True):
        assert (mine - theirs).norm() < 1e-5 * theirs.norm(), name


@pytest.mark.parametrize("backend", ["eager", "sdpa", "flex_attention"])
def test_padding(backend):
    model = tiny_diff_v2()
    model.set_attn_implementation(backend)
    ids = tiny_ids(3, 12)
    mask = torch.ones_like(ids)
    mask[1, :4] = 0
    mask[2, 9:] = 0
    with torch.no_grad():
        found = model(input_ids=ids, attention_mask=mask).logits
        expected = plain_model(model, ids, mask)
    real = mask.bool()
    assert (found - expected)[real].abs().max() < 1e-5


def test_its_attention_is_that_of_the_module():
    """The modelling file repeats the formula, since it goes where quantdiff is not."""
    model = tiny_diff_v2().double()
    layer = model.model.layers[1].self_attn
    config = model.config
    module = DifferentialAttentionV2(
        config.hidden_size, config.num_attention_heads // 2, config.num_key_value_heads,
        config.head_dim, rotary="half", backend="eager",
    ).double()  # fmt: skip
    module.load_state_dict(layer.state_dict(), strict=True)
    x = torch.randn(2, 9, config.hidden_size, dtype=torch.float64)
    cos, sin = plain.table(9, module)
    both = [torch.cat([t, t], -1)[None].double() for t in (cos, sin)]
    mask = torch.full((9, 9), -torch.inf, dtype=torch.float64).triu(1)[None, None]
    with torch.no_grad():
        found, _ = layer(x, position_embeddings=both, attention_mask=mask)
        torch.testing.assert_close(found, module(x, (cos, sin)), rtol=0, atol=1e-10)


@pytest.mark.parametrize("backend", ["eager", "sdpa", "flex_attention"])
def test_generation_with_and_without_a_cache(backend):
    model = tiny_diff_v2()
    model.set_attn_implementation(backend)
    ids = tiny_ids(2, 7)
    options = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 2, "eos_token_id": None}
    cached = model.generate(ids, use_cache=True, **options)
    assert torch.equal(cached, model.generate(ids, use_cache=False, **options))
    assert cached.shape == (2, 19)


@pytest.mark.parametrize("backend", ["eager", "sdpa", "flex_attention"])
def test_generation_from_padded_prompts(backend):
    model = tiny_diff_v2()
    model.set_attn_implementation(backend)
    ids = tiny_ids(2, 7)
    mask = torch.ones_like(ids)
    mask[1, :3] = 0
    options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 2, "eos_token_id": None}
    both = model.generate(ids, attention_mask=mask, **options)
    alone = model.generate(ids[1:, 3:], **options)
    assert torch.equal(both[1, 3:], alone[0])


@pytest.mark.parametrize("tied", [False, True])
def test_saved_and_loaded_again(tmp_path, tied):
    model = tiny_diff_v2(tie_word_embeddings=tied)
    ids = tiny_ids()
    with torch.no_grad():
        before = model(input_ids=ids).logits
    save_tiny(tmp_path, model)
    assert ("lm_head.weight" in load_file(tmp_path / "model.safetensors")) != tied
    for loaded in (
        quantdiff.load(tmp_path, device="cpu")[0],
        AutoModelForCausalLM.from_pretrained(tmp_path),
        DiffV2ForCausalLM.from_pretrained(tmp_path),
    ):
        assert isinstance(loaded, DiffV2ForCausalLM)
        with torch.no_grad():
            assert torch.equal(loaded(input_ids=ids).logits, before)
        shared = loaded.lm_head.weight is loaded.model.embed_tokens.weight
        assert shared == tied


def test_the_folder_loads_without_quantdiff(tmp_path):
    model = tiny_diff_v2()
    folder = save_tiny(tmp_path / "model", model)
    ids = tiny_ids()
    with torch.no_grad():
        save_file({"ids": ids, "logits": model(input_ids=ids).logits}, tmp_path / "told")
    code = f"""
import sys
sys.modules["quantdiff"] = None  # importing it fails
import torch
from safetensors.torch import load_file
from transformers import AutoModel, AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained({str(folder)!r}, trust_remote_code=True)
told = load_file({str(tmp_path / "told")!r})
with torch.no_grad():
    assert torch.equal(model(input_ids=told["ids"]).logits, told["logits"])
tokens = model.generate(told["ids"], max_new_tokens=3, do_sample=False, pad_token_id=2)
assert tokens.shape[1] == told["ids"].shape[1] + 3
model.save_pretrained({str(tmp_path / "again")!r})
base = AutoModel.from_pretrained({str(folder)!r}, trust_remote_code=True)
with torch.no_grad():
    assert base(input_ids=told["ids"]).last_hidden_state.shape[:2] == told["ids"].shape
base.save_pretrained({str(tmp_path / "base")!r})
AutoModel.from_pretrained({str(tmp_path / "base")!r}, trust_remote_code=True)
"""
    environment = {"HF_HOME": str(tmp_path / "home"), "PATH": "", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    saved = {path.name for path in (tmp_path / "again").iterdir()}
    assert {"modeling_diff_v2.py", "configuration_diff_v2.py"} <= saved


def test_gradient_checkpointing_changes_nothing():
    ids = tiny_ids()
    gradients = []
    for checkpointing in (False, True):
        model = tiny_diff_v2().train()
        if checkpointing:
            model.gradient_checkpointing_enable()
        model(input_ids=ids, labels=ids).loss.backward()
        gradients.append({name: p.grad for name, p in model.named_parameters()})
    assert all(g is not None for g in gradients[0].values())
    for name, gradient in gradients[0].items():
        assert torch.equal(gradient, gradients[1][name]), name


def test_it_trains():
    tokenizer = tiny_tokenizer()
    windows = text_windows("corpus:train", tokenizer, tokens=2048, seq_len=64).windows
    batch = torch.stack([w for w in windows if len(w) == 64][:16])
    model = tiny_diff_v2(initializer_range=0.02).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(30):
        loss = model(input_ids=batch, labels=batch).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0] - 2
    lambdas = [p for name, p in model.named_parameters() if "lambda_proj" in name]
    assert all(float(p.grad.abs().sum()) > 0 for p in lambdas)


def test_maps_are_returned_as_computed():
    model = tiny_diff_v2()
    model.set_attn_implementation("eager")
    with torch.no_grad():
        maps = model(input_ids=tiny_ids(2, 9), output_attentions=True).attentions
    heads = model.config.num_attention_heads
    assert [tuple(m.shape) for m in maps] == [(2, heads, 9, 9)] * 2
    torch.testing.assert_close(maps[0].sum(-1), torch.ones(2, heads, 9))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"num_attention_heads": 5}, "num_attention_heads = 5 must be even"),
        ({"num_attention_heads": 8, "num_key_value_heads": 3}, "num_key_value_heads = 3"),
        (
            {"num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 8},
            "num_key_value_heads = 2",
        ),
        ({"num_attention_heads": 8, "num_key_value_heads": 8}, "num_key_value_heads = 8"),
        ({"hidden_size": 256, "num_attention_heads": 15}, "num_attention_heads = 15 must be even"),
        ({"attention_dropout": 0.1}, "attention_dropout = 0.1"),
        ({"head_dim": 7}, "head_dim = 7 must be even"),
        ({"hidden_size": 33, "num_attention_heads": 4}, "hidden_size = 33"),
    ],
)
def test_a_config_that_does_not_fit(settings, words):
    with pytest.raises(ValueError, match=rf"^{words}"):
        DiffV2Config(**settings)


def test_defaults_keep_the_output_projection():
    config = DiffV2Config(hidden_size=256, num_attention_heads=16)
    assert (config.head_dim, config.num_key_value_heads) == (32, 8)
    model = build(DiffV2ForCausalLM, DiffV2Config(
        vocab_size=32, hidden_size=64, intermediate_size=32, num_hidden_layers=1,
        num_attention_heads=16, max_position_embeddings=64,
    ))  # fmt: skip
    attention = model.model.layers[0].self_attn
    assert tuple(attention.q_proj.weight.shape) == (128, 64)
    assert tuple(attention.o_proj.weight.shape) == (64, 64)
    assert tuple(attention.lambda_proj.weight.shape) == (8, 64)


def test_a_missing_lambda_is_named(tmp_path):
    save_tiny(tmp_path, tiny_diff_v2())
    path = Path(tmp_path / "model.safetensors")
    state = load_file(path)
    del state["model.layers.1.self_attn.lambda_proj.weight"]
    save_file(state, path, metadata={"format": "pt"})
    with pytest.raises(UsageError, match=r"layers\.1\.self_attn\.lambda_proj\.weight"):
        quantdiff.load(tmp_path, device="cpu")
