"""Paired differences with bootstrap intervals: the same questions or windows, drawn together."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["LEVEL", "RESAMPLES", "SEED", "Units", "intervals", "units_of"]

RESAMPLES, SEED, LEVEL = 10_000, 0, 95  # per cent

_BLOCK = 1 << 22  # units drawn at a time
_CLOSE = 1e-9

# Metric -> its items, where they have another name.
_ITEMS = {"acc": "correct", "acc_norm": "correct_norm"}


@dataclass(frozen=True, eq=False)
class Units:
    """What a metric was measured on, unit by unit: it is Σ sums / Σ weights.

    Attributes:
        kind: `windows`, `questions` or `texts`, which are drawn independently of each other.
        sums: (n,) fp64.
        weights: (n,) fp64: tokens of a window, 1 of a question.
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
        None where the metric is no mean of its items, as a perplexity or a spread is none.
    """
    array = items.get(_ITEMS.get(metric, metric), items.get(metric))
    if array is None or not array.ndim or not len(array):
        return None
    sums = array.reshape(len(array), -1).astype(np.float64).mean(1)
    weights = np.ones(len(sums))
    kind = "questions"
    if "tokens" in items:
        kind, weights = "windows", items["tokens"].astype(np.float64)
    elif "text" in items:  # questions about one text, at whatever depth, are no independent draws
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
    """Percentile bootstrap intervals of Σ dᵢ / Σ wᵢ, at `LEVEL` per cent.

    Units are drawn with replacement, `resamples` times n of them, with the seed `SEED`; all
    columns see the same draws (Efron and Tibshirani, An Introduction to the Bootstrap, chapter 13).

    Args:
        differences: (n, k), of the sums of k pairs of results.
        weights: (n,), the same in both results of a pair.
        resamples: how often n units are drawn.

    Returns:
        Ends of the intervals, (2, k); NaN for a single unit, of which nothing can be drawn.
    """
    n, pairs = differences.shape
    if n < 2:
        return np.full((2, pairs), np.nan)
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
