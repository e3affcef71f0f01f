"""A card says what is true of its folder."""

import importlib
import sys

from transformers import GenerationConfig

import quantdiff
from quantdiff.export.card import percent
from quantdiff.export.sidecar import read_sidecar
from tests.tiny import SETTINGS, build, tiny_diff_v2, tiny_llama

SCHEME = quantdiff.Scheme("attention_logits", 4)


def card(folder):
    return (folder / "README.md").read_text()


def test_activations_are_told_of_where_they_are_quantized(save):
    options = {"measure": lambda copy: {"perplexity": 2.0, "data": "a text"}}
    assert "Measured on a text.\n" in card(save(tiny_llama(), name="a", **options))
    told = card(save(tiny_llama(), name="b", schemes=[SCHEME], **options))
    assert "Measured on a text, activations quantized as below.\n" in told


def test_small_losses_do_not_read_as_none(save):
    measured = {"kl": 2.5e-6, "agreement": 0.99996, "data": "a text"}
    told = card(save(tiny_llama(), measure=lambda copy: measured))
    assert "| KL from the source, nats a token |  | 2.500e-06 |" in told
    assert "| same top-1 token as the source |  | 99.996% |" in told
    shares = {0.0: "0.00%", 4e-7: "0.00004%", 0.5: "50.00%", 0.97123: "97.12%", 1.0: "100.00%"}
    assert {share: percent(share) for share in shares} == shares


def test_how_many_weights_share_a_scale(save):
    """Rows of 32 and 64 weights have groups of 32; those of 48 have none."""
    grouped = save(tiny_llama(intermediate_size=64), "ct-w4a16", name="grouped")
    assert "as `ct-w4a16` with one scale for 32 weights. Linear" in card(grouped)
    assert read_sidecar(grouped).content["export"]["group"] == 32
    rows = save(tiny_llama(intermediate_size=48), "ct-w4a16", name="rows")
    assert "as `ct-w4a16` with one scale a row. Linear" in card(rows)
    assert "a group" not in card(rows)
    assert "one scale" not in card(save(tiny_llama(), "bnb-nf4", name="other"))


CODE = """
from transformers import LlamaConfig, LlamaForCausalLM


class OwnConfig(LlamaConfig):
    model_type = "own_llama"


class OwnForCausalLM(LlamaForCausalLM):
    config_class = OwnConfig
"""


def test_code_in_the_folder_has_to_be_trusted(save, tmp_path, monkeypatch):
    (tmp_path / "own_llama.py").write_text(CODE)
    monkeypatch.syspath_prepend(tmp_path)
    own = importlib.import_module("own_llama")
    try:
        own.OwnConfig.register_for_auto_class()
        own.OwnForCausalLM.register_for_auto_class("AutoModelForCausalLM")
        model = build(own.OwnForCausalLM, own.OwnConfig(**SETTINGS))
        model.generation_config = GenerationConfig()
        folder = save(model, name="own")
    finally:
        del sys.modules["own_llama"]
    assert (folder / "own_llama.py").is_file()
    trusting = 'from_pretrained("{}", dtype="auto", trust_remote_code=True)'
    assert trusting.format("own") in card(folder)
    assert trusting.format("v2") in card(save(tiny_diff_v2(), name="v2"))
    model = tiny_llama()
    model.config.auto_map = {"AutoConfig": "somebody/elsewhere--configuration.Config"}
    assert "trust_remote_code" not in card(save(model, name="plain"))
