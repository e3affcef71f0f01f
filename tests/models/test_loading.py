import subprocess
import sys
import time

import pytest
import torch
from torch.testing import assert_close
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaModel,
)
from transformers.utils import logging

from quantdiff.models import context_length, describe, load, vocabulary_size
from tests.tiny import (
    VOCABULARY,
    build,
    save_tiny,
    tiny_diffllama,
    tiny_ids,
    tiny_llama,
    tiny_tokenizer,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_tiny(tmp_path_factory.mktemp("tiny"))


@pytest.mark.parametrize("as_text", [True, False])
def test_a_folder_gives_the_saved_model_and_tokenizer(folder, as_text):
    model, tokenizer = load(str(folder) if as_text else folder, device="cpu")
    assert torch.equal(model(tiny_ids()).logits, tiny_llama()(tiny_ids()).logits)
    assert tokenizer("the end").input_ids == tiny_tokenizer()("the end").input_ids
    assert not model.training
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert describe(model)["name"] == str(folder)


def test_diffllama_loads(tmp_path):
    save_tiny(tmp_path, tiny_diffllama())
    model, _ = load(tmp_path, device="cpu", attention="eager")
    expected = tiny_diffllama(attn_implementation="eager")(tiny_ids()).logits
    assert torch.equal(model(tiny_ids()).logits, expected)
    assert describe(model)["family"] == "diffllama"


def test_shards_may_fall_anywhere(tmp_path):
    save_tiny(tmp_path, max_shard_size="4KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 3
    model, _ = load(tmp_path, device="cpu")
    assert torch.equal(model(tiny_ids()).logits, tiny_llama()(tiny_ids()).logits)


@pytest.mark.parametrize("drop_head", [True, False])
def test_tied_embeddings_are_no_missing_weights(tmp_path, drop_head):
    tied = tiny_llama(tie_word_embeddings=True)
    save_tiny(tmp_path, tied.model if drop_head else tied)
    model, _ = load(tmp_path, device="cpu")
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert torch.equal(model(tiny_ids()).logits, tied(tiny_ids()).logits)


@pytest.mark.parametrize(
    ("dtype", "loaded"),
    [
        (None, torch.float32),
        ("auto", torch.bfloat16),
        ("float16", torch.float16),
        ("bfloat16", torch.bfloat16),
        (torch.float64, torch.float64),
    ],
)
def test_dtype_on_a_cpu(tmp_path, dtype, loaded):
    save_tiny(tmp_path, tiny_llama().to(torch.bfloat16))
    model, _ = load(tmp_path, dtype=dtype, device=torch.device("cpu"))
    assert {parameter.dtype for parameter in model.parameters()} == {loaded}
    assert describe(model)["dtype"] == str(loaded).removeprefix("torch.")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_dtype_and_device_on_a_gpu(tmp_path):
    save_tiny(tmp_path, tiny_llama().to(torch.bfloat16))
    model, _ = load(tmp_path)
    assert model.dtype == torch.bfloat16
    assert model.device == torch.device("cuda", 0)
    assert model(tiny_ids().cuda()).logits.isfinite().all()


@pytest.mark.parametrize("attention", [None, "eager", "sdpa", "flex_attention"])
def test_attention_is_set_on_the_config(folder, attention):
    model, _ = load(folder, device="cpu", attention=attention)
    assert model.config._attn_implementation == (attention or "sdpa")


def test_implementations_agree(folder):
    eager, _ = load(folder, device="cpu", attention="eager")
    sdpa, _ = load(folder, device="cpu", attention="sdpa")
    assert_close(eager(tiny_ids()).logits, sdpa(tiny_ids()).logits, rtol=0, atol=1e-5)


def test_loading_leaves_the_global_state_alone(folder):
    verbosity, state, dtype = (
        logging.get_verbosity(),
        torch.get_rng_state(),
        torch.get_default_dtype(),
    )
    load(folder, device="cpu", dtype="bfloat16")
    assert logging.get_verbosity() == verbosity
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.get_default_dtype() == dtype


def test_tied_weights_count_once():
    tied, untied = tiny_llama(tie_word_embeddings=True), tiny_llama()
    assert (
        describe(untied)["parameters"] - describe(tied)["parameters"]
        == untied.lm_head.weight.numel()
    )
    assert describe(untied)["parameters"] == sum(w.numel() for w in untied.parameters())


def test_a_model_of_ones_own_can_be_described():
    assert describe(tiny_llama()) == {
        "name": "LlamaForCausalLM",
        "family": "llama",
        "parameters": sum(weight.numel() for weight in tiny_llama().parameters()),
        "dtype": "float32",
    }


def test_context_length_follows_the_family():
    gpt2 = GPT2Config(vocab_size=300, n_embd=16, n_layer=1, n_head=2, n_positions=64)
    bloom = BloomConfig(vocab_size=300, hidden_size=16, n_layer=1, n_head=2)
    assert context_length(tiny_llama(max_position_embeddings=77)) == 77
    assert context_length(build(GPT2LMHeadModel, gpt2)) == 64
    assert context_length(build(BloomForCausalLM, bloom)) is None  # ALiBi has no limit


def test_vocabulary_size_is_the_rows_of_the_embedding():
    model = tiny_llama()
    assert vocabulary_size(model) == VOCABULARY
    model.resize_token_embeddings(VOCABULARY + 8)
    assert vocabulary_size(model) == VOCABULARY + 8


def test_a_base_model_keeps_its_own_description(tmp_path):
    # LlamaModel has no head of its own; describe and the sizes need none.
    model = build(LlamaModel, tiny_llama().config)
    assert describe(model)["family"] == "llama"
    assert vocabulary_size(model) == VOCABULARY


def test_importing_the_package_is_light():
    check = (
        "import sys, quantdiff.models as models; "
        "assert not {'transformers', 'torch'} & set(sys.modules), 'heavy import'; "
        "assert 'load' in dir(models); models.known_names(); "
        "assert 'transformers' not in sys.modules"
    )
    start = time.perf_counter()
    subprocess.run([sys.executable, "-c", check], check=True, timeout=60)
    assert time.perf_counter() - start < 10
