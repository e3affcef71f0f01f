"""Each observer against a search over the raw values, and what must hold for all of them."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from quantdiff import UsageError
from quantdiff.calibration.observers import OBSERVERS, Observed, observe
from quantdiff.calibration.observers.entropy import LINEAR_BINS, divergences, linear_counts
from quantdiff.quantization import Grid, Scheme
from quantdiff.statistics import Histogram

N = 40_000


def draw(name):
    """Raw values, (n,) fp32."""
    rng = np.random.default_rng(0)
    return {
        "normal": lambda: rng.normal(size=N),
        "heavy tail": lambda: rng.standard_t(3, N),
        "outlier": lambda: np.append(rng.normal(size=N), 60.0),
        "one-sided": lambda: rng.gamma(2, size=N),
        "shifted": lambda: rng.normal(-3, 1, N),
        "uniform": lambda: rng.uniform(-1, 1, N),
        "all equal": lambda: np.full(100, -0.7),
        "all zero": lambda: np.zeros(50),
        "one value": lambda: np.array([2.5]),
        "tiny": lambda: 1e-30 * rng.normal(size=N),
        "large": lambda: 1e30 * rng.normal(size=N),
        "few values": lambda: rng.choice([0.1, -0.7, 1.3, 3.0], N),
        "twenty": lambda: rng.normal(size=20),
        "half zeros": lambda: rng.normal(size=N) * (rng.random(N) < 0.5),
        "at the limit": lambda: 3.4e38 * np.array([-1, -0.9, -0.5, 0.1, 0.2, 1.0]),
        "subnormal": lambda: np.array([1e-41, -3e-42]),
    }[name]().astype(np.float32)


SPREAD = ("normal", "heavy tail", "outlier", "one-sided", "shifted", "uniform", "tiny", "large",
          "half zeros")  # fmt: skip
FEW = ("all equal", "all zero", "one value", "few values", "twenty", "at the limit", "subnormal")


def squared_error(x, least, most, bits, symmetric):
    """Σ(x − q(x))² on the raw values, fp64, with the grid that the project makes of a range."""
    grid = Grid.of(torch.tensor(least), torch.tensor(most), bits, symmetric)
    step, zero = grid.step.double().numpy(), grid.zero.double().numpy()
    x = x.astype(np.float64)
    integers = np.clip(np.rint(x / step) + zero, grid.low, grid.high)
    return float(((x - (integers - zero) * step) ** 2).sum())


def found(name, x, bits, symmetric, parameter=None):
    least, most = observe(name, Observed.of(x[None]), bits, symmetric, parameter)
    assert least.dtype == most.dtype == np.float32
    assert np.isfinite([least, most]).all()
    return least[0], most[0]


@pytest.mark.parametrize("name", [*SPREAD, *FEW])
def test_absmax_is_exact(name):
    x = draw(name)
    for symmetric in (True, False):
        assert found("absmax", x, 8, symmetric) == (x.min(), x.max())


class TestPercentile:
    @pytest.mark.parametrize("name", [*SPREAD, *FEW])
    @pytest.mark.parametrize("percent", [50, 99, 99.9, 99.99, 100])
    def test_symmetric(self, name, percent):
        x = draw(name)
        least, most = found("percentile", x, 8, True, percent)
        exact = np.percentile(np.abs(x).astype(np.float64), percent)
        if name == "subnormal":  # counted as zeros
            assert most <= exact
            return
        assert max(most, -least) == pytest.approx(exact, rel=5e-3, abs=0)

    @pytest.mark.parametrize("name", [*SPREAD, "all equal", "all zero", "one value"])
    @pytest.mark.parametrize("percent", [90, 99.9, 99.99])
    def test_asymmetric(self, name, percent):
        x = draw(name)
        tail = (100 - percent) / 2
        ends = found("percentile", x, 8, False, percent)
        assert ends == pytest.approx(np.percentile(x.astype(np.float64), [tail, 100 - tail]),
                                     rel=5e-3, abs=0)  # fmt: skip

    @pytest.mark.parametrize("percent", [1, 50, 99, 99.9])
    def test_past_2_to_the_24_elements(self, percent):
        """Where torch.quantile ends: 40,000 values, each of them seen 1,000,003 times."""
        x = draw("heavy tail")
        few = Histogram.of(x[None])
        many = Histogram(few.counts * 1_000_003, few.first, few.zeros * 1_000_003)
        assert int(many.counts.sum()) > 2**35
        least, most = (np.array([end], np.float32) for end in (x.min(), x.max()))
        ranges = [
            observe("percentile", Observed(seen, least, most), 8, True, percent)[1][0]
            for seen in (few, many)
        ]
        expected = np.quantile(np.abs(x.astype(np.float64)), percent / 100)
        assert ranges[1] == pytest.approx(expected, rel=5e-3)
        assert ranges[1] == pytest.approx(ranges[0], rel=5e-3)

    def test_100_is_absmax_exactly(self):
        x = draw("heavy tail")
        for symmetric in (True, False):
            assert found("percentile", x, 4, symmetric, 100) == (x.min(), x.max())

    @pytest.mark.parametrize("percent", [0, -1, 100.1, 120, float("nan")])
    def test_outside_is_refused(self, percent):
        with pytest.raises(UsageError, match=r"lies in \(0, 100\], not"):
            found("percentile", draw("normal"), 8, True, percent)


class TestMse:
    @pytest.mark.parametrize("name", SPREAD)
    @pytest.mark.parametrize("bits", [2, 3, 4, 6, 8])
    def test_symmetric_finds_what_a_search_finds(self, name, bits):
        x = draw(name)
        ours = squared_error(x, *found("mse", x, bits, True), bits, True)
        absmax = float(np.abs(x).max())
        mean = float(np.abs(x.astype(np.float64)).mean())
        clips = np.geomspace(mean / 2, absmax, 400)
        best = min(squared_error(x, -c, c, bits, True) for c in clips)
        assert ours <= 1.01 * best

    @pytest.mark.parametrize("name", ["heavy tail", "one-sided", "shifted", "uniform"])
    @pytest.mark.parametrize("bits", [2, 4, 8])
    def test_asymmetric_finds_what_a_search_finds(self, name, bits):
        x = draw(name)[:10_000]
        ours = squared_error(x, *found("mse", x, bits, False), bits, False)
        low, high = min(float(x.min()), 0), max(float(x.max()), 0)
        best = min(
            squared_error(x, low * a, high * b, bits, False)
            for a in (np.linspace(0.02, 1, 25) if low else [1])
            for b in (np.linspace(0.02, 1, 25) if high else [1])
        )
        assert ours <= 1.01 * best

    @pytest.mark.parametrize("bits", [2, 4, 8])
    @pytest.mark.parametrize("far", [-30.0, 40.0])
    def test_one_far_value_does_not_hide_the_best_width(self, far, bits):
        rng = np.random.default_rng(0)
        most = rng.uniform(0, 1, 400_000) if far < 0 else rng.normal(-1, 0.2, 400_000)
        x = np.append(most, far).astype(np.float32)
        ours = squared_error(x, *found("mse", x, bits, False), bits, False)
        shares = (0, 0.03, 0.3, 0.6, 0.8, 1)
        ends = [
            (min(float(x.min()), 0) * a, max(float(x.max()), 0) * b)
            for a in shares for b in shares if a or b
        ]  # fmt: skip
        best = min(squared_error(x, *end, bits, False) for end in ends)
        assert ours <= 1.01 * best

    @pytest.mark.parametrize("name", [*SPREAD, *FEW])
    @pytest.mark.parametrize("symmetric", [True, False])
    def test_never_loses_to_absmax(self, name, symmetric):
        x = draw(name)
        for bits in range(2, 9):
            ours = squared_error(x, *found("mse", x, bits, symmetric), bits, symmetric)
            plain = squared_error(x, x.min(), x.max(), bits, symmetric)
            assert ours <= plain * (1 + 1e-6), bits


def smeared(x):
    """The linear counts by their definition, value by value: each spread evenly over its bin."""
    a = np.abs(x)
    absmax = float(a.max())
    low = (a.view(np.uint32) >> 16 << 16).view(np.float32).astype(np.float64)
    high = ((a.view(np.uint32) >> 16) + 1 << 16).view(np.float32).astype(np.float64)
    if x.min() > 0 or x.max() < 0:
        low = np.maximum(low, float(a.min()))
    high = np.minimum(high, absmax)
    edges = absmax * np.arange(LINEAR_BINS + 1) / LINEAR_BINS
    below = np.zeros(LINEAR_BINS + 1)
    for part in np.array_split(np.arange(len(a)), max(1, len(a) // 2000)):
        width = np.maximum(high[part] - low[part], 1e-300)[:, None]
        below += np.clip((edges - low[part, None]) / width, 0, 1).sum(0)
    return np.diff(below)


def divergence(counts, i, levels):
    """KL(P‖Q) for the first i of the linear counts, bin by bin as its definition reads."""
    p = counts[:i].copy()
    filled = p > 0
    p[np.flatnonzero(filled)[-1]] += counts[i:].sum()
    level = np.arange(i) * levels // i
    sums = np.bincount(level, counts[:i], levels)
    bins = np.bincount(level, filled, levels)
    q = np.where(filled, (sums / np.maximum(bins, 1))[level], 0)
    p, q = p / p.sum(), q / q.sum()
    return float((p[filled] * np.log(p[filled] / q[filled])).sum())


class TestEntropy:
    @pytest.mark.parametrize("name", ["normal", "heavy tail", "one-sided", "shifted", "uniform",
                                      "tiny", "large", "half zeros"])  # fmt: skip
    def test_finds_what_a_search_over_the_raw_values_finds(self, name):
        x = draw(name)[:10_000]
        counts = smeared(x)
        ours = linear_counts(Observed.of(x[None]).magnitudes, np.abs(x).max(keepdims=True))[0]
        assert ours == pytest.approx(counts, rel=1e-6, abs=1e-4)
        for bits in (4, 8):
            levels = 2 ** (bits - 1)
            _, most = found("entropy", x, bits, True)
            i = round(float(most) / float(np.abs(x).max()) * LINEAR_BINS)
            candidates = [j for j in range(128, LINEAR_BINS + 1) if counts[j - 1] > 0]
            best = min(divergence(counts, j, levels) for j in candidates)
            assert divergence(counts, i, levels) <= 1.01 * best

    @pytest.mark.parametrize("name", ["normal", "one-sided", "heavy tail"])
    def test_is_close_to_a_search_that_counts_the_values_themselves(self, name):
        # As TensorRT counts: the noise of so many values in 2,048 bins is in its objective.
        rng = np.random.default_rng(1)
        x = {
            "normal": rng.normal(size=10**6),
            "one-sided": rng.gamma(2, size=10**6),
            "heavy tail": rng.standard_t(4, 10**6),
        }[name].astype(np.float32)
        a = np.abs(x).astype(np.float64)
        counts = np.histogram(a, LINEAR_BINS, (0, a.max()))[0].astype(np.float64)
        for bits, tolerance in ((4, 1.01), (6, 1.01), (8, 1.10)):
            _, most = found("entropy", x, bits, True)
            i = round(float(most) / a.max() * LINEAR_BINS)
            objective = divergences(counts[None], np.full((1, LINEAR_BINS), 2 ** (bits - 1)))[0]
            assert objective[i - 1] <= tolerance * objective.min()

    def test_divergences_are_those_of_the_definition(self):
        counts = smeared(draw("heavy tail")[:3000])
        counts[1500:1700] = 0
        for levels in (2, 8, 128, 256):
            fast = divergences(counts[None], np.full((1, LINEAR_BINS), levels))[0]
            for i in (128, 255, 256, 777, 1600, 2047, 2048):
                slow = divergence(counts, i, levels) if i >= levels else np.inf
                assert fast[i - 1] == pytest.approx(slow, rel=1e-7, abs=1e-12)
            assert np.isinf(fast[: max(127, levels - 1)]).all()

    @pytest.mark.parametrize("name", ["all equal", "all zero", "one value", "few values"])
    @pytest.mark.parametrize("symmetric", [True, False])
    def test_few_values_are_not_clipped(self, name, symmetric):
        x = draw(name)
        least, most = found("entropy", x, 8, symmetric)
        assert max(-least, most) == np.abs(x).max()

    def test_asymmetric_is_cut_at_the_extremes(self):
        x = draw("one-sided")
        least, most = found("entropy", x, 4, False)
        assert least == x.min()
        assert 0 < most < x.max()


values = st.lists(
    st.floats(-1e6, 1e6, width=32).filter(lambda v: v == 0 or abs(v) > 1e-6), min_size=1,
    max_size=60,
).map(lambda v: np.array(v, np.float32))  # fmt: skip
schemes = st.tuples(
    st.sampled_from([("absmax", None), ("percentile", 90.0), ("mse", None), ("entropy", None)]),
    st.sampled_from([2, 4, 8]),
    st.booleans(),
)


class TestProperties:
    @given(values, schemes)
    def test_ranges_are_finite_and_within_the_data(self, x, scheme):
        (name, parameter), bits, symmetric = scheme
        least, most = found(name, x, bits, symmetric, parameter)
        if symmetric:
            assert max(abs(least), abs(most)) <= np.abs(x).max() * (1 + 1e-6)
        else:
            # As wide as the data with zero at most; its zero point may shift it by half a step.
            width = max(float(x.max()), 0) - min(float(x.min()), 0)
            assert least <= most
            assert float(most) - float(least) <= width * (1 + 1e-6)

    @given(values, schemes)
    def test_symmetric_ranges_do_not_know_signs(self, x, scheme):
        (name, parameter), bits, _ = scheme
        ends = [np.abs(found(name, v, bits, True, parameter)).max() for v in (x, -x)]
        assert ends[0] == ends[1]

    @given(values, schemes, st.integers(-60, 60))
    def test_powers_of_two_scale_the_range(self, x, scheme, power):
        (name, parameter), bits, symmetric = scheme
        scale = np.float32(2.0**power)
        ends = found(name, x, bits, symmetric, parameter)
        scaled = found(name, x * scale, bits, symmetric, parameter)
        assert np.array(scaled) == pytest.approx(np.array(ends) * scale, rel=1e-6, abs=0)

    @given(values, values, schemes)
    def test_merged_equals_whole(self, x, y, scheme):
        (name, parameter), bits, symmetric = scheme
        histogram = Histogram.of(x[None])
        histogram.merge(Histogram.of(y[None]))
        both = np.concatenate([x, y])
        merged = Observed(histogram, both.min(keepdims=True), both.max(keepdims=True))
        least, most = observe(name, merged, bits, symmetric, parameter)
        assert (least[0], most[0]) == found(name, both, bits, symmetric, parameter)

    @pytest.mark.parametrize("name", OBSERVERS)
    @pytest.mark.parametrize("symmetric", [True, False])
    def test_groups_do_not_know_of_each_other(self, name, symmetric):
        x = np.stack([draw("normal"), draw("heavy tail") * 100, draw("one-sided") * 1e-3])
        together = observe(name, Observed.of(x), 4, symmetric)
        for group, row in enumerate(x):
            alone = found(name, row, 4, symmetric)
            assert [end[group] for end in together] == pytest.approx(alone, rel=1e-6)

    @pytest.mark.parametrize("name", OBSERVERS)
    @pytest.mark.parametrize("symmetric", [True, False])
    def test_a_group_that_saw_nothing_has_the_range_0(self, name, symmetric):
        empty = Observed(Histogram.empty(2), np.full(2, np.inf, np.float32),
                         np.full(2, -np.inf, np.float32))  # fmt: skip
        least, most = observe(name, empty, 8, symmetric)
        assert (least == 0).all()
        assert (most == 0).all()


def test_an_unknown_observer_is_refused():
    with pytest.raises(UsageError, match="unknown observer 'minmax'; known: absmax, percentile"):
        observe("minmax", Observed.of(draw("normal")[None]), 8, True)


@pytest.mark.parametrize("name", OBSERVERS)
def test_schemes_know_every_observer(name):
    assert Scheme("attention_logits", 4, name).observer == name
