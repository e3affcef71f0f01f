"""Every format: what is loaded again is what was computed before saving."""

import copy
import importlib.util
import json

import pytest
import torch
from safetensors.torch import load_file
from transformers import BitsAndBytesConfig, LlamaForCausalLM

import quantdiff
from quantdiff.errors import MissingExtraError, UsageError
from quantdiff.export.copies import copy_of
from quantdiff.export.formats import FORMATS, find_format
from quantdiff.export.passage import last_logits
from quantdiff.export.sidecar import LOGITS, QUANTIZED_LOGITS, read_sidecar
from tests.export.conftest import MODELS
from tests.tiny import save_tiny, tiny_diff_v2, tiny_ids, tiny_llama, tiny_tokenizer

GPTQ = importlib.util.find_spec("gptqmodel") is not None
HERE = [
    pytest.param(name, marks=pytest.mark.skipif(not GPTQ, reason="gptqmodel is not installed"))
    if name.startswith("gptq")
    else name
    for name in FORMATS
]
WINDOWS = list(tiny_ids(4, 48))
SCHEME = quantdiff.Scheme("attention_logits", 4)
CPU = torch.device("cpu")
INDEX = "model.safetensors.index.json"


def snapshot(model):
    """All that an export could leave on a live model."""
    return (
        {name: value.clone() for name, value in model.state_dict().items()},
        copy.deepcopy(model.config.to_dict()),
        model.generation_config.to_dict(),
        model.training,
        [(p.requires_grad, p.data_ptr()) for p in model.parameters()],
        [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()],
        [sorted(vars(m)) for m in model.modules()],
    )


def same(before, after):
    assert before[1:] == after[1:]
    assert before[0].keys() == after[0].keys()
    for name, value in before[0].items():
        assert torch.equal(value.view(torch.uint8), after[0][name].view(torch.uint8)), name


def reloaded(folder, own=True):
    sidecar = read_sidecar(folder)
    if own:
        chosen = find_format(sidecar.content["export"]["format"])
        dtype = getattr(torch, sidecar.content["export"]["dtype"])
        return chosen.load(folder, CPU, dtype, True)
    return quantdiff.load(folder, device="cpu")[0]


def check(folder):
    """Both loaders give the logits from before saving, to the bit."""
    sidecar = read_sidecar(folder)
    ids = sidecar.content["passage"]["ids"]
    assert torch.equal(last_logits(reloaded(folder), ids), sidecar.logits[LOGITS])
    last = QUANTIZED_LOGITS if sidecar.schemes else LOGITS
    assert torch.equal(last_logits(reloaded(folder, own=False), ids), sidecar.logits[last])


def read_by_vllm(folder):
    """Names of the files that it takes for weights: all, but what an index leaves out."""
    names = {path.name for path in folder.glob("*.safetensors")}
    if not (folder / INDEX).is_file():
        return names
    return names & set(json.loads((folder / INDEX).read_text())["weight_map"].values())


@pytest.mark.parametrize("format_", HERE)
@pytest.mark.parametrize("family", MODELS)
def test_what_is_loaded_is_what_was_computed(save, family, format_):
    number = list(FORMATS).index(format_)
    # It packs 32 at once.
    sizes = {"intermediate_size": 64, "head_dim": 32} if format_.startswith("gptq") else {}
    model = MODELS[family](tie_word_embeddings=number % 2 == 0, **sizes)
    if number % 3 == 0:  # after a pass, and a quantized one
        with torch.no_grad(), quantdiff.fake_quantize(model, SCHEME):
            model(tiny_ids())
    before = snapshot(model)
    folder = save(model, format_, schemes=[SCHEME], calibration=WINDOWS)
    same(before, snapshot(model))
    check(folder)
    assert read_by_vllm(folder) == {"model.safetensors"}


# Half of the widest gap between two values of the grid, relative to the largest value; scales of
# ct-w4a16 may clip, and ct-w8a8 rounds the inputs too.
STEPS = {
    "bf16": 2**-8, "fp16": 2**-11, "bnb-int8": 0.5 / 127, "bnb-nf4": 0.152, "bnb-fp4": 0.167,
    "quanto-int8": 0.5 / 127, "quanto-int4": 0.5 * 2 / 15, "quanto-int2": 0.5 * 2 / 3,
    "quanto-fp8": 2**-4, "ct-w8a16": 0.5 / 127, "ct-w4a16": 0.3, "ct-w8a8": 1 / 127,
    "gptq-8bit": 0.1, "gptq-4bit": 0.5,
}  # fmt: skip


@pytest.mark.parametrize("format_", HERE)
def test_weights_are_those_of_the_source_but_for_rounding(save, format_):
    """Rows here are no multiples of the blocks that some share a scale in."""
    width = 160 if format_.startswith("gptq") else 172
    model = tiny_llama(hidden_size=128, intermediate_size=width, head_dim=32)
    folder = save(model, format_, calibration=WINDOWS)
    found = 0
    for loaded in (reloaded(folder), reloaded(folder, own=False)):
        last_logits(loaded, [1, 2])  # compressed-tensors unpacks in the first pass
        for name, module in model.model.named_modules():
            if isinstance(module, torch.nn.Linear):
                unit = torch.eye(module.in_features, dtype=loaded.dtype)
                with torch.no_grad():
                    effective = loaded.model.get_submodule(name)(unit).float().T
                gap = (effective - module.weight).abs().max() / module.weight.abs().max()
                assert gap <= 1.1 * STEPS[format_], name
                found += 1
    assert found == 2 * 14


@pytest.mark.parametrize("format_", ["bnb-int8", "bnb-nf4", "quanto-int4", "ct-w4a16", "fp16"])
def test_bf16_with_biases_and_grouped_queries(save, format_):
    model = tiny_llama(attention_bias=True, mlp_bias=True, num_key_value_heads=1).bfloat16()
    for name, value in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(value)
    folder = save(model, format_)
    check(folder)
    stored = "float16" if format_ == "fp16" else "bfloat16"
    assert json.loads((folder / "config.json").read_text())["dtype"] == stored
    loaded, _ = quantdiff.load(folder, device="cpu")
    assert loaded.dtype == getattr(torch, stored)


@pytest.mark.parametrize("format_", ["bf16", "bnb-nf4", "quanto-int4", "quanto-int8", "ct-w4a16"])
@pytest.mark.parametrize("tied", [True, False])
def test_shards_fall_anywhere_and_ties_stay(save, format_, tied):
    folder = save(tiny_llama(tie_word_embeddings=tied), format_, max_shard_size="1KB")
    shards = {path.name for path in folder.glob("model-*.safetensors")}
    assert len(shards) > 10
    assert read_by_vllm(folder) == shards
    check(folder)
    for own in (True, False):
        model = reloaded(folder, own)
        assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied
    index = json.loads((folder / INDEX).read_text())
    assert ("lm_head.weight" in index["weight_map"]) != tied


def test_weights_that_are_only_rounded_are_those_of_the_source(save):
    model = tiny_llama()
    folder = save(model, "bf16")
    stored = load_file(folder / "model.safetensors")
    assert stored.keys() == model.state_dict().keys()
    index = json.loads((folder / INDEX).read_text())
    assert index["weight_map"].keys() == stored.keys()
    assert index["metadata"]["total_size"] == sum(value.nbytes for value in stored.values())
    for name, value in model.state_dict().items():
        assert torch.equal(stored[name], value.bfloat16())
    assert torch.equal(stored["lm_head.weight"], model.lm_head.weight.bfloat16())


def test_double_quantization_is_smaller(save):
    model = tiny_llama(hidden_size=256, intermediate_size=512, head_dim=64)
    once = save(model, "bnb-nf4", "once")
    twice = save(model, "bnb-nf4", "twice", double_quant=True)
    check(twice)
    sizes = [read_sidecar(folder).content["size"]["bytes"] for folder in (once, twice)]
    assert sizes[1] < sizes[0]


@pytest.mark.parametrize("format_", HERE)
def test_rows_of_zeros(save, format_):
    """An all-zero tensor quantizes to finite zeros, whose scales are finite."""
    model = tiny_llama(intermediate_size=64, head_dim=32)
    with torch.no_grad():
        model.model.layers[0].mlp.gate_proj.weight.zero_()
        model.model.layers[1].self_attn.q_proj.weight[3].zero_()
    folder = save(model, format_, calibration=WINDOWS)
    check(folder)
    from quantdiff.export.contents import check_tensors

    assert check_tensors(folder)[1] == []


def test_eager_attention_of_the_live_model_stays_out(save):
    """A loader gives the default implementation, so that is what is compared."""
    model = tiny_llama(attn_implementation="eager")
    check(save(model, "bnb-nf4"))
    assert model.config._attn_implementation == "eager"


def test_folders_are_complete(save):
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    model = tiny_diff_v2()
    model.generation_config.max_new_tokens = 17
    folder = save(model, "ct-w8a16")
    assert {path.name for path in folder.iterdir()} == {
        "README.md", "config.json", "configuration_diff_v2.py", "generation_config.json",
        "model.safetensors", INDEX, "modeling_diff_v2.py", "quantdiff.json",
        "quantdiff.safetensors", "tokenizer.json", "tokenizer_config.json",
    }  # fmt: skip
    assert json.loads((folder / "generation_config.json").read_text())["max_new_tokens"] == 17
    quantdiff.export(model, tokenizer, folder, format="bf16", overwrite=True, check=False)
    assert (folder / "chat_template.jinja").is_file()
    assert "quantization_config" not in json.loads((folder / "config.json").read_text())
    check(folder)


def test_a_generation_config_is_exported_as_it_was_published(save, tmp_path):
    """Many have a temperature beside greedy decoding, which transformers warns of alone."""
    source = save_tiny(tmp_path / "source")
    path = source / "generation_config.json"
    settings = json.loads(path.read_text()) | {"temperature": 0.6, "do_sample": False}
    path.write_text(json.dumps(settings))
    model, _ = quantdiff.load(source, device="cpu")
    before = snapshot(model)
    exported = json.loads((save(model) / "generation_config.json").read_text())
    assert exported["temperature"] == 0.6
    same(before, snapshot(model))


def test_nothing_is_computed_before_it_is_saved(save, monkeypatch):
    """As a first pass may do to weights in place; what was written is from before."""
    from quantdiff.models.bnb import StoredLinear4bit

    plain, passes = StoredLinear4bit.forward, []

    def forward(self, x):
        out = plain(self, x)
        self.weight.data = self.weight.data.flip(0)
        passes.append(self)
        return out

    with monkeypatch.context() as patch:
        patch.setattr(StoredLinear4bit, "forward", forward)
        folder = save(tiny_llama(), "bnb-nf4")
    assert len(passes) == 14
    check(folder)


def test_what_is_quantized_is_refused(save):
    model = tiny_llama()
    config = BitsAndBytesConfig(load_in_8bit=True)
    packed = copy_of(model, quantization_config=config, device_map={"": "cpu"})
    with pytest.raises(UsageError, match="q_proj of this model is quantized already"):
        save(packed)


def test_refusals_come_before_any_work(save, tmp_path):
    model = tiny_llama()
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(UsageError, match="'int4' is unknown; known: bf16"):
        save(model, "int4")
    if GPTQ:
        with pytest.raises(UsageError, match="gptq-4bit is calibrated on text"):
            save(model, "gptq-4bit")
    else:
        with pytest.raises(MissingExtraError, match=r"gptqmodel is needed.*quantdiff\[gptq\]"):
            save(model, "gptq-4bit")
    with pytest.raises(UsageError, match="ct-w8a8 has no double quantization"):
        save(model, "ct-w8a8", double_quant=True)
    with pytest.raises(UsageError, match="no transformers model"):
        save(torch.nn.Linear(2, 2))
    with pytest.raises(UsageError, match="no language-model head"):
        save(model.model)
    with pytest.raises(UsageError, match="absmax comes from a calibration"):
        save(model, schemes=[quantdiff.Scheme("attention_logits", 4, "absmax")])
    with pytest.raises(UsageError, match="the weights are what the format quantizes"):
        save(model, schemes=[quantdiff.Scheme("weights", 4, granularity="channel")])
    with pytest.raises(UsageError, match="the tokenizer gives the token"):
        save(LlamaForCausalLM(copy.deepcopy(model.config).__class__(vocab_size=20, hidden_size=16,
             intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)))  # fmt: skip
    with torch.no_grad():
        model.lm_head.weight[0, 0] = 1e6
    with pytest.raises(UsageError, match=r"lm_head.weight of this model has values beyond fp16"):
        save(model, "fp16")
    assert sorted(tmp_path.rglob("*")) == before


def test_a_quanto_folder_alone_is_opened_by_name(save, tmp_path):
    """Without the sidecar it is a folder of optimum-quanto like any other."""
    folder = save(tiny_llama().bfloat16(), "quanto-int4")
    wanted = read_sidecar(folder)
    for name in ("quantdiff.json", "quantdiff.safetensors"):
        (folder / name).unlink()
    with pytest.raises(UsageError, match="for bfloat16 and cannot be loaded in float32"):
        quantdiff.load(folder, device="cpu")
    model, _ = quantdiff.load(folder, device="cpu", dtype="bfloat16", attention="eager")
    assert model.config._attn_implementation == "eager"
    model, _ = quantdiff.load(folder, device="cpu", dtype="auto")
    ids = wanted.content["passage"]["ids"]
    assert torch.equal(last_logits(model, ids), wanted.logits[LOGITS])


def test_quanto_leaves_nothing_random(save):
    """Its own loader is not strict."""
    from safetensors.torch import save_file

    folder = save(tiny_llama(), "quanto-int8")
    for name in ("quantdiff.json", "quantdiff.safetensors", INDEX):
        (folder / name).unlink()
    weights = load_file(folder / "model.safetensors")
    del weights["model.norm.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UsageError, match=r"missing: model\.norm\.weight"):
        quantdiff.load(folder, device="cpu")


def test_models_loaded_from_folders(save, tmp_path):
    """As `quantdiff export` does it."""
    model, tokenizer = quantdiff.load(save_tiny(tmp_path / "source"), device="cpu")
    folder = save(model, "bnb-fp4")
    check(folder)
    assert read_sidecar(folder).content["model"]["name"] == str(tmp_path / "source")
    assert quantdiff.load(folder)[1]("the end").input_ids == tokenizer("the end").input_ids


def test_gpt2_has_no_linear_layers(save):
    """Its projections are Conv1D, which bitsandbytes alone quantizes."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(vocab_size=266, n_embd=32, n_layer=1, n_head=2, n_positions=128)
    model = GPT2LMHeadModel(config).eval()
    check(save(model, "bnb-nf4"))
    for format_ in ("quanto-int4", "ct-w8a16"):
        with pytest.raises(UsageError, match="has no linear layers that"):
            save(model, format_, "other")


def test_embeddings_are_as_the_config_says(save):
    untied = tiny_llama(tie_word_embeddings=True)
    untied.lm_head.weight = torch.nn.Parameter(untied.lm_head.weight.detach() + 1)
    with pytest.raises(UsageError, match=r"says tie_word_embeddings=True, but.*set it to False"):
        save(untied)
    untied.config.tie_word_embeddings = False
    check(save(untied))
    tied = tiny_llama()
    tied.lm_head.weight = tied.model.embed_tokens.weight
    with pytest.raises(UsageError, match=r"says tie_word_embeddings=False, but.*set it to True"):
        save(tied, name="other")


def test_weights_under_other_names_are_refused(save):
    """Such as adapters: the copy would have random weights in their place."""
    model = tiny_llama()
    torch.nn.utils.parametrizations.weight_norm(model.model.layers[0].mlp.up_proj)
    with pytest.raises(UsageError, match=r"do not fit.*missing: model\.layers\.0\.mlp\.up_proj"):
        save(model)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("bits", "group"), [(4, 32), (4, None), (8, None)])
def test_scales_of_the_least_error(dtype, bits, group):
    from quantdiff.export.compressed import _scales

    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(6, 64, generator=generator)
    weight[2] *= 1e-3
    weight[3, 7] = 30  # an outlier
    weight = weight.to(dtype)
    scale = _scales(weight, bits, group)
    width = group or 64
    assert scale.shape == (6, 64 // width)
    assert scale.dtype == dtype
    high = 2 ** (bits - 1) - 1
    values = weight.float().reshape(-1, width)

    def error(step):
        step = step.to(dtype).float().reshape(-1, 1)
        return ((values / step).round().clamp(-high - 1, high) * step - values).square().sum(1)

    largest = values.abs().amax(1)
    assert (error(scale) <= error(largest / high)).all()
    if bits == 4:
        for share in (0.9, 0.8, 0.7, 0.6):
            assert (error(scale) <= error(largest * share / high)).all()
        assert (error(scale) < 0.98 * error(largest / high)).any()


@pytest.mark.parametrize("accelerate", [True, False])
def test_a_copy_lies_on_the_device_of_the_model(monkeypatch, accelerate):
    """Which is a GPU by its word alone; without accelerate transformers builds nothing on it."""
    model, gpu, real, find = tiny_llama(), torch.device("cuda:0"), *(
        LlamaForCausalLM.from_pretrained, importlib.util.find_spec,
    )  # fmt: skip
    placed, moved = [], []

    def build(*given, device_map=None, **options):
        placed.append(device_map)
        return real(*given, **options)

    def find_spec(name, *given):
        return find(name, *given) if accelerate or name != "accelerate" else None

    def device(self):
        return gpu if self is model or placed == [{"": gpu}] else CPU

    monkeypatch.setattr(importlib.util, "find_spec", find_spec)
    monkeypatch.setattr(LlamaForCausalLM, "from_pretrained", build)
    monkeypatch.setattr(LlamaForCausalLM, "device", property(device))
    monkeypatch.setattr(LlamaForCausalLM, "to", lambda _, to: moved.append(to))
    copy_of(model)
    assert (placed, moved) == (([{"": gpu}], []) if accelerate else ([None], [gpu]))


def test_the_copy_leaves_no_memory_behind_when_it_is_checked(save, monkeypatch):
    """The check is another process, which cannot have what this one keeps of a GPU's."""
    steps = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: steps.append("emptied"))
    save(tiny_llama(), report=steps.append)
    assert steps[-2:] == ["computing the passage", "emptied"]
