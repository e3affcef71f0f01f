"""Signal and noise of attention against everything materialised."""

import numpy as np
import pytest
import torch

from quantdiff import RecordingError, Scheme, UsageError, calibrate, fake_quantize
from quantdiff.attention import layout
from quantdiff.quantization import Grid
from quantdiff.quantization.noise import NoiseRecorder, decibels
from tests import reference
from tests.quantization.plain_sites import LAYOUTS, cached
from tests.quantization.test_fake_quantize import MODELS, SITE, batch
from tests.standins import CAUSAL, IDS, D, MotifAttention, make

KINDS = ("logits", "branch 1", "branch 2", "difference")


def quantized(x, seen, scheme, table=None, site=None):
    if table is not None:
        least, most = (torch.from_numpy(end).double()[None, :, None, None]
                       for end in table.range(scheme, site))  # fmt: skip
        return Grid.of(least, most, scheme.bits, scheme.symmetric).quantize(x)
    over = {"tensor": (1, 2, 3), "head": (2, 3), "row": (3,)}[scheme.granularity]
    least = x.masked_fill(~seen, torch.inf).amin(over, keepdim=True)
    most = x.masked_fill(~seen, -torch.inf).amax(over, keepdim=True)
    return Grid.of(least, most, scheme.bits, scheme.symmetric).quantize(x)


def expected(q, k, scale, seen, scheme, *, pairs=None, lam=None, table=None, site=None):
    x = reference.logits(q, k, scale)  # (B, H, N, M)
    seen = seen.expand(x.shape)
    y = quantized(x, seen, scheme, table, site)
    maps = [torch.where(seen, s.masked_fill(~seen, -torch.inf).softmax(-1), 0.0) for s in (x, y)]
    found = {"logits": [torch.where(seen, s, 0.0) for s in (x, y)]}
    if pairs is None:
        return {**found, "softmax": maps}, None
    first, second = pairs
    for kind, heads in (("branch 1", sorted(set(first))), ("branch 2", sorted(set(second)))):
        found[kind] = [w[:, heads] for w in maps]
    found["difference"] = [w[:, first] - lam * w[:, second] for w in maps]
    noise = (maps[1] - maps[0]).square()
    lam = torch.as_tensor(lam)
    return found, (noise[:, first] + lam.square() * noise[:, second]).sum((0, 2, 3))


def check(site, found, independent):
    assert set(site.signal) == set(found)
    for kind, (plain, rounded) in found.items():
        signal = plain.square().sum((0, 2, 3)).numpy()
        noise = (rounded - plain).square().sum((0, 2, 3)).numpy()
        assert np.allclose(site.signal[kind], signal, rtol=1e-4)
        # One logit that rounds the other way moves the sum a little.
        assert np.allclose(site.noise[kind], noise, rtol=2e-2)
        assert site.ratio(kind) == pytest.approx(signal.sum() / noise.sum(), rel=1e-2)
    if independent is not None:
        share = site.noise["difference"].sum() / independent.sum()
        assert site.cancellation == pytest.approx(float(share), rel=2e-2)


@pytest.mark.parametrize("granularity", ["tensor", "head", "row"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout(module_case, name, granularity):
    model, scale, caught = module_case(name)
    given, kinds, lambdas = batch(), layout(name), []
    for n, module in model.named_modules():
        if n.endswith("lambda_proj"):
            module.register_forward_hook(lambda m, args, out: lambdas.append(out))
        elif hasattr(module, "lambda_q1"):
            first, second = (
                (getattr(module, f"lambda_q{i}") * getattr(module, f"lambda_k{i}")).sum().exp()
                for i in (1, 2)
            )
            lambdas.append((first - second + module.lambda_init).detach())
    scheme = Scheme(SITE, 4, granularity=granularity)
    with torch.no_grad(), NoiseRecorder(model, scheme) as recorder:
        model(**given)
    q, k, _, _, seen = cached(caught)
    k = k[:, kinds.key_heads(q.shape[1], k.shape[1])]
    (site,) = recorder.sites()
    if not kinds.differential:
        check(site, *expected(q, k, scale, seen, scheme))
        return
    (lam,) = lambdas
    if not kinds.own_keys:
        lam = torch.sigmoid(lam).transpose(1, 2)[..., None].double()
    pairs = kinds.pairs(q.shape[1])
    check(site, *expected(q, k, scale, seen, scheme, pairs=pairs, lam=lam))


def test_maps_in_calls_of_their_own_with_a_static_range():
    model = make(MotifAttention, layers=1, model_type="Motif")
    module = model.blocks[0].attn
    table = calibrate(model, [{"input_ids": IDS}])
    scheme = Scheme(SITE, 3, "percentile:95", "head")
    with torch.no_grad(), NoiseRecorder(model, scheme, table) as recorder:
        model(IDS)
    (site,) = recorder.sites()
    q, k = module.seen
    kinds = layout("adjacent")
    keys = k[:, kinds.key_heads(q.shape[1], k.shape[1])]
    lam = float(module.lam())
    found = expected(
        q, keys, D**-0.5, CAUSAL, scheme, pairs=kinds.pairs(q.shape[1]), lam=lam, table=table,
        site=site.name,
    )  # fmt: skip
    check(site, *found)
    assert site.heads["difference"] == kinds.pairs(q.shape[1])[0]


def test_beside_quantization_the_modules_see_what_was_rounded_before():
    model = MODELS["diffllama"]()
    scheme = Scheme(SITE, 3)
    sites = []
    for context in (fake_quantize(model), fake_quantize(model, scheme)):
        with torch.no_grad(), context, NoiseRecorder(model, scheme) as recorder:
            model(**batch())
        sites.append(recorder.sites())
    (a, b), (c, d) = sites
    assert np.array_equal(a.noise["logits"], c.noise["logits"])
    assert not np.array_equal(b.noise["logits"], d.noise["logits"])


def test_more_bits_less_noise():
    model = MODELS["llama"]()
    ratios = []
    for bits in (2, 4, 6, 8):
        with torch.no_grad(), NoiseRecorder(model, Scheme(SITE, bits)) as recorder:
            model(**batch())
        ratios.append(decibels(recorder.sites()[0].ratio("logits")))
    # A bit is worth 6.02 dB, for a range of 2ⁿ⁻¹ − 1 steps a little more at first.
    gains = np.diff(ratios)
    assert (gains[1:] > 10).all()
    assert (gains[1:] < 15).all()


def test_nan_is_refused():
    model = MODELS["llama"]()
    model.model.layers[0].self_attn.q_proj.weight.data[0] = float("nan")
    refused = pytest.raises(RecordingError, match="NaN or infinity")
    with torch.no_grad(), refused, NoiseRecorder(model, Scheme(SITE, 4)):
        model(**batch())


@pytest.mark.parametrize(
    "scheme",
    [Scheme("keys", 4), Scheme(SITE, 16), Scheme(SITE, 4, layers=(0,)), Scheme(SITE, 4, "mse")],
    ids=lambda scheme: f"{scheme.site} {scheme.bits} {scheme.range} {scheme.layers}",
)
def test_other_schemes_are_refused(scheme):
    with pytest.raises(UsageError, match=r"noise is measured of|comes from a calibration"):
        NoiseRecorder(MODELS["llama"](), scheme)
