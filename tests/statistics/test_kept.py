"""Histogram, moments, top and their merging, against plain numpy."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from quantdiff.statistics import Histogram, Moments, Top

finite = st.floats(-(2.0**127), 2.0**127, width=32)
values = hnp.arrays(np.float32, st.integers(1, 300), elements=finite)
parts = st.lists(values, min_size=1, max_size=6)


@given(values, st.floats(0, 100))
def test_percentiles_are_within_half_a_per_cent(x, percent):
    found = Histogram.of(x[None]).percentile(percent)[0]
    magnitudes = np.abs(x.astype(np.float64))
    magnitudes[magnitudes < 2.0**-126] = 0
    exact = np.percentile(magnitudes, percent)
    assert found == pytest.approx(exact, rel=5e-3)


@given(parts)
def test_histograms_merge_to_the_histogram_of_everything(xs):
    merged = Histogram.empty(1)
    for x in xs:
        merged.merge(Histogram.of(x[None]))
    whole = Histogram.of(np.concatenate(xs)[None])
    assert merged.count == whole.count == sum(map(len, xs))
    assert merged.first == whole.first
    assert (merged.counts == whole.counts).all()
    assert merged.zeros == whole.zeros


def test_signs_are_told_apart_and_zeros_counted():
    histogram = Histogram.of(np.array([[1.0, -1.0, -1.0, 0.0, -0.0, 3.0]], np.float32))
    one = np.flatnonzero(histogram.midpoints() >= 1.0)[0]
    assert histogram.counts[0, :, one].tolist() == [1, 2]
    assert histogram.zeros.tolist() == [2]
    assert histogram.percentile(0)[0] == 0


def test_an_empty_histogram_has_no_percentile():
    assert np.isnan(Histogram.empty(2).percentile(50)).all()
    with pytest.raises(ValueError, match="not 101"):
        Histogram.empty(1).percentile(101)


def moments_of(x, pivot=0.0, weight=1.0):
    t = x.astype(np.float64) * weight - pivot
    sums = np.array([[(t**p).sum() for p in (1, 2, 3, 4)]])
    return Moments.from_sums(np.array([len(x)]), sums, np.array([weight]), np.array([pivot]))


ordinary = hnp.arrays(
    np.float64, st.integers(1, 200), elements=st.floats(-100, 100).map(lambda v: round(v, 3))
)


@given(
    st.lists(ordinary, min_size=1, max_size=6), st.floats(-20, 20), st.sampled_from([0.25, 1, 8])
)
@settings(max_examples=200)
def test_moments_merge_to_the_moments_of_everything(xs, pivot, weight):
    merged = Moments.empty(1)
    for x in xs:
        merged.merge(moments_of(x, pivot, weight))
    x = np.concatenate(xs)
    centred = x - x.mean()
    assert merged.count == len(x)
    assert merged.mean[0] == pytest.approx(x.mean(), abs=1e-9)
    for p, m in ((2, merged.m2), (3, merged.m3), (4, merged.m4)):
        assert m[0] == pytest.approx((centred**p).sum(), rel=1e-8, abs=1e-7 * 100**p)
    if centred.std() > 1e-2:
        assert merged.std[0] == pytest.approx(x.std(), rel=1e-6)
        assert merged.kurtosis[0] == pytest.approx((centred**4).mean() / x.var() ** 2, rel=1e-4)


def test_total_is_the_merge_of_the_groups():
    x, y = np.arange(10.0), np.array([3.0, -70.0])
    pairs = zip(moments_of(x).arrays(), moments_of(y).arrays(), strict=True)
    both = Moments(*(np.concatenate(pair) for pair in pairs))
    merged = moments_of(x)
    merged.merge(moments_of(y))
    for a, b in zip(both.total().arrays(), merged.arrays(), strict=True):
        assert np.allclose(a, b)


items = st.lists(
    st.tuples(st.sampled_from([0.0, 1.0, -1.0, 2.5, -7.0]), st.integers(0, 5), st.integers(0, 5)),
    max_size=60,
    unique_by=lambda item: item[1:],
)


@given(items, st.integers(0, 20), st.randoms(use_true_random=False))
def test_top_keeps_the_largest_and_lowest_whatever_the_order(found, rank, order):
    top = Top(rank, 2)
    order.shuffle(found)
    for start in range(0, len(found), 7):
        part = found[start : start + 7]
        top.offer(np.array([v for v, *_ in part], np.float32), np.array([c for _, *c in part]))
    expected = sorted(found, key=lambda item: (-abs(item[0]), *item[1:]))[:rank]
    assert top.values.tolist() == [abs(item[0]) for item in expected]
    assert [tuple(c) for c in top.coordinates] == [item[1:] for item in expected]
