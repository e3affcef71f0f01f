"""Quantization with ranges from a calibration."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import (
    InklingForCausalLM,
    InklingTextConfig,
    LagunaConfig,
    LagunaForCausalLM,
)

from quantdiff import CalibrationTable, Scheme, UsageError, calibrate, fake_quantize
from quantdiff.quantization import attending
from tests.hooks.test_differential import OWN
from tests.hooks.test_families import llama_with
from tests.quantization.test_fake_quantize import MODELS, SITE, batch
from tests.standins import MotifAttention
from tests.tiny import SETTINGS, build, tiny_ids, tiny_llama


@pytest.fixture(scope="module")
def tables():
    return {name: calibrate(build(), [batch()]) for name, build in MODELS.items()}


@pytest.mark.parametrize("granularity", ["tensor", "head"])
@pytest.mark.parametrize("observer", ["absmax", "percentile:99", "mse", "entropy"])
@pytest.mark.parametrize("name", MODELS)
def test_ranges_reach_the_logits(monkeypatch, tables, name, observer, granularity):
    model, table = MODELS[name](), tables[name]
    scheme = Scheme(SITE, 6, observer, granularity)
    used = {}

    def softmax_of(logits, scheme, table, site, *more):
        used[site] = real(logits, scheme, table, site, *more)
        return used[site]

    real = attending.softmax_of
    monkeypatch.setattr(attending, "softmax_of", softmax_of)
    with torch.no_grad():
        plain = model(**batch()).logits
        with fake_quantize(model, scheme, table=table):
            out = model(**batch()).logits
    assert torch.isfinite(out).all()
    assert not torch.equal(out, plain)
    for site, softmax in used.items():
        least, most = table.range(scheme, site)
        steps = np.maximum(np.abs(least), np.abs(most)).astype(np.float64) / 31
        assert np.allclose(softmax.grid.step[0, :, 0, 0], steps, rtol=1e-6)
        assert softmax.clips
        assert len(set(steps.tolist())) == (1 if granularity == "tensor" else len(steps))


@pytest.mark.parametrize("name", [*OWN, "halves"])
def test_a_static_absmax_is_the_dynamic_range_of_the_same_text(module_case, name):
    """One sequence calibrated and quantized: the tensor range is the same, to the bit."""
    model, _, caught = module_case(name)
    given = {name: value[:1] for name, value in batch().items()}
    table, outs = calibrate(model, [given]), []
    with torch.no_grad():
        model(**given)
        plain = caught["out"]
        for range_ in ("absmax", "dynamic"):
            with fake_quantize(model, Scheme(SITE, 5, range_), table=table):
                model(**given)
            outs.append(caught["out"])
    assert torch.equal(*outs)
    assert not torch.equal(plain, outs[0])


def attends_by_itself():
    """Its second layer makes calls of its own, of which nobody tells what belongs together."""
    return llama_with(MotifAttention(0))


def heads_by_layer():
    config = LagunaConfig(
        **SETTINGS, head_dim=8, num_attention_heads_per_layer=[4, 2], gating=False,
        mlp_layer_types=["dense"] * 2,
    )  # fmt: skip
    return build(LagunaForCausalLM, config)


def heads_by_kind():
    config = InklingTextConfig(
        **SETTINGS, head_dim=8, swa_num_attention_heads=2, swa_num_key_value_heads=1,
        swa_head_dim=8, layer_types=["hybrid", "hybrid_sliding"], d_rel=4, rel_extent=16,
        mlp_layer_types=["dense"] * 2,
    )  # fmt: skip
    return build(InklingForCausalLM, config)


@pytest.mark.filterwarnings("ignore::quantdiff.errors.UnknownLayoutWarning")
@pytest.mark.parametrize("make", [attends_by_itself, heads_by_layer, heads_by_kind])
def test_models_whose_config_does_not_tell_all_heads(make):
    """The table of one sequence has the dynamic ranges of a layer whose inputs are as they were."""
    model, given = make(), {"input_ids": tiny_ids(1, 12)}
    table = calibrate(model, [given], sites=("keys", "values"))
    schemes = Scheme(SITE, 5, "absmax", "head"), Scheme("keys", 4, "absmax", "head")
    with torch.no_grad():
        plain = model(**given).logits
        for scheme in schemes:
            static = replace(scheme, layers=(1,))
            outs = []
            for one in (static, replace(static, range="dynamic")):
                with fake_quantize(model, one, table=table):
                    outs.append(model(**given).logits)
            assert (outs[0] - outs[1]).abs().max() < 1e-5 * plain.abs().max()
            assert (plain - outs[0]).abs().max() > 1e-3 * plain.abs().max()
        with fake_quantize(model, *schemes, table=table):
            assert torch.isfinite(model(**given).logits).all()
    with pytest.raises(UsageError, match="of another model"):
        fake_quantize(tiny_llama(), schemes[0], table=table)


def test_a_table_survives_the_disk(tables, tmp_path):
    tables["llama"].save(tmp_path)
    model, loaded = MODELS["llama"](), CalibrationTable.load(tmp_path)
    outs = []
    for table in (tables["llama"], loaded):
        with torch.no_grad(), fake_quantize(model, Scheme(SITE, 4, "mse", "head"), table=table):
            outs.append(model(**batch()).logits)
    assert torch.equal(*outs)


def test_the_table_of_another_model_is_refused(tables):
    model = MODELS["llama"]()
    for other in (tiny_llama(num_hidden_layers=3), tiny_llama(num_attention_heads=4)):
        table = calibrate(other, [batch()])
        with pytest.raises(UsageError) as error:
            fake_quantize(model, Scheme(SITE, 8, "absmax"), table=table)
        assert "\n" not in str(error.value)
    fake_quantize(model, Scheme(SITE, 8, "absmax"), table=tables["llama"])
