"""The streaming statistics against materialised fp64 references."""

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from quantdiff.statistics import (
    NonFiniteError,
    SiteStatistics,
    Visible,
    blocks,
    measure_logits,
    measure_values,
    native,
    streaming,
)
from tests import reference
from tests.conftest import needs

built = needs(native.available(), "the kernels were not built: no C compiler at installation")
PATHS = [pytest.param(True, id="compiled", marks=built), pytest.param(False, id="torch")]


def keep(place):
    return place


def measure(q, k, scale, visible, *, rank=20, full=True, **options):
    site = SiteStatistics.empty("site", 0, q.shape[1], full=full, rank=rank, coordinates=4)
    measure_logits(q, k, scale, visible, site, keep, **options)
    return site, site.top


def dense(visible, shape):
    """The visibility as a boolean tensor (B, H, N, M)."""
    columns = torch.arange(shape[-1])
    seen = (columns >= visible.start[:, None, :, None]) & (columns < visible.stop[:, None, :, None])
    extra = visible.mask_rows(0, shape[2])
    return (seen if extra is None else seen & extra).expand(shape).contiguous()


def check(site, top, values, seen, size=None):
    """values, seen: (B, H, N, M); size: the same, sums of the terms' magnitudes, for products."""
    groups = values.transpose(0, 1)
    shown = seen.transpose(0, 1)
    expected = reference.statistics(groups, shown)
    scale = float(values[seen].abs().max()) if seen.any() else 1.0
    # One logit whose terms cancel is rounded as its terms are, not as itself.
    terms = scale if size is None or not seen.any() else float(size[seen].max())
    assert (site.count == expected["count"]).all()
    assert np.allclose(site.min, expected["min"], rtol=1e-5, atol=1e-5 * scale)
    assert np.allclose(site.max, expected["max"], rtol=1e-5, atol=1e-5 * scale)
    filled = expected["count"] > 0
    spread = np.nan_to_num(expected["std"])
    error = np.abs(site.moments.mean - np.nan_to_num(expected["mean"]))[filled]
    assert (error <= 1e-4 * spread[filled] + 1e-6 * terms).all()
    assert np.allclose(site.moments.std[filled], spread[filled], rtol=1e-4, atol=1e-6 * scale)
    steady = filled & (spread > 1e-3 * scale)
    assert np.allclose(site.moments.kurtosis[steady], expected["kurtosis"][steady], rtol=1e-2)
    assert (site.histogram.count == expected["count"]).all()
    median = site.histogram.percentile(50)
    # Cancelled sums near 0 have no relative accuracy to speak of, in the reference's favour.
    assert np.allclose(median[filled], expected["median"][filled], rtol=5e-3, atol=1e-5 * scale)
    magnitudes = values.abs()[seen].sort(descending=True).values[: top.rank].numpy()
    assert np.allclose(top.values, magnitudes, rtol=1e-5, atol=1e-5 * scale)
    for value, (head, batch, row, column) in zip(top.values, top.coordinates, strict=True):
        assert seen[batch, head, row, column]
        exact = abs(float(values[batch, head, row, column]))
        assert value == pytest.approx(exact, rel=1e-5, abs=1e-5 * scale)
    assert len({tuple(place) for place in top.coordinates}) == len(top.values)


@st.composite
def cases(draw, longest=70):
    groups = draw(st.sampled_from([1, 2, 3]))
    repeat = draw(st.sampled_from([1, 2, 3, 8]))
    batch = draw(st.integers(1, 3))
    rows = draw(st.integers(1, longest))
    keys = draw(st.integers(1, longest + 20))
    width = draw(st.sampled_from([1, 3, 8, 16, 33, 64]))
    dtype = draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    size = draw(st.sampled_from([1e-3, 0.1, 1.0, 10.0]))
    q = (torch.randn(batch, groups * repeat, rows, width, generator=generator) * size).to(dtype)
    k = torch.randn(batch, groups, keys, width, generator=generator).to(dtype)
    if draw(st.booleans()):  # the strides that a (B, N, H, D) projection leaves
        q, k = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k))
    kind = draw(st.sampled_from(["causal", "full", "window", "ragged", "mask", "headmask", "rows"]))
    visible = Visible.everything(batch, rows, keys)
    if kind == "causal" and keys >= rows:
        visible = Visible.causal(batch, rows, keys)
    elif kind == "window":
        window = draw(st.integers(1, 40))
        stop = torch.arange(1, rows + 1, dtype=torch.int32).clamp(max=keys).expand(batch, rows)
        visible = Visible((stop - window).clamp(min=0).contiguous(), stop.contiguous())
    elif kind == "ragged":
        a = torch.randint(0, keys + 1, (batch, rows), generator=generator, dtype=torch.int32)
        b = torch.randint(0, keys + 1, (batch, rows), generator=generator, dtype=torch.int32)
        visible = Visible(a, b)
    elif kind in ("mask", "headmask"):
        heads = q.shape[1] if kind == "headmask" else 1
        shape = (draw(st.sampled_from([1, batch])), heads, rows, keys)
        mask = torch.rand(shape, generator=generator) < draw(st.sampled_from([0.1, 0.5, 0.95]))
        callback = draw(st.booleans())
        visible.mask = (lambda i, j: mask[:, :, i:j]) if callback else mask
    elif kind == "rows":
        visible = visible.only(torch.rand(batch, rows, generator=generator) < 0.5)
    return q, k, width**-0.5, visible


@built
def test_the_kernels_were_built():
    """Else plain torch serves, here and in all other tests."""
    assert native.available()


@pytest.mark.parametrize("compiled", PATHS)
@given(case=cases())
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_equals_materialised_logits(case, compiled):
    q, k, scale, visible = case
    site, top = measure(q, k, scale, visible, compiled=compiled)
    values = reference.logits(q, k, scale)
    size = reference.logits(q.abs(), k.abs(), scale)
    check(site, top, values, dense(visible, values.shape), size)


@built
@given(case=cases())
@settings(max_examples=50)
def test_both_paths_keep_the_same(case):
    q, k, scale, visible = case
    (a, top_a), (b, top_b) = (
        measure(q, k, scale, visible, compiled=compiled) for compiled in (True, False)
    )
    assert (a.count == b.count).all()
    assert np.allclose(a.absmax, b.absmax, rtol=1e-4, atol=1e-6)
    assert np.allclose(a.moments.mean, b.moments.mean, rtol=1e-4, atol=1e-6)
    assert np.allclose(top_a.values, top_b.values, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("compiled", PATHS)
def test_extremes_alone_are_the_same_extremes(compiled):
    q, k = torch.randn(2, 6, 50, 16), torch.randn(2, 2, 50, 16)
    visible = Visible.causal(2, 50, 50)
    full, top_full = measure(q, k, 0.25, visible, compiled=compiled)
    short, top_short = measure(q, k, 0.25, visible, compiled=compiled, full=False)
    assert short.histogram is None
    assert short.moments is None
    assert (short.max == full.max).all()
    assert (short.min == full.min).all()
    assert (short.count == full.count).all()
    assert (top_short.values == top_full.values).all()
    assert (top_short.coordinates == top_full.coordinates).all()


@pytest.mark.parametrize("compiled", PATHS)
def test_ties_go_to_the_lowest_coordinate(compiled):
    q, k = torch.ones(2, 2, 40, 4), torch.ones(2, 1, 40, 4)
    _, top = measure(q, k, 1.0, Visible.everything(2, 40, 40), compiled=compiled, rank=100)
    expected = [(0, 0, n, m) for n in range(3) for m in range(40)][:100]
    assert [tuple(place) for place in top.coordinates] == expected


@pytest.mark.parametrize("compiled", PATHS)
@given(
    most=st.integers(0, 2), heads=st.integers(1, 3), rows=st.integers(1, 40),
    rank=st.sampled_from([1, 7, 100]), causal=st.booleans(), softcap=st.sampled_from([None, 1e4]),
    seed=st.integers(0, 99),
)  # fmt: skip
@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_ties_in_many_blocks(monkeypatch, compiled, most, heads, rows, rank, causal, softcap, seed):
    """Whole numbers up to 4 have few magnitudes, and where all are 0 but one."""
    monkeypatch.setattr(streaming, "BLOCK_ELEMENTS", 1 << 8)
    monkeypatch.setattr(blocks, "BLOCK_ELEMENTS", 1 << 8)
    generator = torch.Generator().manual_seed(seed)
    q = torch.randint(-most, most + 1, (2, heads, rows, 1), generator=generator).float()
    k = torch.randint(-most, most + 1, (2, 1, rows, 1), generator=generator).float()
    visible = (Visible.causal if causal else Visible.everything)(2, rows, rows)
    values = reference.logits(q, k, 1.0)
    if softcap is not None:  # takes plain torch, and hardly caps
        values = softcap * torch.tanh(values / softcap)
    site, top = measure(q, k, 1.0, visible, compiled=compiled, rank=rank, softcap=softcap)
    seen = dense(visible, values.shape)
    check(site, top, values, seen)
    places = seen.transpose(0, 1).nonzero().tolist()  # head, sequence, query, key
    size = {(h, b, n, m): round(abs(float(values[b, h, n, m])), 3) for h, b, n, m in places}
    expected = sorted(size, key=lambda place: (-size[place], place))[:rank]
    assert [tuple(place) for place in top.coordinates] == expected


@pytest.mark.parametrize("compiled", PATHS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_non_finite_logits_are_refused_and_nothing_is_added(compiled, bad):
    q, k = torch.randn(1, 4, 30, 8), torch.randn(1, 2, 30, 8)
    q[0, 2, 7, 3] = bad
    site = SiteStatistics.empty("site", 0, 4, full=True, rank=5, coordinates=4)
    with pytest.raises(NonFiniteError) as caught:
        measure_logits(q, k, 1.0, Visible.causal(1, 30, 30), site, keep, compiled=compiled)
    assert caught.value.group == 2
    assert site.count.sum() == 0
    assert len(site.top.values) == 0


@pytest.mark.parametrize("compiled", PATHS)
def test_what_nobody_may_attend_is_never_seen(compiled):
    q, k = torch.randn(1, 2, 20, 8), torch.randn(1, 2, 20, 8)
    k[:, :, 15:] = float("nan")
    q[:, :, :3] = float("inf")
    rows = torch.arange(20)[None] >= 3
    visible = Visible(torch.zeros(1, 20, dtype=torch.int32), torch.full((1, 20), 15).int())
    site, _ = measure(q, k, 1.0, visible.only(rows), compiled=compiled)
    assert np.isfinite(site.absmax).all()
    assert np.isfinite(site.moments.kurtosis).all()
    assert (site.count == 17 * 15).all()


@pytest.mark.parametrize("size", [1e-12, 1e-4, 1.0, 1e6])
@pytest.mark.parametrize("compiled", PATHS)
def test_moments_hold_at_any_magnitude(compiled, size):
    q, k = torch.randn(1, 1, 64, 32) * size, torch.randn(1, 1, 64, 32)
    site, top = measure(q, k, 1.0, Visible.everything(1, 64, 64), compiled=compiled)
    values = reference.logits(q, k, 1.0)
    check(site, top, values, torch.ones_like(values, dtype=torch.bool))


@pytest.mark.parametrize("compiled", PATHS)
def test_a_far_mean_does_not_spoil_the_spread(compiled):
    q, k = torch.randn(1, 2, 64, 16) * 0.05 + 3, torch.randn(1, 2, 80, 16) * 0.05 + 3
    site, _ = measure(q, k, 1.0, Visible.everything(1, 64, 80), compiled=compiled)
    expected = reference.statistics(
        reference.logits(q, k, 1.0)[0], torch.ones(2, 64, 80, dtype=torch.bool)
    )
    assert np.allclose(site.moments.std, expected["std"], rtol=1e-4)
    assert np.allclose(site.moments.kurtosis, expected["kurtosis"], rtol=1e-2)


def test_cap_and_bias_come_before_the_statistics():
    q, k = torch.randn(2, 4, 30, 8) * 4, torch.randn(2, 2, 30, 8)
    bias = torch.randn(1, 4, 30, 30)
    visible = Visible.causal(2, 30, 30)
    site, top = measure(
        q, k, 1.0, visible, softcap=5.0, bias=lambda first, last: bias[:, :, first:last]
    )
    values = 5 * torch.tanh(reference.logits(q, k, 1.0) / 5) + bias.double()
    check(site, top, values, dense(visible, values.shape))


@pytest.mark.parametrize("fill", [torch.finfo(torch.float32).min, -torch.inf])
@pytest.mark.parametrize("softcap", [None, 1.0])
def test_a_bias_whose_mask_is_filled_leaves_the_moments_right(fill, softcap):
    q, k = torch.randn(2, 4, 30, 8) * 4, torch.randn(2, 2, 30, 8)
    visible = Visible.causal(2, 30, 30)
    hidden = ~dense(visible, (2, 4, 30, 30))
    bias = torch.randn(2, 4, 30, 30).masked_fill(hidden, fill)
    site, top = measure(q, k, 1.0, visible, softcap=softcap, bias=lambda i, j: bias[:, :, i:j])
    raw = reference.logits(q, k, 1.0)
    raw = raw if softcap is None else softcap * torch.tanh(raw / softcap)
    check(site, top, raw + bias.double(), ~hidden)


def test_capped_logits_that_saturate_keep_their_spread():
    q, k = torch.rand(1, 2, 40, 8) + 2, torch.rand(1, 2, 40, 8) + 2
    site, _ = measure(q, k, 1.0, Visible.everything(1, 40, 40), softcap=30.0)
    values = 30 * torch.tanh(reference.logits(q, k, 1.0) / 30)
    expected = reference.statistics(values[0], torch.ones(2, 40, 40, dtype=torch.bool))
    assert np.allclose(site.moments.std, expected["std"], rtol=1e-3)
    assert np.allclose(site.moments.kurtosis, expected["kurtosis"], rtol=1e-2)


@pytest.mark.parametrize("compiled", PATHS)
@given(case=cases(longest=400))
@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_many_blocks_of_rows(monkeypatch, case, compiled):
    monkeypatch.setattr(streaming, "BLOCK_ELEMENTS", 1 << 12)
    monkeypatch.setattr(blocks, "BLOCK_ELEMENTS", 1 << 12)
    q, k, scale, visible = case
    site, top = measure(q, k, scale, visible, compiled=compiled)
    values = reference.logits(q, k, scale)
    check(site, top, values, dense(visible, values.shape))


@pytest.mark.parametrize("compiled", PATHS)
@given(rows=st.integers(1, 60), width=st.integers(1, 80), seed=st.integers(0, 2**31))
@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_values_equal_a_reference(compiled, rows, width, seed):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, width, generator=generator) * 3 + 1
    counted = torch.rand(rows, generator=generator) < 0.7
    x[~counted] = float("nan")
    site = SiteStatistics.empty("site", 0, 1, full=True, rank=7, coordinates=4)
    measure_values(x, counted, site, keep, compiled=compiled)
    seen = counted[:, None].expand(x.shape)
    check(site, site.top, x[None, None].double(), seen[None, None])


@built
@pytest.mark.parametrize("lanes", [4, 8])
@given(case=cases())
@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_narrower_vectors_keep_the_same(monkeypatch, lanes, case):
    q, k, scale, visible = case
    monkeypatch.setattr(native, "LANES", lanes)
    site, top = measure(q, k, scale, visible)
    values = reference.logits(q, k, scale)
    check(site, top, values, dense(visible, values.shape))


@pytest.mark.parametrize("compiled", PATHS)
def test_keys_that_all_sequences_share(compiled):
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(3, 4, 5, 8, generator=generator)
    k = torch.randn(1, 2, 3, 8, generator=generator)
    visible = Visible.everything(3, 5, 3)
    site, top = measure(q, k, 0.3, visible, compiled=compiled)
    values = reference.logits(q, k.expand(3, -1, -1, -1), 0.3)
    check(site, top, values, dense(visible, values.shape))
    least, most = streaming.logit_extremes(q, k, 0.3, visible)
    assert torch.allclose(least, values.amin((2, 3)).float(), rtol=1e-5)
    assert torch.allclose(most, values.amax((2, 3)).float(), rtol=1e-5)


@pytest.mark.parametrize("keys", [(2, 4, 3, 8), (3, 4, 3, 9), (3, 4, 3, 7)])
def test_keys_that_do_not_go_with_the_queries_are_refused(keys):
    q, k, visible = torch.zeros(3, 4, 5, 8), torch.zeros(keys), Visible.everything(3, 5, 3)
    for measured in (measure, streaming.logit_extremes):
        with pytest.raises(ValueError, match=r"\(3, 4, 5, 8\) do not go with keys of shape \("):
            measured(q, k, 1.0, visible)


def test_heads_that_do_not_divide_are_refused():
    with pytest.raises(ValueError, match="5 query heads do not divide into 2 key heads"):
        measure(torch.zeros(1, 5, 3, 4), torch.zeros(1, 2, 3, 4), 1.0, Visible.causal(1, 3, 3))
