"""Intervals of paired differences, over the same questions or windows."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quantdiff.analysis.evaluation.estimates import ratio

__all__ = ["DECISIVE", "FEW", "LEVEL", "RESAMPLES", "SEED", "Units", "intervals", "units_of"]

RESAMPLES, SEED, LEVEL = 10_000, 0, 95  # per cent

# Below this many units resamples vary less than samples do: percentile intervals at 95 % contain
# the true value 80 % of the time for 4 units and 92 % for 16.
FEW = 30

# Below this many units no interval can separate a difference from 0, whatever its distribution:
# five units all differ in one direction by chance with a probability of 2 · 2⁻⁵, above 5 %.
DECISIVE = 6

# Student's t beyond which 2.5 % lie, for 1, 2, … degrees of freedom: `LEVEL`, two-sided.
_STUDENT = (
    12.7062, 4.3027, 3.1824, 2.7764, 2.5706, 2.4469, 2.3646, 2.3060, 2.2622, 2.2281,
    2.2010, 2.1788, 2.1604, 2.1448, 2.1314, 2.1199, 2.1098, 2.1009, 2.0930, 2.0860,
    2.0796, 2.0739, 2.0687, 2.0639, 2.0595, 2.0555, 2.0518, 2.0484,
)  # fmt: skip

_BLOCK = 1 << 22  # units drawn at a time
_CLOSE = 1e-9

# Metric -> its items, where their name differs.
_ITEMS = {"acc": "correct", "acc_norm": "correct_norm"}


@dataclass(frozen=True, eq=False)
class Units:
    """What a metric was measured on, unit by unit: its value is Σ sums / Σ weights.

    Attributes:
        kind: `windows`, `questions` or `texts`, which are drawn independently of each other.
        sums: (n,) fp64.
        weights: (n,) fp64: tokens of a window, 1 for a question, questions about a text.
    """

    kind: str
    sums: NDArray[np.float64]
    weights: NDArray[np.float64]


def units_of(items: Mapping[str, NDArray[Any]], metric: str, value: float) -> Units | None:
    """A metric's units among a cell's items, as the evaluations write them.

    Args:
        items: of one cell.
        metric: its name in the results.
        value: its value there.

    Returns:
        None where the metric is not a mean of its items, such as a perplexity or a spread.
    """
    array = items.get(_ITEMS.get(metric, metric), items.get(metric))
    if array is None or not array.ndim or not len(array):
        return None
    sums = array.reshape(len(array), -1).astype(np.float64).mean(1)
    weights = np.ones(len(sums))
    kind = "questions"
    if "tokens" in items:
        kind, weights = "windows", items["tokens"].astype(np.float64)
    elif "text" in items:  # questions about one text, at any depth, are not independent
        kind = "texts"
        text = items["text"].astype(np.int64)
        sums, weights = np.bincount(text, sums), np.bincount(text, weights).astype(np.float64)
    if sums.shape != weights.shape or not weights.sum():
        return None
    found = float(sums.sum() / weights.sum())
    return Units(kind, sums, weights) if abs(found - value) <= _CLOSE * max(1, abs(value)) else None


def intervals(
    differences: NDArray[np.float64], weights: NDArray[np.float64], *, resamples: int = RESAMPLES
) -> NDArray[np.float64]:
    """Intervals of m = Σ dᵢ / Σ wᵢ, at `LEVEL` per cent.

    Below `FEW` units they are Student's t with n − 1 degrees of freedom: m ± t · the standard error
    of a ratio, which is that of the residuals dᵢ − m·wᵢ (`estimates.ratio`).

    From there on they are percentile bootstrap intervals: n units are drawn with replacement,
    `resamples` times, with the seed `SEED`; all columns share the draws (Efron and Tibshirani, An
    Introduction to the Bootstrap, chapter 13).

    Args:
        differences: (n, k), of the sums of k pairs of results.
        weights: (n,), the same in both results of a pair.
        resamples: how often n units are drawn.

    Returns:
        Ends of the intervals, (2, k); NaN for a single unit, whose spread is unknown.
    """
    n, pairs = differences.shape
    if n < 2:
        return np.full((2, pairs), np.nan)
    if n < FEW:
        estimates = [ratio(column, weights) for column in differences.T]
        values, errors = np.array(estimates, dtype=np.float64).T  # (k,) each
        half = _STUDENT[n - 2] * errors
        return np.stack([values - half, values + half])
    columns = np.column_stack([differences, weights])  # (n, k + 1)
    generator = np.random.default_rng(SEED)
    found = np.empty((resamples, pairs))
    block = max(_BLOCK // n, 1)
    for start in range(0, resamples, block):
        rows = min(block, resamples - start)
        drawn = generator.integers(0, n, (rows, n))
        flat = (drawn + n * np.arange(rows)[:, None]).ravel()
        counts = np.bincount(flat, minlength=rows * n).reshape(rows, n)  # how often each was drawn
        sums = counts.astype(np.float64) @ columns  # (rows, k + 1)
        found[start : start + rows] = sums[:, :-1] / sums[:, -1:]
    tail = (100 - LEVEL) / 2
    return np.percentile(found, [tail, 100 - tail], axis=0)
