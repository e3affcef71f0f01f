"""Quantization with ranges from a calibration."""

import numpy as np
import pytest
import torch

from quantdiff import CalibrationTable, Scheme, UsageError, calibrate, fake_quantize
from quantdiff.quantization import attending
from tests.quantization.test_fake_quantize import MODELS, SITE, batch


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


def test_a_static_absmax_is_the_dynamic_range_of_the_same_text():
    """One sequence calibrated and quantized: the tensor range is the same."""
    model = MODELS["diff_v2"]()
    given = {name: value[:1] for name, value in batch().items()}
    table = calibrate(model, [given])
    with torch.no_grad():
        with fake_quantize(model, Scheme(SITE, 5, "absmax"), table=table):
            static = model(**given).logits
        with fake_quantize(model, Scheme(SITE, 5)):
            dynamic = model(**given).logits
    # The first layer is alike to the bit; later ones see what quantization made of it.
    assert (static - dynamic).abs().median() < 0.2 * dynamic.abs().median()


def test_a_table_survives_the_disk(tables, tmp_path):
    tables["llama"].save(tmp_path)
    model, loaded = MODELS["llama"](), CalibrationTable.load(tmp_path)
    outs = []
    for table in (tables["llama"], loaded):
        with torch.no_grad(), fake_quantize(model, Scheme(SITE, 4, "mse", "head"), table=table):
            outs.append(model(**batch()).logits)
    assert torch.equal(*outs)


def test_the_table_of_another_model_is_refused(tables):
    from tests.tiny import tiny_llama

    model = MODELS["llama"]()
    for other in (tiny_llama(num_hidden_layers=3), tiny_llama(num_attention_heads=4)):
        table = calibrate(other, [batch()])
        with pytest.raises(UsageError) as error:
            fake_quantize(model, Scheme(SITE, 8, "absmax"), table=table)
        assert "\n" not in str(error.value)
    fake_quantize(model, Scheme(SITE, 8, "absmax"), table=tables["llama"])
