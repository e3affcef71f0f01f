"""The input of observers: histograms with exact extremes, and their values as pieces."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from quantdiff.statistics import Histogram

__all__ = ["Array", "Observed", "Pieces", "Range"]

Array = NDArray[np.float64]
Range = tuple[NDArray[np.float32], NDArray[np.float32]]


@dataclass(frozen=True, eq=False)
class Pieces:
    """Magnitudes of G groups as uniform densities on W pieces, and the number of zeros.

    A piece is a bin of the histogram, cut at the group's exact extremes; a piece left without width
    is a point.

    Attributes:
        counts: (G, W) fp64.
        low, high: ends of the pieces, (G, W) fp64, low ≤ high.
        zeros: (G,) fp64.
        first: magnitude bin of column 0, the sixteen leading bits of its values.
    """

    counts: Array
    low: Array
    high: Array
    zeros: Array
    first: int

    @cached_property
    def total(self) -> Array:
        """Sum of the magnitudes, (G,)."""
        return np.asarray(self._tails[1][:, 0])

    @cached_property
    def mean(self) -> Array:
        """Mean magnitude, zeros included, (G,); 0 for an empty group."""
        count = self.counts.sum(1) + self.zeros
        return np.asarray(self.total / np.maximum(count, 1))

    @cached_property
    def squares(self) -> Array:
        """Σx², (G,)."""
        mean_square = (self.low**2 + self.low * self.high + self.high**2) / 3
        return np.asarray((self.counts * mean_square).sum(1))

    @cached_property
    def _tails(self) -> tuple[Array, Array]:
        """Count and Σx of the pieces from each column on, (G, W + 1) each."""
        tails = []
        for values in (self.counts, self.counts * (self.low + self.high) / 2):
            # From the far end, so that a thin tail keeps its precision next to a heavy body.
            tail = np.zeros((len(values), values.shape[1] + 1))
            tail[:, :-1] = values[:, ::-1].cumsum(1)[:, ::-1]
            tails.append(tail)
        return tails[0], tails[1]

    @cached_property
    def _inverse_width(self) -> Array:
        width = self.high - self.low
        return np.divide(1.0, width, out=np.zeros_like(width), where=width > 0)

    def beyond(self, points: Array) -> tuple[Array, Array]:
        """Count and Σx of the magnitudes above some points.

        Args:
            points: (G, …) fp64, greater than 0.

        Returns:
            Two arrays of the shape of `points`.
        """
        groups, width = self.counts.shape
        if not width:
            return np.zeros_like(points), np.zeros_like(points)
        # A bin is the sixteen leading bits of its values: no search needed.
        with np.errstate(over="ignore"):  # infinity lies in the last column too
            bins = points.astype(np.float32).view(np.uint32) >> 16
        columns = np.clip(bins.astype(np.int64) - self.first, 0, width - 1)
        row = np.arange(groups).reshape(-1, *[1] * (points.ndim - 1))
        at = columns + row * width
        low, high = self.low.take(at), self.high.take(at)
        inside = np.clip(points, low, high)
        share = (inside - low) * self._inverse_width.take(at)
        # A piece without width lies above either completely or not at all.
        share = np.where(points >= high, 1.0, share)
        taken = self.counts.take(at) * share
        beyond, total = (tail.take(at + row) for tail in self._tails)
        return beyond - taken, total - taken * (low + inside) / 2


@dataclass(frozen=True, eq=False)
class Observed:
    """G groups of values.

    Attributes:
        histogram: signed counts of the groups.
        least, most: exact extremes, (G,) fp32; +inf and −inf for an empty group.
    """

    histogram: Histogram
    least: NDArray[np.float32]
    most: NDArray[np.float32]

    @classmethod
    def of(cls, values: NDArray[np.float32]) -> "Observed":
        """From raw values, (G, n) fp32, finite, n > 0."""
        return cls(Histogram.of(values), values.min(1), values.max(1))

    def total(self) -> "Observed":
        """All groups as one, G = 1."""
        return Observed(
            self.histogram.total(),
            self.least.min(keepdims=True, initial=np.inf),
            self.most.max(keepdims=True, initial=-np.inf),
        )

    @cached_property
    def ends(self) -> Range:
        """The exact extremes; 0 and 0 for an empty group."""
        empty = self.least > self.most
        zero = np.float32(0)
        return np.where(empty, zero, self.least), np.where(empty, zero, self.most)

    @cached_property
    def absmax(self) -> NDArray[np.float32]:
        """Largest magnitude, (G,); 0 for an empty group."""
        least, most = self.ends
        return np.maximum(np.abs(least), np.abs(most))

    @cached_property
    def edges(self) -> Array:
        """Ends of the histogram's magnitude bins, ascending, (W + 1,)."""
        first, width = self.histogram.first, self.histogram.counts.shape[2]
        patterns = np.arange(first, first + width + 1, dtype=np.uint32) << 16
        edges = patterns.view(np.float32).astype(np.float64)
        edges[~np.isfinite(edges)] = 2.0**128  # the end of the last octave
        return edges

    @cached_property
    def magnitudes(self) -> Pieces:
        """All values without their signs."""
        least, most = (end.astype(np.float64) for end in self.ends)
        one_sided = np.maximum(np.maximum(least, -most), 0)
        return self._pieces(self.histogram.counts.sum(1), one_sided, self.absmax)

    @cached_property
    def sides(self) -> tuple[Pieces, Pieces]:
        """The positive values, with the zeros, and the magnitudes of the negative ones."""
        least, most = (end.astype(np.float64) for end in self.ends)
        counts = self.histogram.counts
        positive = self._pieces(counts[:, 0], np.maximum(least, 0), np.maximum(most, 0))
        negative = self._pieces(counts[:, 1], np.maximum(-most, 0), np.maximum(-least, 0))
        return positive, Pieces(
            negative.counts, negative.low, negative.high, np.zeros_like(negative.zeros),
            negative.first,
        )  # fmt: skip

    def _pieces(
        self, counts: NDArray[np.int64], smallest: Array, largest: NDArray[np.floating]
    ) -> Pieces:
        """Bins cut to [smallest, largest] of each group, both (G,); 0 where no end is known."""
        ends = smallest[:, None], largest.astype(np.float64)[:, None]
        return Pieces(
            counts.astype(np.float64),
            np.clip(self.edges[:-1], *ends),
            np.clip(self.edges[1:], *ends),
            self.histogram.zeros.astype(np.float64),
            self.histogram.first,
        )
