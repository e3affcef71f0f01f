"""Entropy: the range whose quantized distribution diverges least, as in TensorRT."""

import numpy as np
from numpy.typing import NDArray

from quantdiff.calibration.observers.observed import Array, Observed, Pieces, Range

__all__ = ["LINEAR_BINS", "divergences", "find", "linear_counts"]

LINEAR_BINS = 2048
FIRST_CANDIDATE = 128  # bins in the narrowest range, or its number of levels if larger
_AT_ONCE = 64  # thresholds
_ROUNDING = 1e-12  # nats


def find(observed: Observed, bits: int, symmetric: bool, parameter: float | None) -> Range:
    """The threshold T on the magnitudes that loses the least information.

    After S. Migacz, "8-bit Inference with TensorRT", GTC 2017: the magnitudes are counted in 2,048
    equal bins over [0, absmax]. For every threshold of i bins, i = 128 … 2048, the reference P
    holds the first i bins, with everything beyond added to the last of them; the quantized Q
    merges the same bins, without what lies beyond, into the grid's levels (bin j into level
    ⌊j·L/i⌋ of L) and spreads each level's sum evenly over its nonempty bins. Among the thresholds
    T = i·absmax/2048 whose last bin is not empty, the one with the least KL(P‖Q) wins; among equal
    ones the widest, since many thresholds represent a few values far apart without loss.
    TensorRT has L = 128 levels for its 8 bits; here a symmetric grid of b bits has L = 2^(b−1).

    TensorRT counts the values. Here the linear bins are filled from the histogram, whose values are
    assumed evenly spread within its bins, which near absmax are up to 16 linear bins wide. So the
    divergence lacks some of the sampling noise that few values in many bins have.

    An asymmetric grid is cut at ±T and at the exact extremes, whichever is nearer zero, and L is
    the part of its 2^b levels that covers T's share of the range. TensorRT has no such grid; values
    of one sign get all levels.

    Args:
        observed: G groups.
        bits: width of the grid.
        symmetric: whether it is symmetric.
        parameter: unused.

    Returns:
        (least, most), fp32, (G,).
    """
    absmax = observed.absmax.astype(np.float64)
    counts = linear_counts(observed.magnitudes, absmax)  # (G, 2048)
    kept = np.arange(1, LINEAR_BINS + 1)
    thresholds = absmax[:, None] * kept / LINEAR_BINS  # (G, 2048)
    least, most = (end.astype(np.float64) for end in observed.ends)
    if symmetric:
        levels = np.full((1, LINEAR_BINS), 2 ** (bits - 1))
    else:
        width = np.minimum(most[:, None], thresholds).clip(0) - np.maximum(
            least[:, None], -thresholds
        ).clip(max=0)
        share = np.divide(thresholds, width, out=np.ones_like(width), where=width > 0)
        levels = np.rint(2**bits * share).astype(np.int64)
    # TensorRT's divergence is infinite where the last bin is empty. Such a range holds no more than
    # a narrower one, and could hold a single value, which is represented without loss.
    divergence = np.where(counts > 0, divergences(counts, levels), np.inf)
    equal = divergence <= divergence.min(1, keepdims=True) + _ROUNDING
    best = LINEAR_BINS - 1 - equal[:, ::-1].argmax(1)
    chosen = thresholds[np.arange(len(absmax)), best]
    if symmetric:
        end = chosen.astype(np.float32)
        return -end, end
    return (
        np.maximum(observed.ends[0], (-chosen).astype(np.float32)),
        np.minimum(observed.ends[1], chosen.astype(np.float32)),
    )


def linear_counts(pieces: Pieces, absmax: Array) -> Array:
    """Magnitudes counted in equal bins over [0, absmax].

    Args:
        pieces: G groups; the values of each piece are spread evenly over it.
        absmax: (G,) fp64.

    Returns:
        (G, 2048) fp64, zeros in the first bin, the largest magnitude in the last.
    """
    edges = np.where(absmax > 0, absmax, 1.0)[:, None] * np.arange(1, LINEAR_BINS) / LINEAR_BINS
    beyond, _ = pieces.beyond(edges)  # (G, 2047)
    total = pieces.counts.sum(1, keepdims=True)
    above = np.concatenate([total, beyond, np.zeros_like(total)], 1)
    counts = (above[:, :-1] - above[:, 1:]).clip(0)
    counts[:, 0] += pieces.zeros
    return counts


def divergences(counts: Array, levels: NDArray[np.int64]) -> Array:
    """KL(P‖Q) in nats for each threshold; see `find`.

    If the last bin is empty, what lies beyond is added to the last nonempty one.

    Args:
        counts: (G, n).
        levels: L for each threshold, (G, n), or (1, n) if it is the same for all groups.

    Returns:
        (G, n), entry i − 1 for a range of i bins; infinite for fewer than 128 or L bins, and where
        they are empty.
    """
    groups, n = counts.shape
    total = counts.sum(1, keepdims=True)
    # Sums over the first j bins, j = 0 … n: a level is a difference of two of them.
    sums = _running(counts), _running((counts > 0).astype(np.float64))
    reordered = np.full((groups, n), np.inf)
    for begin in range(FIRST_CANDIDATE - 1, n, _AT_ONCE):
        at = slice(begin, begin + _AT_ONCE)
        kept = np.arange(n)[at] + 1  # (C,)
        reordered[:, at] = _level_term(sums, kept, levels[:, at])
    kept = np.arange(1, n + 1)
    final = np.maximum.accumulate(np.where(counts > 0, kept - 1, 0), 1)  # last filled bin, (G, n)
    inside, last = sums[0][:, 1:], _at(counts, final)
    outside = np.maximum(total - inside, 0)
    with np.errstate(divide="ignore", invalid="ignore"):
        # Σ P·log(P/Q), with the counts' own logarithms summed once for all thresholds.
        divergence = (
            _xlogx(counts).cumsum(1) - _xlogx(last) + _xlogx(last + outside)
            - reordered - outside * _spread(sums, final, kept, levels)
            + total * np.log(inside / total)
        ) / total  # fmt: skip
    possible = (kept >= levels) & (kept >= FIRST_CANDIDATE) & (inside > 0)
    # Rounding may take it below zero.
    return np.where(possible, np.maximum(divergence, 0), np.inf)


def _level_term(
    sums: tuple[Array, Array], kept: NDArray[np.int64], levels: NDArray[np.int64]
) -> Array:
    """Σ over levels of S·log(S/filled bins), (G, C), for ranges of `kept` bins, (C,)."""
    # Bin j lies in level ⌊j·L/i⌋, so level l begins with bin ⌈l·i/L⌉; levels beyond L are empty.
    number = np.minimum(np.arange(levels.max() + 1), levels[:, :, None])  # (G or 1, C, L + 1)
    starts = -(-number * kept[:, None] // levels[:, :, None])
    mass, filled = (np.diff(_at(values, starts)) for values in sums)  # (G, C, L)
    each = np.log(np.where(mass > 0, mass, 1) / np.where(filled > 0, filled, 1))
    return np.asarray((mass * each).sum(2))


def _spread(
    sums: tuple[Array, Array],
    final: NDArray[np.int64],
    kept: NDArray[np.int64],
    levels: NDArray[np.int64],
) -> Array:
    """Logarithm of the count that each filled bin gets in the level of bin `final`, (G, n)."""
    level = final * levels // kept
    start, end = -(-level * kept // levels), -(-(level + 1) * kept // levels)
    mass, filled = (_at(values, end) - _at(values, start) for values in sums)
    return np.asarray(np.log(np.where(mass > 0, mass, 1) / np.where(filled > 0, filled, 1)))


def _running(values: Array) -> Array:
    """Sums over the first 0 … n columns, (G, n + 1)."""
    return np.concatenate([np.zeros((len(values), 1)), values.cumsum(1)], 1)


def _at(values: Array, columns: NDArray[np.int64]) -> Array:
    """The given columns (G or 1, …) of each of the G rows."""
    rows = np.arange(len(values)).reshape(-1, *[1] * (columns.ndim - 1))
    return values.take(columns + rows * values.shape[1])


def _xlogx(values: Array) -> Array:
    return np.asarray(values * np.log(np.where(values > 0, values, 1.0)))
