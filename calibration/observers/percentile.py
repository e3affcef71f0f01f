"""Percentile: the range that leaves a given share of the values unclipped."""

import numpy as np
from numpy.typing import NDArray

from quantdiff.calibration.observers.observed import Array, Observed, Range
from quantdiff.errors import UsageError

__all__ = ["DEFAULT", "find"]

DEFAULT = 99.9


def find(observed: Observed, bits: int, symmetric: bool, parameter: float | None) -> Range:
    """Ends between which `parameter` per cent of the values lie, by linear interpolation of ranks.

    Symmetric: the magnitude below which that share of the magnitudes lies, as both ends.
    Asymmetric: (100 − parameter)/2 per cent of the signed values lie below the range, and as many
    above.

    Args:
        observed: G groups.
        bits: unused; the clipped share does not depend on it.
        symmetric: which of the two to find.
        parameter: per cent, in (0, 100], 99.9 by default; 100 is absmax.

    Returns:
        (least, most), fp32, (G,); within 0.4 % of the values between whose ranks each end lies,
        since a value is represented by the middle of its bin.

    Raises:
        UsageError: a percentile outside (0, 100].
    """
    percent = DEFAULT if parameter is None else parameter
    if not 0 < percent <= 100:
        raise UsageError(f"a percentile lies in (0, 100], not {percent:g}")
    if percent == 100:
        return observed.ends
    histogram = observed.histogram
    middles = (observed.edges[1:] + observed.edges[:-1]) / 2
    counts = histogram.counts
    if symmetric:
        values = np.concatenate([[0.0], middles])
        counts = np.concatenate([histogram.zeros[:, None], counts.sum(1)], 1)  # (G, 1 + W)
        most = np.minimum(_percentile(values, counts, percent), observed.absmax)
        end = most.astype(np.float32)
        return -end, end
    values = np.concatenate([-middles[::-1], [0.0], middles])
    counts = np.concatenate(
        [counts[:, 1, ::-1], histogram.zeros[:, None], counts[:, 0]], 1
    )  # (G, W + 1 + W)
    tail = (100 - percent) / 2
    low, high = (
        np.clip(_percentile(values, counts, p), *observed.ends).astype(np.float32)
        for p in (tail, 100 - tail)
    )
    return low, high


def _percentile(values: Array, counts: NDArray[np.int64], percent: float) -> Array:
    """Percentile of ascending values (V,) with counts (G, V) int64; (G,), 0 for an empty group."""
    below = counts.cumsum(1)
    result = np.zeros(len(counts))
    for group, ranks in enumerate(below):
        if ranks[-1]:
            rank = percent / 100 * (int(ranks[-1]) - 1)
            low = int(rank)
            ends = values[np.searchsorted(ranks, [low, min(low + 1, ranks[-1] - 1)], side="right")]
            result[group] = ends[0] + (rank - low) * (ends[1] - ends[0])
    return result
