"""A card says what is true of its folder."""

import importlib
import sys

import numpy as np
from transformers import GenerationConfig

import quantdiff
from quantdiff.analysis.compare import Comparison
from quantdiff.export.card import percent
from quantdiff.export.sidecar import read_sidecar
from tests.tiny import SETTINGS, build, tiny_diff_v2, tiny_ids, tiny_llama

SCHEME = quantdiff.Scheme("attention_logits", 4)


def card(folder):
    return (folder / "README.md").read_text()


def test_activations_are_told_of_where_they_are_quantized(save):
    options = {"measure": lambda copy: {"perplexity": 2.0, "data": "a text"}}
    assert "Measured on a text.\n" in card(save(tiny_llama(), name="a", **options))
    told = card(save(tiny_llama(), name="b", schemes=[SCHEME], **options))
    assert "Measured on a text, activations quantized as below.\n" in told


def test_the_source_s_size_is_that_of_the_model_as_loaded(save):
    model = tiny_llama().bfloat16()
    count = model.num_parameters()
    told = card(save(model, "bnb-nf4"))
    assert "|  | source, as loaded (bfloat16) | this checkpoint |" in told
    assert f"| size of the weights | {2 * count / 1e6:,.1f} MB |" in told
    assert "| bits per weight | 16.00 |" in told
    assert "as loaded (float32)" in card(save(tiny_llama(), "bnb-nf4", name="other"))


def test_the_size_is_that_of_all_shards(save):
    model = tiny_llama()
    folder = save(model, max_shard_size="30KB")
    shards = list(folder.glob("model*.safetensors"))
    assert len(shards) > 2
    size = sum(path.stat().st_size for path in shards)
    assert read_sidecar(folder).content["size"]["bytes"] == size > 2 * model.num_parameters()
    assert f" | {size / 1e6:,.1f} MB |" in card(folder)


def test_what_is_kept_is_no_share_of_what_is_quantized(save):
    """Neither the output embedding nor DIFF V2's λ, which are linear modules too."""
    folder = save(tiny_diff_v2(), "bnb-nf4")
    attention, mlp = (64 + 16 + 16 + 32) * 32, 3 * 48 * 32
    quantized = 2 * (attention + mlp)
    rest = 2 * 266 * 32 + 2 * 2 * 32 + 5 * 32  # embeddings, λ, norms
    assert read_sidecar(folder).content["export"]["share"] == quantized / (quantized + rest)
    assert ": 50% of the parameters" in card(folder)


def test_where_static_ranges_come_from(save):
    """Also of an export that was made with the ranges of another one's sidecar."""
    model = tiny_llama()
    table = quantdiff.calibrate(model, [{"input_ids": tiny_ids(2, 24)}], source="batches")
    table.model["name"] = "first"
    options = {"schemes": [quantdiff.Scheme("attention_logits", 4, "absmax")]}
    first = save(model, name="a", table=table, **options)
    stored = read_sidecar(first)
    second = save(model, name="b", table=stored.table, **options)
    assert read_sidecar(second).content["calibration"] == stored.content["calibration"]
    told = "The static ranges are from 48 tokens of batches, calibrated on `first`.\n"
    assert told in card(first)
    assert told in card(second)


def test_a_calibration_that_was_cut_short(save):
    """The sidecar, the card and the report say so."""
    model = tiny_llama()
    batches = [{"input_ids": tiny_ids(1, 24, seed=seed)} for seed in range(3)]
    table = quantdiff.calibrate(model, batches, source="batches", stop=lambda: True)
    assert table.partial
    scheme = quantdiff.Scheme("attention_logits", 4, "absmax")
    folder = save(model, table=table, schemes=[scheme])
    assert read_sidecar(folder).content["calibration"]["partial"] is True
    assert "tokens of batches, cut short, calibrated on" in card(folder)
    (told,) = Comparison([folder]).provenance()["calibrated_on"]
    assert told.endswith(", cut short")


class BareTable:
    """Ranges whose origin nobody tells."""

    def range(self, scheme, name):
        return np.full(4, -9.0, np.float32), np.full(4, 9.0, np.float32)

    def check_model(self, sites, modules):
        pass


def test_ranges_of_unknown_origin(save):
    scheme = quantdiff.Scheme("attention_logits", 4, "absmax")
    folder = save(tiny_llama(), schemes=[scheme], table=BareTable())
    assert read_sidecar(folder).content["calibration"] is None
    assert "The static ranges are from" not in card(folder)


def test_small_losses_do_not_read_as_none(save):
    measured = {"kl": 2.5e-6, "agreement": 0.99996, "data": "a text"}
    told = card(save(tiny_llama(), measure=lambda copy: measured))
    assert "| KL from the source, nats per token |  | 2.500e-06 |" in told
    assert "| same top-1 token as the source |  | 99.996% |" in told
    shares = {0.0: "0.00%", 4e-7: "0.00004%", 0.5: "50.00%", 0.97123: "97.12%", 1.0: "100.00%"}
    assert {share: percent(share) for share in shares} == shares


def test_how_many_weights_share_a_scale(save):
    """Rows of 32 and 64 weights have groups of 32; those of 48 have none."""
    grouped = save(tiny_llama(intermediate_size=64), "ct-w4a16", name="grouped")
    assert "as `ct-w4a16` with one scale for 32 weights. Linear" in card(grouped)
    assert read_sidecar(grouped).content["export"]["group"] == 32
    rows = save(tiny_llama(intermediate_size=48), "ct-w4a16", name="rows")
    assert "as `ct-w4a16` with one scale per row. Linear" in card(rows)
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
