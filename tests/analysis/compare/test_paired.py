"""Bootstrap intervals against a plain loop, and what they must do."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quantdiff.analysis.compare.paired import LEVEL, SEED, intervals, units_of


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


def test_are_those_of_a_plain_loop():
    generator = np.random.default_rng(1)
    weights = generator.integers(5, 40, 17).astype(float)
    differences = generator.normal(size=(17, 3)) * weights[:, None]
    found = intervals(differences, weights, resamples=300)
    for column in range(3):
        expected = by_loop(differences[:, column], weights, 300)
        assert found[:, column] == pytest.approx(expected, rel=1e-12)


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


@given(
    st.integers(2, 12),
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


def test_nothing_can_be_drawn_of_one_unit():
    assert np.isnan(intervals(np.ones((1, 2)), np.ones(1))).all()


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
