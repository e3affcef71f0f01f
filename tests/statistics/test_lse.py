"""The log-sum-exp route on the CPU's own flash kernel, against materialised fp64 logits."""

from math import log

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from quantdiff.statistics import NonFiniteError, SiteStatistics, Visible, lse, measure_logits
from quantdiff.statistics.lse import row_extremes
from tests import reference

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def keep(place):
    return place


def empty(heads, rank=20, full=False):
    return SiteStatistics.empty("site", 0, heads, full=full, rank=rank, coordinates=4)


def measure(calls, rank=20, **options):
    """The site after one or more calls of (q, k, scale, visible)."""
    site = empty(calls[0][0].shape[1], rank)
    for number, (q, k, scale, visible) in enumerate(calls):

        def locate(place, number=number):
            place[:, 1] += 1000 * number
            return place

        measure_logits(q, k, scale, visible, site, locate, **options)
    return site


def dense(visible, heads, keys):
    column = torch.arange(keys)
    seen = (column >= visible.start[:, None, :, None]) & (column < visible.stop[:, None, :, None])
    return seen.expand(-1, heads, -1, -1)


def shape_of(kind, batch, rows, keys, generator):
    """What may be attended, and which keys are real."""
    if kind == "everything" or keys < rows:
        visible = Visible.everything(batch, rows, keys)
    else:
        visible = Visible.causal(batch, rows, keys)
    if kind in ("left", "right"):
        pad = torch.randint(0, rows + 1, (batch, 1), generator=generator).int()
        pad[torch.rand(batch, 1, generator=generator) < 0.3] = 0
        row = torch.arange(rows)
        if kind == "left":
            visible.start = torch.minimum(visible.start + pad, visible.stop)
            return visible.only(row >= pad)
        return visible.only(row < rows - pad)
    return visible


@st.composite
def cases(draw, longest=130, integers=False):
    groups, repeat = draw(st.sampled_from([1, 2, 3])), draw(st.sampled_from([1, 2, 4]))
    if integers:  # calls of one site have as many heads each
        groups, repeat = draw(st.sampled_from([(1, 4), (2, 2), (4, 1)]))
    batch, rows = draw(st.integers(1, 4)), draw(st.integers(1, longest))
    keys = rows + draw(st.sampled_from([0, 0, 1, 37]))
    width = draw(st.sampled_from([8, 16, 24, 40, 64, 80, 128]))
    dtype = draw(st.sampled_from(DTYPES))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    shapes = (batch, groups * repeat, rows, width), (batch, groups, keys, width)
    kind = draw(st.sampled_from(["causal", "everything", "left", "right"]))
    visible = shape_of(kind, batch, rows, keys, generator)
    if integers:  # with such values every product is exact, and many logits are the same
        q, k = (torch.randint(-2, 3, shape, generator=generator).to(dtype) for shape in shapes)
        return q, k, draw(st.sampled_from([0.25, -0.5])), visible
    q, k = (torch.randn(shape, generator=generator) for shape in shapes)
    outlier = draw(st.sampled_from([0.0, 30.0, 1e4]))
    if outlier:
        b, h, n = (draw(st.integers(0, size - 1)) for size in q.shape[:3])
        k[b, h // repeat, min(n, keys - 1), 3] = outlier**0.5
        q[b, h, n, 3] = draw(st.sampled_from([-1, 1])) * outlier**0.5 * width**0.5
    if draw(st.booleans()):  # the strides that a (B, N, H, D) projection leaves
        q, k = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k))
    return q.to(dtype), k.to(dtype), draw(st.sampled_from([1, -1])) * width**-0.5, visible


def product_rounding(q, k, scale):
    """How far an fp32 product may lie from the exact one, (B, H, N)."""
    length = k.double().norm(dim=-1).amax(-1).repeat_interleave(q.shape[1] // k.shape[1], 1)
    return abs(scale) * q.double().norm(dim=-1) * length[..., None] * q.shape[-1] * 2.0**-23


@given(case=cases(longest=300))
@settings(max_examples=50)
def test_rows_lie_where_the_bound_says(case):
    q, k, scale, visible = case
    high, low = row_extremes(q, k, scale, visible)
    assert high.dtype == low.dtype == torch.float32
    values = reference.logits(q, k, scale)
    seen = dense(visible, *values.shape[1::2])
    most = values.masked_fill(~seen, -torch.inf).amax(-1)
    least = values.masked_fill(~seen, torch.inf).amin(-1)
    some = seen.any(-1)
    assert (high[~some] == -torch.inf).all()
    assert (low[~some] == torch.inf).all()
    room = 1e-5 + 4e-7 * values.abs().amax(-1) + product_rounding(q, k, scale)
    above = log(k.shape[2]) / 1e4
    for error in ((high - most)[some], (least - low)[some]):
        assert (error >= -room[some]).all()
        assert (error <= above + room[some]).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_without_near_ties_are_told_to_four_digits(dtype):
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(2, 4, 257, 64, generator=generator) * 3 for _ in range(2))
    q, k = q.to(dtype), k.to(dtype)
    high, low = row_extremes(q, k, 0.125, Visible.everything(2, 257, 257))
    values = reference.logits(q, k, 0.125)
    two = values.topk(2).values
    clear = two[..., 0] - two[..., 1] > 1e-3
    assert clear.float().mean() > 0.95
    assert ((high - two[..., 0]).abs()[clear] < 5e-5).all()
    two = values.topk(2, largest=False).values
    clear = two[..., 1] - two[..., 0] > 1e-3
    assert ((low - two[..., 0]).abs()[clear] < 5e-5).all()


def test_all_keys_alike_tell_the_most_that_a_bound_may_be_off():
    q, k = torch.zeros(1, 2, 50, 16), torch.randn(1, 1, 300, 16)
    visible = Visible.everything(1, 50, 300)
    high, low = row_extremes(q, k, 0.25, visible)
    assert torch.allclose(high, torch.full_like(high, log(300) / 1e4), atol=1e-7)
    assert torch.allclose(low, -high)
    sharper, _ = row_extremes(q, k, 0.25, visible, temperature=1e6)
    assert torch.allclose(sharper, high / 100)


def alike(found, expected, rounding):
    """The same site to product rounding; places may differ among values that it cannot tell."""
    assert (found.count == expected.count).all()
    assert np.allclose(found.min, expected.min, rtol=1e-6, atol=rounding)
    assert np.allclose(found.max, expected.max, rtol=1e-6, atol=rounding)
    a, b = found.top, expected.top
    assert len(a.values) == len(b.values)
    assert np.allclose(a.values, b.values, rtol=1e-6, atol=rounding)
    values = dict(zip(map(tuple, b.coordinates), b.values, strict=True))
    for value, place in zip(a.values, map(tuple, a.coordinates), strict=True):
        # What has no partner ties with the last that was kept.
        partner = values.get(place, b.values[-1])
        assert np.isclose(value, partner, rtol=1e-6, atol=rounding)


@pytest.mark.parametrize("few", [0, 10**9])
@given(case=cases(), rank=st.sampled_from([0, 1, 20, 1000]))
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_keeps_what_streaming_keeps(monkeypatch, few, case, rank):
    monkeypatch.setattr(lse, "FEW", few)
    site = measure([case], rank, log_sum_exp=True)
    rounding = float(product_rounding(*case[:3]).max())
    alike(site, measure([case], rank, compiled=False), rounding)
    values = reference.logits(*case[:3])
    exact = reference.statistics(
        values.transpose(0, 1), dense(case[3], *values.shape[1::2]).transpose(0, 1)
    )
    assert (site.count == exact["count"]).all()
    assert np.allclose(site.max, exact["max"], rtol=1e-6, atol=rounding)
    assert np.allclose(site.min, exact["min"], rtol=1e-6, atol=rounding)


@pytest.mark.parametrize("few", [0, 10**9])
@given(
    calls=st.lists(cases(40, integers=True), min_size=2, max_size=3),
    rank=st.sampled_from([1, 5, 50]),
)
@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_ties_and_several_calls_to_the_last_coordinate(monkeypatch, few, calls, rank):
    monkeypatch.setattr(lse, "FEW", few)
    monkeypatch.setattr("quantdiff.statistics.chosen.GATHERED", 1 << 14)
    found = measure(calls, rank, log_sum_exp=True)
    expected = measure(calls, rank, compiled=False)
    for name in ("count", "min", "max"):
        assert (getattr(found, name) == getattr(expected, name)).all()
    assert (found.top.values == expected.top.values).all()
    assert (found.top.coordinates == expected.top.coordinates).all()


@given(seed=st.integers(0, 2**31), causal=st.booleans(), scale=st.sampled_from([0.25, -0.25]))
@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_kernel_as_bad_as_is_granted_loses_nothing(monkeypatch, seed, causal, scale):
    coarse = 2.0**-14
    monkeypatch.setattr(lse, "_U", coarse)
    monkeypatch.setattr(lse, "FEW", 10**9)
    generator = torch.Generator().manual_seed(seed)

    def kernel(q, k, scale, causal):
        values = reference.logits(q, k, scale)
        if causal:
            values = values.masked_fill(torch.ones(values.shape[2:]).triu(1).bool(), -torch.inf)
        exact = values.logsumexp(-1)
        size = q.double().norm(dim=-1) * k.double().norm(dim=-1).amax(-1, keepdim=True) * scale
        granted = 16 * exact.abs() + 4 * (q.shape[-1] + 8) * size
        sign = torch.randint(0, 2, exact.shape, generator=generator) * 2 - 1
        return (exact + 0.99 * coarse * sign * granted).float()

    monkeypatch.setattr(lse, "log_sum_exp", kernel)
    q, k = (torch.randn(2, 4, 80, 8, generator=generator) for _ in range(2))
    k[:, :, ::3] = q[:, :, ::3]  # some logits are as large as they can be
    visible = Visible.causal(2, 80, 80) if causal else Visible.everything(2, 80, 80)
    case = q, k, scale, visible
    alike(measure([case], log_sum_exp=True), measure([case], compiled=False), 1e-5)


@pytest.fixture
def multiplied(monkeypatch):
    """How many rows were multiplied out, call by call."""
    rows = []

    def count(q, k, scale, places, spans, sieve, real=lse.chosen_logits):
        rows.append(len(places))
        return real(q, k, scale, places, spans, sieve)

    monkeypatch.setattr(lse, "chosen_logits", count)
    return rows


def test_few_rows_are_multiplied_out(multiplied):
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(2, 8, 400, 64, generator=generator).bfloat16() for _ in range(2))
    visible = Visible.causal(2, 400, 400)
    calls = [(q, k, 0.125, visible), (q, k, 0.125, visible), (q / 2, k, 0.125, visible)]
    measure(calls, log_sum_exp=True)
    # 20 largest magnitudes and the extremes of 8 heads, of 6400 rows.
    assert max(multiplied[:2]) < 60
    assert multiplied[2] == 0  # what is known already cannot be reached


def test_rows_that_are_all_alike_are_not_multiplied_one_by_one(multiplied):
    case = torch.zeros(1, 4, 400, 8), torch.randn(1, 4, 400, 8), 1.0, Visible.causal(1, 400, 400)
    site = measure([case], log_sum_exp=True)
    assert (site.max == 0).all()
    first = [tuple(place) for place in site.top.coordinates[:3]]
    assert first == [(0, 0, 0, 0), (0, 0, 1, 0), (0, 0, 1, 1)]
    assert multiplied == []


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("where", ["query", "key"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_not_finite_is_refused_and_nothing_is_added(dtype, where, bad):
    q, k = torch.randn(2, 4, 30, 8).to(dtype), torch.randn(2, 2, 30, 8).to(dtype)
    if where == "query":
        q[1, 2, 7, 3] = bad
    else:
        k[1, 1, 29, 3] = bad  # only the last query sees it
    site = empty(4)
    with pytest.raises(NonFiniteError) as caught:
        measure_logits(q, k, 1.0, Visible.causal(2, 30, 30), site, keep, log_sum_exp=True)
    assert caught.value.group == 2
    assert site.count.sum() == 0
    assert len(site.top.values) == 0


def test_one_minus_infinity_among_finite_logits_is_refused():
    q, k = torch.ones(1, 2, 20, 8), torch.ones(1, 2, 20, 8)
    k[0, 1, 4] = -1e38  # the sum of eight overflows, every element is finite
    with pytest.raises(NonFiniteError) as caught:
        measure([(q, k, 1.0, Visible.causal(1, 20, 20))], log_sum_exp=True)
    assert caught.value.group == 1
    q[:], k[0, 1, 4] = 0, -1e38
    site = measure([(q, k, 1.0, Visible.causal(1, 20, 20))], log_sum_exp=True)
    assert (site.max == 0).all()


@pytest.mark.parametrize("size", [0.0, 1e-25, 1e-12, 1e-3, 1e10, 1e17])
def test_any_magnitude(size):
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(1, 2, 100, 16, generator=generator) * size for _ in range(2))
    case = q, k, 0.25, Visible.causal(1, 100, 100)
    alike(
        measure([case], log_sum_exp=True),
        measure([case], compiled=False),
        float(product_rounding(*case[:3]).max()),
    )


def test_exponents_stay_small_enough_to_be_told_apart(monkeypatch):
    """A GPU's kernel rounds T·s·log₂e before it subtracts; past 2³¹ exp2 of that is 0 or inf."""
    largest = []

    def kernel(q, k, scale, causal, real=lse.log_sum_exp):
        largest.append(float(reference.logits(q, k, scale).abs().max()))
        return real(q, k, scale, causal)

    monkeypatch.setattr(lse, "log_sum_exp", kernel)
    for size in (1e-9, 1.0, 1e9):
        q, k = torch.randn(1, 2, 30, 8) * size, torch.randn(1, 2, 30, 8)
        measure([(q, k, 0.3, Visible.causal(1, 30, 30))], log_sum_exp=True)
        row_extremes(q, k, 0.3, Visible.causal(1, 30, 30), temperature=1e20)
    assert len(largest) == 12
    assert max(largest) < 2**30
    assert min(largest) > 2**24


def test_any_strides():
    q, k = (torch.randn(2, 4, 30, 16).mT.contiguous().mT for _ in range(2))
    case = q, k, 0.25, Visible.causal(2, 30, 30)
    alike(measure([case], log_sum_exp=True), measure([case], compiled=False), 1e-5)
    plain = row_extremes(q.contiguous(), k.contiguous(), *case[2:])
    assert torch.equal(torch.stack(row_extremes(*case)), torch.stack(plain))


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_is_never_seen(side):
    q, k = torch.randn(3, 4, 40, 8), torch.randn(3, 2, 40, 8)
    pad = torch.tensor([[0], [5], [40]])
    row = torch.arange(40)
    real = row >= pad if side == "left" else row < 40 - pad
    visible = Visible.causal(3, 40, 40)
    if side == "left":
        visible.start = torch.minimum(visible.start + pad.int(), visible.stop)
    q = q.masked_fill(~real[:, None, :, None], float("nan"))
    k = k.masked_fill(~real[:, None, :, None], float("inf"))
    case = q, k, 0.3, visible.only(real)
    found, expected = measure([case], log_sum_exp=True), measure([case], compiled=False)
    assert (found.count == 40 * 41 // 2 + 35 * 36 // 2).all()
    alike(found, expected, 1e-6)
    high, low = row_extremes(*case)
    assert (torch.isfinite(high) == real[:, None]).all()
    assert (torch.isfinite(low) == real[:, None]).all()


@pytest.mark.parametrize("answer", [torch.inf, -torch.inf, torch.nan, 1e30])
def test_an_impossible_log_sum_exp_is_not_believed(monkeypatch, answer):
    case = torch.randn(1, 2, 50, 8), torch.randn(1, 2, 50, 8), 0.3, Visible.causal(1, 50, 50)
    expected = measure([case], compiled=False)

    def kernel(q, k, scale, causal, real=lse.log_sum_exp):
        result = real(q, k, scale, causal)
        result[0, 1, 30] = answer
        return result

    monkeypatch.setattr(lse, "log_sum_exp", kernel)
    assert row_extremes(*case) is None
    alike(measure([case], log_sum_exp=True), expected, 1e-6)


def ragged(batch, rows, keys):
    stop = torch.arange(rows).int() // 2 + 1
    return Visible(torch.zeros(batch, rows).int(), stop.expand(batch, rows).contiguous())


def window(batch, rows, keys):
    visible = Visible.causal(batch, rows, keys)
    return Visible((visible.stop - 4).clamp(min=0), visible.stop)


def gap(batch, rows, keys):
    return Visible.causal(batch, rows, keys).only((torch.arange(rows) != 7).expand(batch, rows))


def masked(batch, rows, keys):
    visible = Visible.everything(batch, rows, keys)
    visible.mask = torch.rand(1, 1, rows, keys) < 0.5
    return visible


@pytest.mark.parametrize("visible", [ragged, window, gap, masked])
def test_shapes_that_no_kernel_takes(visible):
    q, k = torch.randn(2, 4, 20, 8), torch.randn(2, 2, 20, 8)
    case = q, k, 0.3, visible(2, 20, 20)
    assert row_extremes(*case) is None
    assert lse.lse_logits(*case, empty(4)) is None
    with pytest.raises(ValueError, match="log-sum-exp of these logits is not known"):
        measure([case], log_sum_exp=True)


def test_what_else_cannot_be_forced():
    q, k, visible = torch.randn(1, 2, 9, 8), torch.randn(1, 2, 9, 8), Visible.causal(1, 9, 9)
    for options in ({"softcap": 5.0}, {"bias": lambda i, j: torch.zeros(1, 1, j - i, 9)}):
        with pytest.raises(ValueError, match="log-sum-exp"):
            measure([(q, k, 1.0, visible)], log_sum_exp=True, **options)
    with pytest.raises(ValueError, match="extremes alone"):
        measure_logits(q, k, 1.0, visible, empty(2, full=True), keep, log_sum_exp=True)
    for case in ((q.double(), k.double()), (q.bfloat16(), k), (q, k.half())):
        assert row_extremes(*case, 1.0, visible) is None
        with pytest.raises(ValueError, match="this dtype and device"):
            measure([(*case, 1.0, visible)], log_sum_exp=True)


@pytest.mark.parametrize("choice", [None, False])
def test_on_a_cpu_it_is_taken_only_where_asked_for(monkeypatch, choice):
    monkeypatch.setattr("quantdiff.statistics.streaming.lse_logits", None)
    q, k = torch.randn(1, 2, 9, 8), torch.randn(1, 2, 9, 8)
    site = measure([(q, k, 1.0, Visible.causal(1, 9, 9))], log_sum_exp=choice)
    assert (site.count == 45).all()
