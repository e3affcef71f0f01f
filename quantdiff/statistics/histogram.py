"""A histogram over the leading bits of the float pattern: no range to choose, no overflow."""

from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

from quantdiff.statistics.lasting import lasting_zeros

__all__ = ["BINS_AN_OCTAVE", "Histogram"]

BINS_AN_OCTAVE = 128  # 7 bits of mantissa: a bin's midpoint lies within 0.4 % of all its values
_MAGNITUDE_BINS = 256 * BINS_AN_OCTAVE


@dataclass(eq=False)
class Histogram:
    """Signed counts per group over bins of 1/128 octave.

    A value's bin is the sixteen leading bits of its fp32 pattern (sign, exponent, seven bits of
    mantissa). Only the octaves in use are stored. Magnitudes below 2⁻¹²⁶ are counted as zeros.

    Attributes:
        counts: (G, 2, W) int64; index 0 of the second dimension holds the positive values.
        first: magnitude bin of column 0, a multiple of 128.
        zeros: (G,) int64.
    """

    counts: NDArray[np.int64]
    first: int
    zeros: NDArray[np.int64]

    @classmethod
    def empty(cls, groups: int) -> Self:
        """An empty histogram of `groups` groups."""
        return cls(np.zeros((groups, 2, 0), np.int64), 0, lasting_zeros((groups,), np.int64))

    @classmethod
    def of(cls, values: NDArray[np.float32]) -> Self:
        """Count the values of each row; values: (G, n) fp32, finite."""
        histogram = cls.empty(len(values))
        bits = np.ascontiguousarray(values, np.float32).view(np.uint32) >> 16
        table = np.stack([np.bincount(row, minlength=2 * _MAGNITUDE_BINS) for row in bits])
        histogram.add(table.reshape(len(values), 2, _MAGNITUDE_BINS), 0)
        return histogram

    @property
    def groups(self) -> int:
        """Number of groups G."""
        return len(self.zeros)

    @property
    def count(self) -> NDArray[np.int64]:
        """Values counted in each group, (G,)."""
        return self.zeros + self.counts.sum((1, 2))

    def add(self, counts: NDArray[np.int64], first: int) -> None:
        """Add counts (G, 2, w) whose column 0 is magnitude bin `first`, in place."""
        if first < BINS_AN_OCTAVE:  # zero and the subnormal numbers
            small = BINS_AN_OCTAVE - first
            self.zeros += counts[:, :, :small].sum((1, 2))
            counts, first = counts[:, :, small:], BINS_AN_OCTAVE
        used = np.flatnonzero(counts.any((0, 1)))
        if not len(used):
            return
        low, high = int(used[0]), int(used[-1]) + 1
        self._reserve(first + low, first + high)
        at = first + low - self.first
        self.counts[:, :, at : at + high - low] += counts[:, :, low:high]

    def merge(self, other: "Histogram") -> None:
        """Add another histogram of the same groups, in place."""
        self.zeros += other.zeros
        self.add(other.counts, other.first)

    def spread(self, groups: NDArray[np.int64], total: int) -> "Histogram":
        """The same counts as the given groups of a larger histogram; the others are empty."""
        counts = lasting_zeros((total, *self.counts.shape[1:]), np.int64)
        zeros = lasting_zeros((total,), np.int64)
        counts[groups], zeros[groups] = self.counts, self.zeros
        return Histogram(counts, self.first, zeros)

    def total(self) -> "Histogram":
        """All groups as one, G = 1."""
        return Histogram(
            self.counts.sum(0, keepdims=True), self.first, self.zeros.sum(0, keepdims=True)
        )

    def midpoints(self) -> NDArray[np.float64]:
        """Magnitude in the middle of each bin, (W,)."""
        edges = self._magnitude(np.arange(self.first, self.first + self.counts.shape[2] + 1))
        return (edges[:-1] + edges[1:]) / 2

    def percentile(self, percent: float) -> NDArray[np.float64]:
        """Magnitude below which `percent` per cent of the magnitudes lie, by linear interpolation.

        Args:
            percent: in [0, 100].

        Returns:
            One magnitude per group, (G,), within 0.4 % of the exact percentile; NaN for an empty
            group.

        Raises:
            ValueError: `percent` outside [0, 100].
        """
        if not 0 <= percent <= 100:
            raise ValueError(f"a percentile lies in [0, 100], not {percent}")
        values = np.concatenate([[0.0], self.midpoints()])
        result = np.full(self.groups, np.nan)
        for group in range(self.groups):
            counts = np.concatenate([self.zeros[group : group + 1], self.counts[group].sum(0)])
            below = np.cumsum(counts)
            if not below[-1]:
                continue
            rank = percent / 100 * (int(below[-1]) - 1)
            low = int(np.floor(rank))
            ends = values[np.searchsorted(below, [low, min(low + 1, below[-1] - 1)], side="right")]
            result[group] = ends[0] + (rank - low) * (ends[1] - ends[0])
        return result

    def _reserve(self, low: int, high: int) -> None:
        """Make room for the magnitude bins [low, high), in whole octaves."""
        low = low // BINS_AN_OCTAVE * BINS_AN_OCTAVE
        high = -(-high // BINS_AN_OCTAVE) * BINS_AN_OCTAVE
        width = self.counts.shape[2]
        if width:
            low, high = min(low, self.first), max(high, self.first + width)
        if high - low == width:
            return
        grown = lasting_zeros((self.groups, 2, high - low), np.int64)
        if width:
            grown[:, :, self.first - low : self.first - low + width] = self.counts
        self.counts, self.first = grown, low

    @staticmethod
    def _magnitude(bins: NDArray[np.int64]) -> NDArray[np.float64]:
        return (bins.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
