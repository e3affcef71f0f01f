"""What must hold of quantized logits whatever the dtype, the range and the granularity."""

import itertools

import numpy as np
import pytest
import torch

from quantdiff import QuantizationError, Scheme, fake_quantize
from quantdiff.hooks.logits import Logits
from quantdiff.quantization import native
from quantdiff.quantization.attention import attend
from quantdiff.quantization.logits import softmax_of
from quantdiff.statistics import Visible
from tests import reference
from tests.quantization.test_fake_quantize import MODELS, SITE, Fixed, batch, materialised

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
RANGES = (
    ("dynamic", "tensor"), ("dynamic", "head"), ("dynamic", "row"),
    ("absmax", "tensor"), ("absmax", "head"),
)  # fmt: skip
SYMMETRIC = (True, False)
H, G, N, D = 4, 2, 17, 32
SCALE = D**-0.5


def over(ranges):
    return pytest.mark.parametrize(
        ("dtype", "range_", "symmetric"),
        list(itertools.product(DTYPES, ranges, SYMMETRIC)),
        ids=lambda x: "-".join(x) if isinstance(x, tuple) else str(x).replace("torch.", ""),
    )


every = over(RANGES)


@pytest.fixture(params=["compiled", "plain"], autouse=True)
def path(request, monkeypatch):
    if request.param == "plain":
        monkeypatch.setattr(native, "available", lambda: False)
    elif not native.available():
        pytest.skip("needs the compiled rounding")


def inputs(dtype, seed=0, size=2.0, sequences=2):
    generator = torch.Generator().manual_seed(seed)
    return [
        (torch.randn(sequences, h, N, D, generator=generator) * size).to(dtype) for h in (H, G, G)
    ]


def schemes(range_, symmetric, bits=(2, 4, 8)):
    return [Scheme(SITE, b, *range_, symmetric=symmetric) for b in bits]


def table_of(scheme, q, k, visible):
    """The ranges that a calibration on these very logits gives; None for a dynamic scheme."""
    if not scheme.static:
        return None
    x = reference.logits(q, k, SCALE)  # (B, H, N, M)
    column = torch.arange(x.shape[-1])
    seen = (column >= visible.start[:, None, :, None]) & (column < visible.stop[:, None, :, None])
    seen = seen.expand(x.shape)
    least = x.masked_fill(~seen, torch.inf).amin((0, 2, 3))
    most = x.masked_fill(~seen, -torch.inf).amax((0, 2, 3))
    if scheme.granularity == "tensor":
        least, most = least.min().expand(H), most.max().expand(H)
    return Fixed(least.float().numpy(), most.float().numpy())


def ours(q, k, v, scheme, visible, table=None, clipped=None):
    logits = Logits(q, k, SCALE, visible)
    return attend(q, k, v, softmax_of(logits, scheme, table, "here", clipped=clipped))


@every
def test_zeros_stay_zeros(dtype, range_, symmetric):
    q, k, v = inputs(dtype)
    visible = Visible.causal(2, N, N)
    q.zero_()
    for scheme in schemes(range_, symmetric):
        out = ours(q, k, v, scheme, visible, table_of(scheme, q, k, visible))
        mean = v.float().repeat_interleave(2, 1).cumsum(2) / torch.arange(1, N + 1)[:, None]
        rounding = 1e-5 if dtype == torch.float32 else 2e-2
        torch.testing.assert_close(out.float(), mean, rtol=rounding, atol=rounding)


@every
def test_what_is_masked_sets_no_range(dtype, range_, symmetric):
    q, k, v = inputs(dtype)
    visible = Visible.causal(2, N, N)
    visible.start[1] = 5
    visible.stop[1, :5] = 0
    for scheme in schemes(range_, symmetric):
        table = table_of(scheme, q, k, visible)
        clean = ours(q, k, v, scheme, visible, table)
        for wild in (200.0, torch.finfo(dtype).max):
            other = k.clone()
            other[1, :, :5] = wild
            assert torch.equal(ours(q, other, v, scheme, visible, table), clean)


@every
def test_padding_and_order_change_nothing(dtype, range_, symmetric):
    q, k, v = inputs(dtype, sequences=3)
    pad = 6
    visible = Visible.causal(3, N, N)
    visible.start[1] = pad
    visible.stop[1, :pad] = 0
    for scheme in schemes(range_, symmetric):
        table = table_of(scheme, q, k, visible)
        whole = ours(q, k, v, scheme, visible, table)
        turned = Visible(visible.start.flip(0), visible.stop.flip(0))
        back = ours(*(x.flip(0) for x in (q, k, v)), scheme, turned, table).flip(0)
        assert torch.equal(whole, back)
        short = [x[1:2, :, pad:] for x in (q, k, v)]
        alone = ours(*short, scheme, Visible.causal(1, N - pad, N - pad), table)
        right = [torch.nn.functional.pad(x, (0, 0, 0, pad)) for x in short]
        beyond = Visible.causal(1, N, N)
        beyond.stop[:, N - pad :] = 0
        after = ours(*right, scheme, beyond, table)[:, :, : N - pad]
        # The sums may run in another order, which moves a logit over a boundary now and then.
        for found in (whole[1:2, :, pad:], after):
            near = (found.float() - alone.float()).abs().amax(-1) < 1e-2
            assert near.float().mean() > 0.97


@every
def test_ranges_beyond_half_precision(dtype, range_, symmetric):
    """absmax − absmin is more than fp16 holds, and so are the logits."""
    q, k, v = inputs(dtype, size=250.0)
    visible = Visible.causal(2, N, N)
    assert reference.logits(q, k, SCALE).abs().max() > torch.finfo(torch.float16).max
    v = v / 250
    for scheme in schemes(range_, symmetric, (4,)):
        out = ours(q, k, v, scheme, visible, table_of(scheme, q, k, visible))
        assert torch.isfinite(out).all()
        # Each row is all but decided, so that its value is that of its largest logits.
        assert out.float().abs().amax() <= v.float().abs().amax() * 1.01


@every
def test_small_ranges_survive(dtype, range_, symmetric):
    q, k, v = inputs(dtype, size=0.03)
    visible = Visible.causal(2, N, N)
    top = reference.logits(q, k, SCALE).abs().max()
    assert top < 0.1
    for scheme in schemes(range_, symmetric, (8,)):
        table = table_of(scheme, q, k, visible)
        softmax = softmax_of(Logits(q, k, SCALE, visible), scheme, table, "here")
        if range_[1] != "row":
            assert 0 < softmax.grid.step.max() <= 2 * top / 127
        causal = torch.ones(N, N, dtype=torch.bool).tril()
        found = ours(q, k, v, scheme, visible, table).double()
        expected, near, _ = materialised(q, k, v, scheme, causal, SCALE, table)
        unsure = near.any(-1, keepdim=True)
        gap = torch.where(unsure, 0.0, (found - expected).abs()).max()
        assert gap <= (1e-5 if dtype == torch.float32 else 1e-2) * v.abs().max()


@over(RANGES[:2] + RANGES[3:])  # a row's grid is made as it is rounded
def test_the_sign_is_like_the_other(dtype, range_, symmetric):
    """Negated logits have the same steps on a symmetric grid, and mirrored ranges."""
    q, k, _ = inputs(dtype)
    visible = Visible.causal(2, N, N)
    for scheme in schemes(range_, symmetric):
        grids = []
        for sign in (1, -1):
            table = table_of(scheme, sign * q, k, visible)
            logits = Logits(sign * q, k, SCALE, visible)
            grids.append(softmax_of(logits, scheme, table, "here").grid)
        assert torch.equal(grids[0].step, grids[1].step)
        if not symmetric:
            both = grids[0].zero + grids[1].zero
            assert (both - grids[0].high).abs().max() <= 1


@over(RANGES[3:])  # a dynamic range holds all logits
def test_beyond_the_grid_is_its_end_and_counted(dtype, range_, symmetric):
    """Clamped before anything becomes an integer: 1e30 does not wrap round."""
    q, k, v = inputs(dtype)
    visible = Visible.causal(2, N, N)
    causal = torch.ones(N, N, dtype=torch.bool).tril()
    for scheme in schemes(range_, symmetric):
        table = Fixed(np.float32([-1, -2, -1, -0.5]), np.float32([1, 0.25, 2, 1.5]))
        clipped = np.zeros(H, np.int64)
        found = ours(q, k, v, scheme, visible, table, clipped).double()
        expected, near, count = materialised(q, k, v, scheme, causal, SCALE, table)
        assert near.sum() <= 0.01 * 2 * H * causal.sum() + 2
        assert count > 0
        assert abs(int(clipped.sum()) - count) <= int(near.sum())
        unsure = near.any(-1, keepdim=True)
        gap = torch.where(unsure, 0.0, (found - expected).abs()).max()
        assert gap <= (1e-5 if dtype == torch.float32 else 1e-2) * v.abs().max()
        if dtype != torch.float16:
            far = ours(q * 1e15, k * 1e15, v, scheme, visible, table)
            assert torch.isfinite(far).all()


@every
def test_nan_is_refused(dtype, range_, symmetric):
    model = MODELS["diff_v2"]().to(dtype)
    model.model.layers[1].self_attn.q_proj.weight.data[0] = float("nan")
    scheme = Scheme(SITE, 4, *range_, symmetric=symmetric)
    table = Fixed(np.full(8, -1, np.float32), np.full(8, 1, np.float32))
    with (
        torch.no_grad(),
        pytest.raises(QuantizationError, match=r"NaN or infinity .*model\.layers\.1"),
        fake_quantize(model, scheme, table=table if scheme.static else None),
    ):
        model(**batch())


@pytest.mark.parametrize("range_", RANGES, ids="-".join)
def test_masks_of_any_fill(range_):
    """−inf, the dtype's least and a boolean mask hide the same positions."""
    model = MODELS["llama"]()
    ids, kept = batch().values()
    causal = torch.ones(20, 20, dtype=torch.bool).tril() & kept.bool()[:, None, None]
    causal |= torch.eye(20, dtype=torch.bool)  # eager softmax over nothing would be NaN
    scheme = Scheme(SITE, 4, *range_)
    table = Fixed(np.full(8, -2, np.float32), np.full(8, 2, np.float32))
    outs = []
    for fill in (-torch.inf, torch.finfo(torch.float32).min, None):
        mask = causal if fill is None else torch.zeros(2, 1, 20, 20).masked_fill(~causal, fill)
        model.set_attn_implementation("sdpa" if fill is None else "eager")
        context = fake_quantize(model, scheme, table=table if scheme.static else None)
        with torch.no_grad(), context:
            outs.append(model(input_ids=ids, attention_mask=mask).logits)
    assert torch.isfinite(outs[0]).all()
    assert torch.equal(outs[0], outs[1])
    assert torch.equal(outs[0], outs[2])
