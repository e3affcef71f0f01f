"""Intervals against a plain loop and the law of Student's t, and what they must do."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quantdiff.analysis.compare.paired import FEW, LEVEL, SEED, intervals, units_of


def by_loop(differences, weights, resamples):
    """The same draws, one at a time."""
    n = len(weights)
    generator = np.random.default_rng(SEED)
    found = []
    for draw in generator.integers(0, n, (resamples, n)):
        total = sum(weights[i] for i in draw)
        found.append(sum(differences[i] for i in draw) / total)
    found = np.array(found)
    ends = sorted(found)
    # Linear interpolation between order statistics.
    places = [(100 - LEVEL) / 200 * (resamples - 1), (100 + LEVEL) / 200 * (resamples - 1)]
    return [np.interp(place, range(resamples), ends) for place in places]


@pytest.mark.parametrize("n", [FEW, 41])
def test_of_many_units_are_those_of_a_plain_loop(n):
    generator = np.random.default_rng(1)
    weights = generator.integers(5, 40, n).astype(float)
    differences = generator.normal(size=(n, 3)) * weights[:, None]
    found = intervals(differences, weights, resamples=300)
    for column in range(3):
        expected = by_loop(differences[:, column], weights, 300)
        assert found[:, column] == pytest.approx(expected, rel=1e-12)


def student_inside(t, degrees):
    """The probability that Student's t lies within ±t, by Simpson's rule over its density."""
    x = np.linspace(0, t, 20_001)
    scale = math.gamma((degrees + 1) / 2) / math.gamma(degrees / 2) / math.sqrt(degrees * math.pi)
    y = 2 * scale * (1 + x**2 / degrees) ** (-(degrees + 1) / 2)
    return (x[1] / 3) * (y[0] + 4 * y[1:-1:2].sum() + 2 * y[2:-1:2].sum() + y[-1])


@pytest.mark.parametrize("n", range(2, FEW))
def test_of_few_units_are_students(n):
    d = np.random.default_rng(n).normal(1, 2, n)
    (low,), (high,) = intervals(3 * d[:, None], np.full(n, 3.0))
    assert (low + high) / 2 == pytest.approx(d.mean())
    t = (high - low) / 2 / (d.std(ddof=1) / math.sqrt(n))
    assert student_inside(t, n - 1) == pytest.approx(LEVEL / 100, abs=1e-5)


def test_of_few_units_keep_the_mean_over_tokens_and_its_error():
    differences, weights = np.array([[3.0], [1.0], [-1.0]]), np.array([30.0, 30.0, 10.0])
    (low,), (high,) = intervals(differences, weights)
    mean = (3 + 1 - 1) / 70
    residuals = [3 - 30 * mean, 1 - 30 * mean, -1 - 10 * mean]
    error = math.sqrt(3 / 2 * sum(e**2 for e in residuals)) / 70
    assert (low, high) == pytest.approx((mean - 4.3027 * error, mean + 4.3027 * error))


def test_many_units_are_drawn_in_blocks_of_the_same_law(monkeypatch):
    from quantdiff.analysis.compare import paired

    differences = np.random.default_rng(2).normal(size=(50, 1))
    whole = intervals(differences, np.ones(50), resamples=4000)
    monkeypatch.setattr(paired, "_BLOCK", 50 * 7)
    parts = intervals(differences, np.ones(50), resamples=4000)
    assert parts == pytest.approx(whole, abs=0.05)
    assert np.isfinite(parts).all()


def test_they_hold_the_truth_about_as_often_as_they_say():
    generator = np.random.default_rng(3)
    trials, truth, held = 400, 0.25, 0
    weights = generator.integers(20, 30, 60).astype(float)
    for _ in range(trials):
        differences = weights * generator.normal(truth, 1, 60)
        (low,), (high,) = intervals(differences[:, None], weights, resamples=500)
        held += low <= truth <= high
    # Three standard deviations of a binomial, and what a percentile interval of 60 units lacks.
    assert LEVEL / 100 - 0.055 < held / trials < LEVEL / 100 + 0.035


@pytest.mark.parametrize("n", [4, 8, 16, 64])
@pytest.mark.parametrize("last", [31, 12])
def test_they_do_so_for_few_windows_too(n, last):
    """Of a text all windows but the last are of one length."""
    generator = np.random.default_rng(n)
    trials, truth = 4000, 0.25
    weights = np.array([31.0] * (n - 1) + [last])
    differences = weights[:, None] * generator.normal(truth, 1, (n, trials))
    low, high = intervals(differences, weights, resamples=1000)
    held = np.mean((low <= truth) & (truth <= high))
    # Three standard deviations of a binomial, and what the last window costs four of them.
    assert LEVEL / 100 - 0.01 - 0.02 * (n == 4 and last < 31) < held < LEVEL / 100 + 0.01


@given(
    st.integers(2, FEW + 12),
    st.integers(0, 2**32 - 1),
    st.floats(0.1, 100),
    st.floats(-5, 5),
)
@settings(max_examples=30)
def test_they_move_with_the_data(n, seed, factor, shift):
    generator = np.random.default_rng(seed)
    weights = generator.integers(1, 30, n).astype(float)
    d = generator.normal(size=(n, 1)) * weights[:, None]
    low, high = intervals(d, weights, resamples=200)
    assert low <= high
    assert intervals(-d, weights, resamples=200) == pytest.approx(np.array([-high, -low]))
    assert intervals(d * factor, weights, resamples=200) == pytest.approx(
        np.array([low, high]) * factor
    )
    scaled = intervals(d * factor, weights * factor, resamples=200)
    assert scaled == pytest.approx(np.array([low, high]))
    moved = intervals(d + shift * weights[:, None], weights, resamples=200)
    assert moved == pytest.approx(np.array([low, high]) + shift, abs=1e-9)


def test_one_unit_tells_of_no_spread():
    assert np.isnan(intervals(np.ones((1, 2)), np.ones(1))).all()


@pytest.mark.parametrize("n", [2, FEW - 1, FEW])
def test_units_that_do_not_differ_give_an_interval_without_width(n):
    assert (intervals(np.zeros((n, 1)), np.full(n, 7.0)) == 0).all()


class TestUnits:
    def test_windows_have_their_tokens_as_weights(self):
        items = {"nll": np.array([30.0, 10.0]), "tokens": np.array([10, 5])}
        units = units_of(items, "nll", 40 / 15)
        assert units.kind == "windows"
        assert units.sums.tolist() == [30, 10]
        assert units.weights.tolist() == [10, 5]

    def test_questions_and_orders_of_them(self):
        items = {"correct": np.array([[True, False], [True, True]])}
        units = units_of(items, "acc", 0.75)
        assert (units.kind, units.sums.tolist()) == ("questions", [0.5, 1])

    def test_questions_about_one_text_are_one_unit(self):
        items = {"correct": np.array([1, 0, 1, 1]), "text": np.array([0, 0, 1, 1])}
        units = units_of(items, "acc", 0.75)
        assert units.kind == "texts"
        assert (units.sums.tolist(), units.weights.tolist()) == ([1, 2], [2, 2])

    @pytest.mark.parametrize(
        ("metric", "value"),
        [("perplexity", np.exp(40 / 15)), ("nll", 2.0), ("spread", 0.1), ("gold", 0.0)],
    )
    def test_what_is_no_mean_of_its_items_has_none(self, metric, value):
        items = {"nll": np.array([30.0, 10.0]), "tokens": np.array([10, 5]), "gold": np.array(3)}
        assert units_of(items, metric, value) is None
