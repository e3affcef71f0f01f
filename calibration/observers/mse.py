"""MSE: the range whose grid has the least squared error."""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from quantdiff.calibration.observers.observed import Array, Observed, Pieces, Range

__all__ = ["find"]

_COARSE = 384  # steps tried over the whole interval, evenly spaced in their logarithm
_ROUNDS, _FINE, _BEST = 3, 12, 3  # then: rounds, steps around each of the best, how many best
_SAMPLES = 8  # places in a piece at which two grids are compared
_SURE = 3.0  # standard deviations
_FLOAT32_MAX = float(np.finfo(np.float32).max)


def find(observed: Observed, bits: int, symmetric: bool, parameter: float | None) -> Range:
    """The range that minimises Σ(x − q(x))² over the group, never wider than the data.

    The error of each step is an integral over the histogram, whose values are assumed evenly
    spread within their bins: at 8 bits a bin is about as wide as a step, and its midpoint would be
    meaningless. With the thresholds t_j = (j − ½)·step, between which the integer changes,

        Σ(x − q(x))² = Σx² − 2·step·Σ_j Σ_{x > t_j} x + step²·Σ_j (2j − 1)·#{x > t_j}

    on each side of zero, by partial summation. The running sums over j give the error for every
    number of levels on that side at once, so an asymmetric grid, which is a step and a zero point,
    is searched over its step alone, with all 2^bits zero points.

    A grid is preferred to that of absmax only if it gains more than the unknown positions of the
    values within their bins could cancel, so that it does not lose on the values themselves. At
    8 bits it may if the data already lie on a grid: no histogram of this width shows that.

    Args:
        observed: G groups.
        bits: width of the grid.
        symmetric: whether it is symmetric.
        parameter: unused.

    Returns:
        (least, most), fp32, (G,).
    """
    least, most = (end.astype(np.float64) for end in observed.ends)
    if symmetric:
        levels = 2 ** (bits - 1) - 1
        sides = [observed.magnitudes]
        width = observed.absmax.astype(np.float64)
        # Below two thirds of the mean magnitude the error falls as the clip grows: its derivative
        # is at most n·clip, from rounding, less 2·n·(mean − clip), from clipping.
        narrowest = 2 / 3 * sides[0].mean
    else:
        levels = 2**bits - 1
        sides = list(observed.sides)
        width = np.maximum(most, 0) - np.minimum(least, 0)
        # S is the larger of the sides' sums, of n values. No grid has an error below
        # Σx² − 2·width·S; one with all of its levels, three at least, on that side and as wide as
        # 36/37 of its mean has at most Σx² − 36/37·S²/n. So no width below 18/37 of it is best.
        heavier = sides[0].total >= sides[1].total
        narrowest = np.where(heavier, sides[0].mean, sides[1].mean) / 3
    usable = (width > 0) & (narrowest > 0)  # not if all values count as zeros
    width = np.where(usable, width, 1.0)
    narrowest = np.where(usable, np.minimum(narrowest, width), 1.0)
    widths, below = _search(sides, levels, narrowest, width)

    plain = np.zeros(len(width)) if symmetric else np.rint(-np.minimum(least, 0) / width * levels)
    keep = ~_gains(sides, levels, symmetric, (widths, below), (width, plain)) | ~usable
    if symmetric:
        end = np.where(keep, observed.absmax, widths.astype(np.float32))
        return -end, end
    # The zero point may shift an end by half a step, beyond what fp32 holds.
    low, high = (
        np.clip(widths * end / levels, -_FLOAT32_MAX, _FLOAT32_MAX)
        for end in (0 - below, levels - below)
    )
    return (
        np.where(keep, observed.ends[0], low.astype(np.float32)),
        np.where(keep, observed.ends[1], high.astype(np.float32)),
    )


def _search(
    sides: list[Pieces], levels: int, narrowest: Array, widest: Array
) -> tuple[Array, Array]:
    """The best width of the grid, levels·step, and its levels below zero, (G,) each."""
    share = np.linspace(0, 1, _COARSE)
    ratio = np.log(widest / narrowest)[:, None]  # (G, 1)
    tried = widest[:, None] * np.exp(-ratio * (1 - share))  # (G, C)
    tried[:, -1] = widest
    errors, below = _errors(sides, levels, tried)
    reach = ratio / (_COARSE - 1)
    for _ in range(_ROUNDS):
        best = np.argsort(errors, 1, kind="stable")[:, :_BEST]
        centres = np.take_along_axis(tried, best, 1)[:, :, None]  # (G, best, 1)
        factors = np.exp(reach[:, :, None] * np.linspace(-1, 1, _FINE))
        finer = np.minimum((centres * factors).reshape(len(tried), -1), widest[:, None])
        more, more_below = _errors(sides, levels, finer)
        tried, errors, below = (
            np.concatenate([np.take_along_axis(old, best, 1), new], 1)
            for old, new in ((tried, finer), (errors, more), (below, more_below))
        )
        reach = reach * 2 / (_FINE - 1)
    best = errors.argmin(1)[:, None]
    return (
        np.take_along_axis(tried, best, 1)[:, 0],
        np.take_along_axis(below, best, 1)[:, 0],
    )


def _errors(sides: list[Pieces], levels: int, widths: Array) -> tuple[Array, Array]:
    """Squared error of each grid, and its best number of levels below zero, (G, C) each.

    A single side is that of a symmetric grid: all magnitudes, with `levels` levels. Of two sides,
    the first has the levels that the second leaves.
    """
    steps = widths / levels
    if len(sides) == 1:
        errors = sides[0].squares[:, None] + np.zeros_like(steps)
        for change in _changes(sides[0], levels, steps):
            errors += change
        return errors, np.zeros_like(steps)
    running = []
    for side in sides:
        total = np.zeros((levels + 1, *steps.shape))
        total[0] = side.squares[:, None]
        for j, change in enumerate(_changes(side, levels, steps), 1):
            total[j] = total[j - 1] + change
        running.append(total)
    both = running[0][::-1] + running[1]  # (levels below zero, G, C)
    return both.min(0), both.argmin(0).astype(np.float64)


def _changes(side: Pieces, levels: int, steps: Array) -> Iterator[Array]:
    """Change of the squared error by each further level, (G, C) for j = 1 … levels."""
    for j in range(1, levels + 1):
        count, total = side.beyond((j - 0.5) * steps)
        yield (2 * j - 1) * steps**2 * count - 2 * steps * total


def _gains(
    sides: list[Pieces],
    levels: int,
    symmetric: bool,
    found: tuple[Array, Array],
    plain: tuple[Array, Array],
) -> NDArray[np.bool_]:
    """Whether a found grid (its width and levels below zero) certainly beats the plain one, (G,).

    The values of a bin are assumed independent, or one value repeated if both neighbours of the bin
    are empty, as happens with few different values.
    """
    gain, variance = np.zeros(len(found[0])), np.zeros(len(found[0]))
    places = (np.arange(_SAMPLES) + 0.5) / _SAMPLES
    for index, side in enumerate(sides):
        x = side.low[:, :, None] + (side.high - side.low)[:, :, None] * places  # (G, W, samples)
        squares = []
        for width, below in (found, plain):
            step = (width / levels)[:, None, None]
            top = levels if symmetric else (below if index else levels - below)[:, None, None]
            squares.append((x - step * np.minimum(np.rint(x / step), top)) ** 2)
        less = squares[1] - squares[0]
        counts = side.counts
        padded = np.pad(counts, ((0, 0), (1, 1)))
        alone = (padded[:, :-2] == 0) & (padded[:, 2:] == 0)
        gain += (counts * less.mean(2)).sum(1)
        variance += (np.where(alone, counts**2, counts) * less.var(2)).sum(1)
    return gain > _SURE * np.sqrt(variance)
