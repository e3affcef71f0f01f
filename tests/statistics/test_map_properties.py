"""Properties of the measures of attention maps: what changes nothing, and what is refused."""

import json
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load, save
from torch.utils._python_dispatch import TorchDispatchMode

from quantdiff.attention.layouts import layout
from quantdiff.statistics import NonFiniteError, Visible, map_rows
from quantdiff.statistics.maps import MAP_DEFINITIONS, MapStatistics, measure_maps
from tests.statistics.plain_maps import DIFFERENTIAL, SPAN, cases, measure, random_qk, sites_of


def close(sites, others):
    for kind, site in sites.items():
        a, b = site.to_arrays(), others[kind].to_arrays()
        for name in a:
            if name.startswith("context_rms."):
                continue
            assert np.allclose(a[name], b[name], rtol=1e-5, atol=1e-5), (kind, name)
        # A value at the edge of a bin may be rounded into the next.
        medians = [x.context_rms.percentile(50) for x in (site, others[kind])]
        assert np.allclose(*medians, rtol=1e-2, equal_nan=True)


@given(
    seed=st.integers(0, 2**31),
    name=st.sampled_from(["none", *DIFFERENTIAL]),
    pads=st.lists(st.integers(0, 9), min_size=3, max_size=3),
    left=st.booleans(),
)
@settings(max_examples=40)
def test_batch_order_and_padding_change_nothing(seed, name, pads, left):
    generator = torch.Generator().manual_seed(seed)
    heads = 6 if name == "grouped:2" else 4
    lengths = [12, 5, 9]
    pairs = None if name == "none" else layout(name).pairs(heads)
    total = max(n + pad for n, pad in zip(lengths, pads, strict=True))
    alone = sites_of(heads, pairs)
    q = torch.full((3, heads, total, 8), torch.nan)
    k = torch.full((3, 2, total, 8), torch.nan)
    lam = torch.full((3, 0 if pairs is None else len(pairs[0]), total, 1), torch.nan)
    begins = [total - n if left else 0 for n in lengths]
    for b, (n, begin) in enumerate(zip(lengths, begins, strict=True)):
        real = slice(begin, begin + n)
        q[b, :, real], k[b, :, real] = (
            x[0] for x in random_qk(generator, 1, heads, 2, n, n, 8, torch.float32)
        )
        lam[b, :, real] = torch.rand(lam[b, :, real].shape, generator=generator)
        single = measure(
            q[b : b + 1, :, real], k[b : b + 1, :, real], Visible.causal(1, n, n),
            pairs=pairs, lam=None if pairs is None else lam[b : b + 1, :, real],
            spans=[(1, 4)], span_rows=torch.tensor([n - 1]),
        )  # fmt: skip
        for kind, site in alone.items():
            site.merge(single[kind])
    start = torch.tensor(begins)
    length = torch.tensor(lengths)
    stop = torch.arange(1, total + 1).expand(3, total)
    real = (stop > start[:, None]) & (stop <= (start + length)[:, None])
    visible = Visible(start[:, None].expand(3, total).int(), stop.int()).only(real)
    order = torch.randperm(3, generator=generator)
    batched = measure(
        q[order], k[order], Visible(visible.start[order], visible.stop[order]), pairs=pairs,
        lam=None if pairs is None else lam[order], key_zero=start[order],
        spans=[(begins[b] + 1, begins[b] + 4) for b in order],
        span_rows=(start + length - 1)[order],
    )  # fmt: skip
    close(batched, alone)
    assert batched[next(iter(batched))].counts["span_rows"].tolist()[0] == 3


@pytest.mark.parametrize("name", ["none", "adjacent"])
def test_two_halves_merge_to_the_whole(name):
    generator = torch.Generator().manual_seed(5)
    q, k = random_qk(generator, 4, 4, 2, 15, 15, 8, torch.float32)
    pairs = None if name == "none" else layout(name).pairs(4)
    lam = None if pairs is None else 0.7
    whole = measure(q, k, Visible.causal(4, 15, 15), lam=lam, pairs=pairs)
    halves = [
        measure(q[i], k[i], Visible.causal(2, 15, 15), lam=lam, pairs=pairs)
        for i in (slice(0, 2), slice(2, 4))
    ]
    for kind, site in halves[0].items():
        site.merge(halves[1][kind])
        for key, array in site.to_arrays().items():
            assert np.allclose(array, whole[kind].to_arrays()[key], rtol=1e-12), key
    again = sites_of(4, pairs)
    for i in (slice(0, 2), slice(2, 4)):  # and so do two calls with the same sites
        first, second = pairs or (None, None)
        measure_maps(
            q[i], k[i], 8**-0.5, Visible.causal(2, 15, 15), again, lam=lam, first=first,
            second=second,
        )  # fmt: skip
    assert [list(s.rows()) for s in again.values()] == [list(s.rows()) for s in halves[0].values()]


def test_other_sites_do_not_merge():
    site = MapStatistics.empty("a", 0, "softmax", [0, 1])
    for other in (
        MapStatistics.empty("b", 0, "softmax", [0, 1]),
        MapStatistics.empty("a", 1, "softmax", [0, 1]),
        MapStatistics.empty("a", 0, "branch 1", [0, 1]),
        MapStatistics.empty("a", 0, "softmax", [0, 2]),
    ):
        with pytest.raises(ValueError, match="cannot be merged"):
            site.merge(other)


@given(case=cases())
@settings(max_examples=20)
def test_arrays_hold_everything(case):
    q, k, visible, options = case
    for site in measure(q, k, visible, **options).values():
        arrays = load(save(site.to_arrays()))
        again = MapStatistics.from_arrays(site.name, site.layer, site.kind, site.heads, arrays)
        assert list(again.rows()) == list(site.rows())
        assert again.summary == site.summary
        for name, array in again.to_arrays().items():
            assert (array == site.to_arrays()[name]).all()
            assert array.dtype == arrays[name].dtype
        assert (again.context_rms.counts == site.context_rms.counts).all()
        assert again.context_rms.first == site.context_rms.first
        again.merge(site)
        assert (again.counts["rows"] == 2 * site.counts["rows"]).all()
        with pytest.raises(ValueError, match="arrays of"):
            MapStatistics.from_arrays("a", 0, site.kind, [*site.heads, 99], arrays)


def test_what_holds_nothing_says_so():
    site = MapStatistics.empty("a", 0, "difference", [0, 2])
    rows = [*site.rows(), site.summary]
    assert all(row["rows"] == 0 for row in rows)
    assert all(rows[0][name] is None for name in ("row_sum", "sink", "norm_gain_max", *SPAN))
    assert len(json.loads(json.dumps(rows, allow_nan=False))) == 3
    visible = Visible.causal(1, 5, 5).only(torch.zeros(1, 5, dtype=torch.bool))
    found = measure(torch.randn(1, 2, 5, 4), torch.randn(1, 2, 5, 4), visible)["softmax"]
    assert found.summary == MapStatistics.empty("a", 0, "softmax", [0, 1]).summary


def test_every_measure_is_defined():
    q, k = torch.randn(1, 2, 5, 4), torch.randn(1, 2, 5, 4)
    row = measure(q, k, Visible.causal(1, 5, 5), lam=0.1, pairs=([0], [1]))["difference"].summary
    endings = ("_min", "_median", "_max")
    named = {next((n.removesuffix(e) for e in endings if n.endswith(e)), n) for n in row}
    assert named == MAP_DEFINITIONS.keys() - {"map"}


@given(seed=st.integers(0, 2**31), size=st.sampled_from([0.0, 0.1, 1.0, 20.0]))
@settings(max_examples=30)
def test_bounds_of_the_context(seed, size):
    generator = torch.Generator().manual_seed(seed)
    q, k = random_qk(generator, 1, 8, 4, 70, 70, 16, torch.float32, size, outliers=False)
    visible = Visible.causal(1, 70, 70)
    soft = measure(q, k, visible)["softmax"]
    assert (soft.least["context_rms_scaled"] >= 1 - 1e-6).all()
    assert (soft.most["context_rms"] <= 1 + 1e-6).all()
    assert np.allclose([soft.least["row_sum"], soft.most["row_sum"]], 1, atol=2e-6)
    lam = torch.rand(1, 4, 70, 1, generator=generator) * 0.998 + 0.001
    pairs = layout("adjacent_shared").pairs(8)
    difference = measure(q, k, visible, lam=lam, pairs=pairs)["difference"]
    assert (difference.least["context_rms"] > 0).all()
    assert (difference.most["context_rms"] < math.sqrt(2)).all()
    assert (difference.least["context_rms_scaled"] < 1).all()  # row 0 holds 1 − λ alone


@given(lam=st.floats(0, 2), seed=st.integers(0, 2**31))
@settings(max_examples=20)
def test_rows_of_a_difference_sum_to_one_minus_lambda(lam, seed):
    generator = torch.Generator().manual_seed(seed)
    q, k = random_qk(generator, 2, 4, 2, 40, 40, 8, torch.float32)
    site = measure(q, k, Visible.causal(2, 40, 40), lam=lam, pairs=([0, 2], [1, 3]))["difference"]
    for value in (site.least["row_sum"], site.most["row_sum"], site.summary["row_sum"]):
        assert np.allclose(value, 1 - lam, atol=1e-5)


class Largest(TorchDispatchMode):
    """The elements of the largest tensor that any operation returned."""

    def __init__(self):
        super().__init__()
        self.elements = 0
        self.precisions = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for x in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(x, torch.Tensor):
                # A view that repeats its elements takes no memory.
                self.elements = max(self.elements, x.untyped_storage().nbytes() // x.itemsize)
        if func in (torch.ops.aten.bmm.default, torch.ops.aten.mm.default):
            self.precisions.add(torch.backends.mkldnn.matmul.fp32_precision)
        return result


@pytest.mark.parametrize("name", ["none", "adjacent"])
def test_no_tensor_of_n_by_n(name):
    pairs = None if name == "none" else ([0], [1])
    lam = None if pairs is None else 0.5
    generator = torch.Generator().manual_seed(0)

    def largest(n):
        q, k = random_qk(generator, 1, 2, 2, n, n, 16, torch.float32)
        with Largest() as seen:
            measure(q, k, Visible.causal(1, n, n), lam=lam, pairs=pairs)
        return seen.elements

    assert largest(1024) < 1024 * 1024
    assert largest(4096) <= map_rows.BLOCK_ELEMENTS < 4096 * 4096 / 16


def test_products_are_true_fp32():
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("medium")
        with Largest() as seen:
            measure(torch.randn(1, 2, 8, 4), torch.randn(1, 2, 8, 4), Visible.causal(1, 8, 8))
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision(before)
    assert seen.precisions == {"ieee"}


def test_autocast_rounds_nothing():
    q, k = torch.randn(1, 2, 8, 4), torch.randn(1, 2, 8, 4)
    plain = measure(q, k, Visible.causal(1, 8, 8))["softmax"]
    with torch.autocast("cpu", torch.bfloat16):
        cast = measure(q, k, Visible.causal(1, 8, 8))["softmax"]
    assert list(cast.rows()) == list(plain.rows())


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_non_finite_logits_are_refused_and_nothing_is_added(bad):
    q, k = torch.randn(2, 4, 30, 8).abs(), torch.randn(2, 2, 30, 8).abs()
    q[1, 2, 7, 3] = bad
    for pairs in (None, ([0, 2], [1, 3])):
        sites = sites_of(4, pairs)
        first, second = pairs or (None, None)
        with pytest.raises(NonFiniteError) as caught:
            measure_maps(
                q, k, 1.0, Visible.causal(2, 30, 30), sites, lam=None if pairs is None else 0.5,
                first=first, second=second,
            )  # fmt: skip
        assert caught.value.group == 2
        assert all(site.counts["rows"].sum() == 0 for site in sites.values())
        assert all(site.context_rms.count.sum() == 0 for site in sites.values())


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_non_finite_lambda_and_sinks_are_refused(bad):
    q, k = torch.randn(1, 4, 9, 8), torch.randn(1, 2, 9, 8)
    visible = Visible.causal(1, 9, 9)
    lam = torch.full((1, 2, 9, 1), 0.5)
    lam[0, 1, 4] = bad
    with pytest.raises(NonFiniteError) as caught:
        measure(q, k, visible, lam=lam, pairs=([0, 2], [1, 3]))
    assert caught.value.group == 2
    with pytest.raises(NonFiniteError) as caught:
        measure(q, k, visible, sink=torch.tensor([0.0, bad, 0.0, 0.0]))
    assert caught.value.group == 1


def test_what_nobody_may_attend_is_never_seen():
    q, k = torch.randn(1, 2, 20, 8), torch.randn(1, 2, 20, 8)
    lam = torch.full((1, 1, 20, 1), 0.5)
    visible = Visible(torch.zeros(1, 20, dtype=torch.int32), torch.full((1, 20), 15).int())
    visible = visible.only(torch.arange(20)[None] >= 3)
    mask = torch.rand(1, 1, 20, 20) < 0.8
    mask[..., 0], mask[..., 4] = True, False
    visible.mask = mask
    options = {"lam": lam, "pairs": ([0], [1])}
    before = measure(q, k, visible, **options)
    k[:, :, 15:], k[:, :, 4], q[:, :, :3], lam[:, :, :3] = (
        torch.nan,
        torch.inf,
        torch.inf,
        torch.nan,
    )
    after = measure(q, k, visible, **options)
    for kind, site in before.items():
        assert list(after[kind].rows()) == list(site.rows())
        assert (site.counts["rows"] == 17).all()


def test_arguments_that_do_not_belong_together_are_refused():
    q, k = torch.zeros(1, 4, 3, 4), torch.zeros(1, 2, 3, 4)
    visible = Visible.causal(1, 3, 3)
    pairs = ([0, 2], [1, 3])
    with pytest.raises(ValueError, match="5 query heads do not divide into 2 key heads"):
        measure(torch.zeros(1, 5, 3, 4), k, visible)
    with pytest.raises(ValueError, match="given together, first and second"):
        measure(q, k, visible, lam=0.5)
    with pytest.raises(ValueError, match="given together, first and second"):
        measure(q, k, visible, pairs=pairs)
    with pytest.raises(ValueError, match=r"λ of shape \(3, 3, 1\) does not broadcast"):
        measure(q, k, visible, lam=torch.zeros(3, 3, 1), pairs=pairs)
    with pytest.raises(ValueError, match="not among the 4 query heads"):
        measure(q, k, visible, lam=0.5, pairs=([0], [4]))
    with pytest.raises(ValueError, match="sites of maps and heads"):
        measure_maps(q, k, 1.0, visible, sites_of(2))
    with pytest.raises(ValueError, match="sites of maps and heads"):
        measure_maps(q, k, 1.0, visible, sites_of(4, pairs))
    with pytest.raises(ValueError, match="spans and span_rows"):
        measure(q, k, visible, spans=[(0, 1)])
    with pytest.raises(ValueError, match="one entry per sequence, 1"):
        measure(q, k, visible, key_zero=torch.tensor([0, 0]))
    with pytest.raises(ValueError, match=r"\(2, 4\) is no span of 3 keys"):
        measure(q, k, visible, spans=[(2, 4)], span_rows=torch.tensor([2]))
