"""Schemes and static ranges survive the disk, in every model that is opened with them."""

import json
import warnings

import numpy as np
import pytest
import torch

import quantdiff
from quantdiff.errors import SchemesLeftOutWarning, UsageError
from quantdiff.export.passage import last_logits
from quantdiff.export.ranges import RangeTable
from quantdiff.export.sidecar import QUANTIZED_LOGITS, read_sidecar
from tests.export.conftest import MODELS
from tests.tiny import tiny_diffllama, tiny_ids, tiny_llama

STATIC = quantdiff.Scheme("attention_logits", 4, "percentile:99", "head")


def calibrated(model):
    batches = [{"input_ids": tiny_ids(2, 24, seed=seed)} for seed in range(3)]
    return quantdiff.calibrate(model, batches, source="batches")


@pytest.mark.parametrize("family", MODELS)
def test_static_ranges_are_those_of_the_table(save, family):
    model = MODELS[family]()
    table = calibrated(model)
    folder = save(model, "bnb-nf4", schemes=[STATIC], table=table)
    sidecar = read_sidecar(folder)
    assert sidecar.schemes == (STATIC,)
    assert sidecar.table is not None
    assert set(sidecar.table.sites) == {site.name for site in table.sites}
    for site in table.sites:
        for stored, wanted in zip(sidecar.table.range(STATIC, site.name),
                                  table.range(STATIC, site.name), strict=True):  # fmt: skip
            assert stored.dtype == np.float32
            assert np.array_equal(stored, wanted)
    calibration = sidecar.content["calibration"]
    assert calibration["data"]["fingerprint"] == table.data["fingerprint"]
    assert calibration["partial"] is False
    assert sidecar.content["causal"] is True
    loaded, _ = quantdiff.load(folder, device="cpu")
    ids = sidecar.content["passage"]["ids"]
    assert torch.equal(last_logits(loaded, ids), sidecar.logits[QUANTIZED_LOGITS])


def test_static_ranges_of_every_site(save):
    sites = ("linear_inputs", "keys", "values", "hidden_states")
    batches = [{"input_ids": tiny_ids(2, 24, seed=seed)} for seed in range(3)]
    model = tiny_llama()
    table = quantdiff.calibrate(model, batches, sites=sites)
    schemes = [
        quantdiff.Scheme("linear_inputs", 8, "percentile:99.9"),
        quantdiff.Scheme("keys", 8, "absmax", "channel", symmetric=False),
        quantdiff.Scheme("values", 8, "mse", layers=(1,)),
        quantdiff.Scheme("hidden_states", 8, "absmax"),
        STATIC,
    ]
    for format_ in ("bf16", "ct-w8a8"):
        folder = save(model, format_, name=format_, schemes=schemes, table=table)
        sidecar = read_sidecar(folder)
        for scheme in schemes:
            kinds = table.more[scheme.site].sites if scheme.site in sites else table.sites
            for site in kinds:
                if scheme.layers is None or site.layer in scheme.layers:
                    ends = (t.range(scheme, site.name) for t in (sidecar.table, table))
                    assert np.array_equal(*map(np.stack, ends))
        assert sidecar.content["causal"] is True
        loaded, _ = quantdiff.load(folder, device="cpu")
        ids = sidecar.content["passage"]["ids"]
        assert torch.equal(last_logits(loaded, ids), sidecar.logits[QUANTIZED_LOGITS])
        assert not torch.equal(sidecar.logits["logits"], sidecar.logits[QUANTIZED_LOGITS])


def test_schemes_of_other_sites_and_of_some_layers(save):
    schemes = [
        quantdiff.Scheme("attention_logits", 4, layers=(1,)),
        quantdiff.Scheme("keys", 4),
        quantdiff.Scheme("values", 4, symmetric=False),
        quantdiff.Scheme("linear_inputs", 8, granularity="token"),
        quantdiff.Scheme("hidden_states", 8),
    ]
    for format_ in ("bnb-nf4", "ct-w4a16", "quanto-int4"):
        folder = save(tiny_llama(), format_, name=format_, schemes=schemes)
        sidecar = read_sidecar(folder)
        assert sidecar.schemes == tuple(schemes)
        loaded, _ = quantdiff.load(folder, device="cpu")
        ids = sidecar.content["passage"]["ids"]
        assert torch.equal(last_logits(loaded, ids), sidecar.logits[QUANTIZED_LOGITS])
        assert not torch.equal(sidecar.logits["logits"], sidecar.logits[QUANTIZED_LOGITS])
    card = (folder / "README.md").read_text()
    assert "attention logits at 4 bits, dynamic range per tensor, symmetric, in layer 1;" in card


def test_the_schemes_are_in_force_and_can_be_left(save):
    model = tiny_llama()
    folder = save(model, "bf16", schemes=[quantdiff.Scheme("attention_logits", 2)])
    with warnings.catch_warnings():
        warnings.simplefilter("error", SchemesLeftOutWarning)
        loaded, _ = quantdiff.load(folder, device="cpu", dtype="float32")
    with pytest.warns(SchemesLeftOutWarning, match="attention_logits at 2 bits") as seen:
        plain, _ = quantdiff.models.load(folder, device="cpu")
    assert [warning.filename for warning in seen] == [__file__]
    with torch.no_grad():
        wanted = plain(tiny_ids()).logits
        assert not torch.equal(loaded(tiny_ids()).logits, wanted)
        with quantdiff.record(loaded) as recorder:  # a recording sees the logits as they were
            loaded(tiny_ids())
        assert recorder.profile().attention_logits.count > 0
        loaded.fake_quantizer.__exit__(None, None, None)
        assert torch.equal(loaded(tiny_ids()).logits, wanted)


def test_without_schemes_nothing_is_quantized(save):
    folder = save(tiny_llama())
    loaded, _ = quantdiff.load(folder, device="cpu")
    assert loaded.fake_quantizer is None
    assert loaded.dtype == torch.bfloat16  # as it was measured, and not the CPU's default
    assert list(read_sidecar(folder).logits) == ["logits"]


def test_a_model_that_was_loaded_so_can_be_exported_again(save):
    first = save(tiny_diffllama(), "bf16", "a", schemes=[quantdiff.Scheme("attention_logits", 3)])
    loaded, _ = quantdiff.load(first, device="cpu")
    second = save(loaded, "bf16", "b")
    names = ("config.json", "model.safetensors")
    assert all((first / name).read_bytes() == (second / name).read_bytes() for name in names)


def test_ranges_of_another_model_are_refused():
    table = RangeTable("mine", {"layers.0": (0, 4)}, {})
    table.check_model({"layers.0": (0, 4)})
    with pytest.raises(UsageError, match=r"another model \(mine\): layers\.1 is absent there"):
        table.check_model({"layers.0": (0, 4), "layers.1": (1, 4)})
    with pytest.raises(UsageError, match="layer 0 with 4 query heads there, layer 0 with 8"):
        table.check_model({"layers.0": (0, 8)})
    with pytest.raises(UsageError, match=r"have nothing for layers\.0"):
        table.range(STATIC, "layers.0")


def test_the_table_of_another_model_is_refused_before_any_work(save, tmp_path):
    table = calibrated(tiny_llama(num_attention_heads=8, head_dim=8))
    with pytest.raises(UsageError, match="calibration is of another model"):
        save(tiny_llama(), schemes=[STATIC], table=table)
    assert list(tmp_path.iterdir()) == []


def test_so_is_that_of_one_with_the_same_heads(save, tmp_path):
    table = calibrated(tiny_llama(intermediate_size=64))
    with pytest.raises(UsageError, match=r"another model \(LlamaForCausalLM: parameters \d+, and"):
        save(tiny_llama(), schemes=[STATIC], table=table)
    table = calibrated(tiny_llama())
    table.model["family"] = "mistral"
    with pytest.raises(UsageError, match="family mistral, and not llama"):
        save(tiny_llama(), schemes=[STATIC], table=table)
    assert list(tmp_path.iterdir()) == []


def test_a_newer_sidecar_is_refused(save):
    folder = save(tiny_llama())
    path = folder / "quantdiff.json"
    content = json.loads(path.read_text())
    content["format"] = "quantdiff.export/2"
    path.write_text(json.dumps(content))
    with pytest.raises(UsageError, match="format version 2, newer than"):
        quantdiff.load(folder)
