"""Folders of official weights to transformers models and back."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import DiffLlamaForCausalLM

import quantdiff
from quantdiff.errors import UsageError
from quantdiff.models import convert_folder, convert_state
from quantdiff.models.conversion import CONVERSIONS
from tests.models.test_conversion import KINDS, InPlace, model, official
from tests.tiny import save_tiny, tiny_diffllama, tiny_ids, tiny_tokenizer

IDS = tiny_ids(2, 12)
LLAMA = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 64,
    "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 266, "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0, "max_position_embeddings": 128, "tie_word_embeddings": False,
    "torch_dtype": "float32", "bos_token_id": 0, "eos_token_id": 1,
}  # fmt: skip
HEADS = {"official-v1": (8, 4, 8), "official-v2": (8, 2, 16)}  # at ratio 2


def prefix(layer):
    return f"model.layers.{layer}.self_attn."


def decoder(kind, ratio=2, **options):
    """A tiny transformers model of the official weights' sizes."""
    if kind == "official-v2":
        options |= {"rms_norm_eps": 1e-5}
    return model(kind, ratio, rope_theta=500000.0, **options)


def official_state(kind, tied=False):
    """A whole model's weights, with those of official modules where its attention was."""
    state = decoder(kind, tie_word_embeddings=tied).state_dict()
    state = {name: value for name, value in state.items() if "self_attn" not in name}
    for layer in range(2):
        module = official(kind, 2, layer).float()
        scale = 1 + 0.1 * layer  # no two layers the same
        state |= {prefix(layer) + n: scale * v for n, v in module.state_dict().items()}
    if tied:
        del state["lm_head.weight"]
    return state


def write(folder, state, **settings):
    """A folder as somebody leaves it who trained with the official modules."""
    folder.mkdir()
    save_file(dict(state), folder / "model.safetensors")
    kept = {key: value for key, value in (LLAMA | settings).items() if value is not None}
    (folder / "config.json").write_text(json.dumps(kept))
    tiny_tokenizer().save_pretrained(folder)
    return folder


def official_logits(kind, state, ratio=2, **options):
    """Of official modules with these weights, in a decoder with the rest of them."""
    transformer = decoder(kind, ratio, **options)
    state = {name: value.float() for name, value in state.items()}
    found = transformer.load_state_dict(state, strict=False)
    assert all("self_attn" in name or "lm_head" in name for name in found.missing_keys)
    for layer, block in enumerate(transformer.model.layers):
        module = official(kind, ratio, layer).float()
        begin = prefix(layer)
        module.load_state_dict(
            {n.removeprefix(begin): v for n, v in state.items() if n.startswith(begin)}
        )
        block.self_attn = InPlace(module)
    with torch.no_grad():
        return transformer(input_ids=IDS).logits


def logits(folder):
    loaded, _ = quantdiff.load(folder, device="cpu")
    with torch.no_grad():
        return loaded(input_ids=IDS).logits


def distance(found, expected):
    """Root mean square difference, relative to the spread of the expected values."""
    return ((found - expected).square().mean().sqrt() / expected.std()).item()


def weights(folder):
    found = {}
    for path in folder.glob("*.safetensors"):
        found |= load_file(path)
    return found


def settings_of(folder):
    return json.loads((folder / "config.json").read_text())


def identical(found, expected):
    assert set(found) == set(expected)
    for name, value in found.items():
        assert value.dtype == expected[name].dtype, name
        assert torch.equal(value, expected[name]), name


def refused(*arguments, **options):
    """The one sentence of a refusal; nothing is left behind."""
    out = Path(arguments[1])
    before = sorted(out.parent.rglob("*"))
    with pytest.raises(UsageError) as caught:
        convert_folder(*arguments, **options)
    assert sorted(out.parent.rglob("*")) == before
    message = str(caught.value)
    assert "\n" not in message
    return message


@pytest.fixture(autouse=True, scope="module")
def _one_thread():
    """Tensors of these sizes wait for one another's threads longer than they compute."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """Official folders of both versions; leave them as they are."""
    folder = tmp_path_factory.mktemp("official")
    return {kind: write(folder / kind, official_state(kind)) for kind in KINDS}


@pytest.fixture(scope="module")
def converted(sources, tmp_path_factory):
    """The same as transformers models; leave them as they are."""
    folder = tmp_path_factory.mktemp("converted")
    for kind, target in KINDS.items():
        result = convert_folder(sources[kind], folder / target, target, from_=kind)
        assert result.check.layers == (0, 1)
        assert result.check.difference < 1e-13
        assert (result.query_heads, result.kv_heads, result.head_dim) == HEADS[kind]
    return {kind: folder / target for kind, target in KINDS.items()}


@pytest.mark.parametrize("kind", KINDS)
class TestOfficialToTransformers:
    def test_the_logits_are_those_of_the_official_modules(self, kind, sources, converted):
        assert (
            distance(logits(converted[kind]), official_logits(kind, weights(sources[kind]))) < 1e-6
        )

    def test_the_config_says_what_the_weights_are(self, kind, converted):
        found = settings_of(converted[kind])
        heads = ("num_attention_heads", "num_key_value_heads", "head_dim")
        assert tuple(found[entry] for entry in heads) == HEADS[kind]
        assert found["model_type"] == KINDS[kind]
        name = {"official-v1": "DiffLlamaForCausalLM", "official-v2": "DiffV2ForCausalLM"}[kind]
        assert found["architectures"] == [name]
        assert found["rope_parameters"]["rope_theta"] == 500000.0
        assert found["rms_norm_eps"] == 1e-5
        assert found["bos_token_id"] == 0
        code = {path.name for path in converted[kind].glob("*.py")}
        assert len(code) == (2 if kind == "official-v2" else 0)

    def test_back_again(self, kind, sources, converted, tmp_path):
        there, before = weights(converted[kind]), weights(sources[kind])
        assert convert_folder(converted[kind], tmp_path / "back", kind).lossy == ""
        back = weights(tmp_path / "back")
        if kind == "official-v1":
            for layer in range(2):  # what was folded stays so
                before[f"{prefix(layer)}out_proj.weight"] = there[f"{prefix(layer)}o_proj.weight"]
                before[f"{prefix(layer)}subln.weight"] = torch.ones(16)
        identical(back, before)
        assert distance(official_logits(kind, back), logits(converted[kind])) < 1e-6
        result = convert_folder(tmp_path / "back", tmp_path / "again", KINDS[kind])
        assert result.lossy == ""  # a norm of ones folds nothing
        identical(weights(tmp_path / "again"), there)
        assert settings_of(tmp_path / "again") == settings_of(converted[kind])

    def test_bf16_weights_are_rounded_once(self, kind, tmp_path):
        """Norms and λ in fp32, as some trainings keep them; every parameter keeps its dtype."""
        state = official_state(kind)
        state = {n: v if v.dim() == 1 else v.bfloat16() for n, v in state.items()}
        source = write(tmp_path / "a", state)
        result = convert_folder(source, tmp_path / "b", KINDS[kind], from_=kind)
        assert result.dtypes == ("bfloat16", "float32")
        assert result.check.difference < 1e-13
        found = weights(tmp_path / "b")
        assert all(value.dtype == state[name].dtype for name, value in found.items()
                   if "o_proj" not in name)  # fmt: skip
        if kind == "official-v1":
            for layer in range(2):
                unfolded = state[f"{prefix(layer)}out_proj.weight"]
                norm = state[f"{prefix(layer)}subln.weight"].double()
                exact = unfolded.double() * norm.repeat(4)
                folded = found[f"{prefix(layer)}o_proj.weight"]
                assert torch.equal(folded, exact.bfloat16())
                # The norm rounded to bf16 first would give other weights.
                assert not torch.equal(folded, unfolded * norm.bfloat16().repeat(4))
            assert 1e-4 < result.check.stored < 2e-2
        else:
            assert result.check.stored == result.check.difference
            assert distance(logits(tmp_path / "b"), official_logits(kind, state)) < 1e-6
        loaded, _ = quantdiff.load(tmp_path / "b", device="cpu", dtype="auto")
        assert loaded.dtype == torch.bfloat16

    def test_shards(self, kind, sources, converted, tmp_path):
        folder = tmp_path / "shards"
        shutil.copytree(sources[kind], folder)
        state = load_file(folder / "model.safetensors")
        (folder / "model.safetensors").unlink()
        shards = {}
        for number in range(3):
            shard = f"model-{number}.safetensors"
            part = {n: v for i, (n, v) in enumerate(state.items()) if i % 3 == number}
            save_file(part, folder / shard)
            shards |= dict.fromkeys(part, shard)
        index = folder / "model.safetensors.index.json"
        index.write_text(json.dumps({"metadata": {}, "weight_map": shards}))
        convert_folder(folder, tmp_path / "out", KINDS[kind], from_=kind)
        identical(weights(tmp_path / "out"), weights(converted[kind]))

        request = (folder, tmp_path / "no", KINDS[kind])
        (folder / "model-1.safetensors").unlink()
        assert "lacks model-1.safetensors" in refused(*request, from_=kind)
        save_file({"model.norm.weight": torch.ones(64)}, folder / "model-1.safetensors")
        assert "which its index lists" in refused(*request, from_=kind)
        index.unlink()
        assert "3 safetensors files" in refused(*request, from_=kind)

    @pytest.mark.parametrize("copied", [True, False])
    def test_tied_embeddings(self, kind, copied, tmp_path):
        state = official_state(kind, tied=True)
        whole = dict(state)
        if copied:
            state["lm_head.weight"] = state["model.embed_tokens.weight"].clone()
        source = write(tmp_path / "a", state, tie_word_embeddings=None if not copied else True)
        convert_folder(source, tmp_path / "b", KINDS[kind], from_=kind)
        assert "lm_head.weight" not in weights(tmp_path / "b")
        loaded, _ = quantdiff.load(tmp_path / "b", device="cpu")
        assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
        expected = official_logits(kind, whole, tie_word_embeddings=True)
        assert distance(logits(tmp_path / "b"), expected) < 1e-6
        convert_folder(tmp_path / "b", tmp_path / "c", kind)
        assert settings_of(tmp_path / "c")["tie_word_embeddings"]
        assert "lm_head.weight" not in weights(tmp_path / "c")

    def test_a_copy_of_tied_embeddings_that_is_none(self, kind, tmp_path):
        state = official_state(kind)
        source = write(tmp_path / "a", state, tie_word_embeddings=True)
        message = refused(source, tmp_path / "b", KINDS[kind], from_=kind)
        assert "tie_word_embeddings" in message


@pytest.mark.parametrize("ratio", [1, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_transformers_to_official(kind, ratio, tmp_path):
    """The same logits, and back to the same files."""
    target = KINDS[kind]
    source = save_tiny(tmp_path / "a", decoder(kind, ratio).bfloat16())
    result = convert_folder(source, tmp_path / "b", kind)
    assert result.check.difference < 1e-13
    assert result.dtypes == ("bfloat16",)
    found = settings_of(tmp_path / "b")
    assert found["model_type"] == kind
    assert (found["num_heads"], found["num_kv_heads"]) == (4, 4 // ratio)
    assert not {"num_attention_heads", "auto_map", "architectures"} & set(found)
    assert not list((tmp_path / "b").glob("*.py"))
    state = weights(tmp_path / "b")
    assert distance(official_logits(kind, state, ratio), logits(source)) < 1e-6
    convert_folder(tmp_path / "b", tmp_path / "c", target)
    identical(weights(tmp_path / "c"), weights(source))
    assert settings_of(tmp_path / "c") == settings_of(source)


def test_the_eps_of_a_diffllama_comes_back(tmp_path):
    """Its norms share one, which the official code has as 1e-5: the folder says so."""
    tiny = tiny_diffllama(hidden_size=64, num_attention_heads=8, rms_norm_eps=1e-6)
    source = save_tiny(tmp_path / "a", tiny)
    convert_folder(source, tmp_path / "b", "official-v1")
    assert settings_of(tmp_path / "b")["subln_eps"] == 1e-6
    convert_folder(tmp_path / "b", tmp_path / "c", "diffllama")
    assert settings_of(tmp_path / "c") == settings_of(source)


def test_frequencies_of_an_old_checkpoint_are_left_out(sources, converted, tmp_path):
    state = weights(sources["official-v1"])
    state |= {f"{prefix(layer)}rotary_emb.inv_freq": torch.ones(4) for layer in range(2)}
    convert_folder(write(tmp_path / "a", state), tmp_path / "b", "diffllama")
    identical(weights(tmp_path / "b"), weights(converted["official-v1"]))


def test_companions_and_card(tmp_path):
    source = write(tmp_path / "a", official_state("official-v1"))
    (source / "chat_template.jinja").write_text("{{ messages }}")
    (source / "generation_config.json").write_text('{"max_new_tokens": 7}')
    (source / "LICENSE").write_text("mine")
    (source / "README.md").write_text("# my model")
    (source / "modeling_mine.py").write_text("import this")
    (source / "training_args.bin").write_bytes(b"")
    out = tmp_path / "b"
    result = convert_folder(source, out, "diffllama", command="quantdiff convert a --to diffllama")
    assert {path.name for path in out.iterdir()} == {
        "LICENSE", "README.md", "README.source.md", "chat_template.jinja", "config.json",
        "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json",
    }  # fmt: skip
    for name in ("LICENSE", "chat_template.jinja", "generation_config.json", "tokenizer.json"):
        assert (out / name).read_bytes() == (source / name).read_bytes()
    assert (out / "README.source.md").read_text() == "# my model"
    modes = {path.stat().st_mode for path in out.iterdir()}
    assert len(modes) == 1
    card = (out / "README.md").read_text()
    for words in (
        f"from `{source}` (official-v1) to diffllama",
        "8 query heads (both maps counted) and 4 key-value heads of width 8",
        f"{result.parameters:,} parameters in float32",
        "norm was folded into the output projection",
        "rounded once, to the weights' dtype (float32)",
        "cannot be unfolded",
        f"by at most {result.check.difference:.1e} in fp64",
        "quantdiff convert a --to diffllama",
        f"torch {torch.__version__}",
        "[README.source.md]",
    ):
        assert words in card, words
    _, tokenizer = quantdiff.load(out, device="cpu")
    assert tokenizer("the end").input_ids == tiny_tokenizer()("the end").input_ids

    convert_folder(out, tmp_path / "c", "official-v1")
    card = (tmp_path / "c" / "README.md").read_text()
    assert "folded" not in card
    assert "`subln_eps`" in card


class TestVerification:
    """A wrong result is found before anybody sees it."""

    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize("back", [False, True])
    def test_a_wrong_order(self, kind, back, sources, converted, tmp_path, monkeypatch):
        """Rotary channels left as they are: all shapes fit, everything loads."""
        ways = (kind, KINDS[kind])
        source = sources[kind]
        if back:
            ways, source = ways[::-1], converted[kind]
        right = CONVERSIONS[ways]

        def wrong(state, heads):
            moved = right.attention(state, heads)
            moved["q_proj.weight"] = state["q_proj.weight"]
            return moved

        monkeypatch.setitem(CONVERSIONS, ways, replace(right, attention=wrong))
        message = refused(source, tmp_path / "out", ways[1], from_=ways[0])
        assert "attention of layer 0" in message
        assert "outputs differ" in message

    def test_a_norm_that_was_not_folded(self, sources, tmp_path, monkeypatch):
        ways = ("official-v1", "diffllama")
        right = CONVERSIONS[ways]

        def wrong(state, heads):
            ones = {"subln.weight": torch.ones_like(state["subln.weight"])}
            return right.attention(state | ones, heads)

        monkeypatch.setitem(CONVERSIONS, ways, replace(right, attention=wrong))
        assert "outputs differ" in refused(sources["official-v1"], tmp_path / "out", "diffllama")

    def test_swapped_vectors(self, sources, tmp_path, monkeypatch):
        ways = ("official-v1", "diffllama")
        right = CONVERSIONS[ways]

        def wrong(state, heads):
            moved = right.attention(state, heads)
            return moved | {"lambda_q1": moved["lambda_q2"], "lambda_q2": moved["lambda_q1"]}

        monkeypatch.setitem(CONVERSIONS, ways, replace(right, attention=wrong))
        message = refused(sources["official-v1"], tmp_path / "out", "diffllama")
        assert "lambda_q1 has changed" in message

    @pytest.mark.parametrize("what", ["changed", "lost"])
    def test_damaged_files(self, what, sources, tmp_path, monkeypatch):
        save = DiffLlamaForCausalLM.save_pretrained

        def damaged(self, folder, **options):
            save(self, folder, **options)
            state = load_file(Path(folder) / "model.safetensors")
            if what == "changed":
                state["model.layers.1.mlp.up_proj.weight"][0, 0] += 1e-6
            else:
                del state["model.layers.1.mlp.up_proj.weight"]
            save_file(state, Path(folder) / "model.safetensors", metadata={"format": "pt"})

        monkeypatch.setattr(DiffLlamaForCausalLM, "save_pretrained", damaged)
        message = refused(sources["official-v1"], tmp_path / "out", "diffllama")
        assert message.startswith("model.layers.1.mlp.up_proj.weight was not written")

    def test_nan_in_the_source(self, tmp_path):
        state = official_state("official-v1")
        state[f"{prefix(1)}k_proj.weight"][3, 3] = float("nan")
        source = write(tmp_path / "a", state)
        assert f"{prefix(1)}k_proj.weight of the source holds NaN" in refused(
            source, tmp_path / "b", "diffllama"
        )


class TestRefusals:
    """Each in one sentence; `refused` sees to it that nothing is left."""

    def test_kinds(self, sources, converted, tmp_path):
        v1, v2, out = sources["official-v1"], sources["official-v2"], tmp_path / "out"
        assert "known: official-v1" in refused(v1, out, "llama")
        assert "'v1' is unknown" in refused(v1, out, "diffllama", from_="v1")
        assert "no conversion from 'official-v1' to 'diff_v2'" in refused(v1, out, "diff_v2")
        message = refused(v2, out, "diff_v2")
        assert "the same names and shapes" in message
        assert "--from" in message
        message = refused(v1, out, "official-v1", from_="diffllama")
        assert "not of the kind diffllama, but official-v1: subln.weight" in message
        message = refused(v1, out, "diff_v2", from_="official-v2")
        assert "not of the kind official-v2, but official-v1" in message
        # What was converted already is not converted once more by mistake.
        message = refused(converted["official-v2"], out, "diff_v2", from_="official-v2")
        assert "these weights are diff_v2, not official-v2" in message

    def test_folders(self, sources, tmp_path):
        v1 = sources["official-v1"]
        assert "is no folder" in refused(tmp_path / "none", tmp_path / "out", "diffllama")
        empty = tmp_path / "empty"
        empty.mkdir()
        assert "has no config.json" in refused(empty, tmp_path / "out", "diffllama")
        shutil.copy(v1 / "config.json", empty)
        assert "has no weights" in refused(empty, tmp_path / "out", "diffllama")
        torch.save({}, empty / "pytorch_model.bin")
        message = refused(empty, tmp_path / "out", "diffllama")
        assert "pytorch_model.bin only; a pickle can run any code" in message
        (empty / "model.safetensors").write_bytes((v1 / "model.safetensors").read_bytes()[:900])
        assert "truncated" in refused(empty, tmp_path / "out", "diffllama")
        (empty / "config.json").write_text("{")
        assert "is not JSON" in refused(empty, tmp_path / "out", "diffllama")

    def test_out(self, sources, tmp_path):
        v1, out = sources["official-v1"], tmp_path / "out"
        assert "is the source itself" in refused(v1, v1 / ".", "diffllama", overwrite=True)
        out.mkdir()
        (out / "README.md").write_text("a project")
        assert "pass --overwrite" in refused(v1, out, "diffllama")
        assert "no model that could be replaced" in refused(v1, out, "diffllama", overwrite=True)
        assert (out / "README.md").read_text() == "a project"
        model = tmp_path / "model"
        convert_folder(v1, model, "diffllama")
        (model / "notes.txt").write_text("mine")
        assert "pass --overwrite" in refused(v1, model, "diffllama")
        convert_folder(
            sources["official-v2"], model, "diff_v2", from_="official-v2", overwrite=True
        )
        assert settings_of(model)["model_type"] == "diff_v2"
        convert_folder(v1, model, "diffllama", overwrite=True)
        assert not list(model.glob("*.py"))
        assert (model / "notes.txt").read_text() == "mine"
        quantdiff.load(model, device="cpu")

    @pytest.mark.parametrize(
        ("settings", "words"),
        [
            ({"num_attention_heads": 6}, "num_attention_heads = 6; the weights hold 4"),
            ({"num_attention_heads": 8, "num_key_value_heads": 2}, "num_key_value_heads = 2"),
            ({"num_heads": 8}, "num_heads = 8; the weights hold 4"),
            ({"head_dim": 16}, "head_dim = 16, the weights say 8"),
            ({"hidden_size": 32}, "hidden_size = 32, the weights say 64"),
            ({"num_hidden_layers": 3}, "num_hidden_layers = 3, the weights say 2"),
            ({"vocab_size": 300}, "vocab_size = 300, the weights say 266"),
            ({"intermediate_size": 49}, "intermediate_size = 49, the weights say 48"),
            ({"rms_norm_eps": None}, "lacks rms_norm_eps"),
            ({"rms_norm_eps": 1e-6}, "one eps for all norms"),
            ({"rope_theta": None}, "neither rope_theta nor rope_parameters"),
            ({"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5"),
            ({"lambda_init_depth_offset": -1}, "depth -1, and DiffLlama"),
            ({"lambda_init_depth_offset": "x"}, "whole number"),
            ({"quantization_config": {"bits": 4}}, "is quantized"),
            ({"attention_dropout": 0.1}, "attention_dropout"),
            ({"attention_bias": True}, "missing: model.layers.0.self_attn.k_proj.bias"),
            ({"hidden_act": 3}, "config.json of"),
        ],
    )
    def test_config(self, settings, words, sources, tmp_path):
        source = tmp_path / "a"
        source.mkdir()
        (source / "model.safetensors").symlink_to(sources["official-v1"] / "model.safetensors")
        kept = {k: v for k, v in (LLAMA | settings).items() if v is not None}
        (source / "config.json").write_text(json.dumps(kept))
        assert words in refused(source, tmp_path / "b", "diffllama")

    @pytest.mark.parametrize(
        "settings",
        [
            {"num_attention_heads": 4, "num_key_value_heads": 2},  # as the official code counts
            {"num_attention_heads": 8, "num_key_value_heads": 4},  # as transformers does
            {"num_heads": 4, "num_kv_heads": 2, "head_dim": 8},
            {"rope_theta": None, "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
            {"hidden_size": None, "vocab_size": None, "num_hidden_layers": None},
            {"lambda_init_depth_offset": 0, "subln_eps": 1e-5},
        ],
    )
    def test_what_is_no_contradiction(self, settings, sources, converted, tmp_path):
        source = write(tmp_path / "a", weights(sources["official-v1"]), **settings)
        convert_folder(source, tmp_path / "b", "diffllama")
        read = settings_of(tmp_path / "b")
        read.pop("rope_theta", None)
        assert read == settings_of(converted["official-v1"])

    def test_depth(self, sources, converted, tmp_path):
        out = tmp_path / "out"
        message = refused(sources["official-v1"], out, "diffllama", depth_offset=-1)
        assert "trained with λ_init of depth -1" in message
        assert "to be kept and not corrected" in message
        convert_folder(sources["official-v1"], tmp_path / "yes", "diffllama", depth_offset=0)
        message = refused(converted["official-v1"], out, "official-v1", depth_offset=-1)
        assert "its depth offset is 0" in message
        message = refused(
            sources["official-v2"], out, "diff_v2", from_="official-v2", depth_offset=1
        )
        assert "V2 has none" in message

    @pytest.mark.parametrize(
        ("change", "words"),
        [
            ({f"{prefix(1)}q_proj.bias": torch.zeros(64)}, "q_proj.bias is no parameter"),
            ({f"{prefix(1)}out_proj.bias": torch.zeros(64)}, "out_proj.bias is no parameter"),
            ({f"{prefix(0)}q_norm.weight": torch.zeros(8)}, "q_norm.weight is no parameter"),
            ({f"{prefix(0)}v_proj.weight": None}, "v_proj.weight is missing"),
            ({"model.norm.weight": None}, "missing: model.norm.weight"),
            ({"model.layers.0.mlp.more": torch.zeros(2)}, "unexpected: model.layers.0.mlp.more"),
            ({"model.norm.weight": torch.zeros(8)}, "of another shape: model.norm.weight"),
            ({"model.norm.weight": torch.zeros(64, dtype=torch.int8)}, "torch.int8"),
        ],
    )
    def test_weights(self, change, words, tmp_path):
        state = official_state("official-v1") | change
        state = {name: value for name, value in state.items() if value is not None}
        source = write(tmp_path / "a", state)
        assert words in refused(source, tmp_path / "b", "diffllama")

    def test_no_differential_attention(self, tmp_path):
        state = official_state("official-v1")
        rest = {name: value for name, value in state.items() if "self_attn" not in name}
        source = write(tmp_path / "a", rest)
        assert "no differential attention" in refused(source, tmp_path / "b", "diffllama")

    def test_other_names_around_the_modules(self, tmp_path):
        state = official_state("official-v1")
        moved = {n.replace("model.layers.", "blocks."): v for n, v in state.items()}
        message = refused(write(tmp_path / "a", moved), tmp_path / "b", "diffllama")
        assert "blocks.0.self_attn." in message
        assert "model.layers.0.self_attn." in message

    def test_layers_of_other_head_counts(self, tmp_path):
        state = official_state("official-v1")
        for name in ("k_proj", "v_proj"):
            state[f"{prefix(1)}{name}.weight"] = torch.zeros(64, 64)
        message = refused(write(tmp_path / "a", state), tmp_path / "b", "diffllama")
        assert f"{prefix(1)[:-1]} has other heads" in message

    def test_a_diffllama_that_official_modules_cannot_hold(self, tmp_path):
        biased = save_tiny(tmp_path / "a", tiny_diffllama(attention_bias=True))
        assert "bias is no parameter" in refused(biased, tmp_path / "out", "official-v1")
        wide = save_tiny(tmp_path / "b", tiny_diffllama(head_dim=16))
        message = refused(wide, tmp_path / "out", "official-v1")
        assert "4 query heads of width 16 are not hidden_size = 32 wide" in message

    def test_a_product_beyond_fp16(self):
        state = official_state("official-v1")
        state = {name: value.half() for name, value in state.items()}
        state[f"{prefix(0)}out_proj.weight"] *= 3e4
        state[f"{prefix(0)}subln.weight"] *= 1e4
        with pytest.raises(UsageError, match="beyond the range of torch"):
            convert_state(state, "official-v1", "diffllama")
