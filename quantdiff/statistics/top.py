"""The k largest magnitudes with their coordinates, exact, ties to the lowest coordinate."""

from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

__all__ = ["Top"]


@dataclass(eq=False)
class Top:
    """The `rank` largest magnitudes seen.

    Attributes:
        rank: how many are kept.
        values: magnitudes, descending, (n,) fp32, n ≤ rank.
        coordinates: (n, c) int64; among equal magnitudes the lowest coordinates come first.
    """

    rank: int
    values: NDArray[np.float32]
    coordinates: NDArray[np.int64]

    @classmethod
    def empty(cls, rank: int, coordinates: int) -> Self:
        """Nothing seen yet; each item will have `coordinates` coordinates."""
        return cls(rank, np.zeros(0, np.float32), np.zeros((0, coordinates), np.int64))

    @property
    def threshold(self) -> float:
        """A smaller magnitude than this cannot enter; −1 while there is room."""
        if len(self.values) < self.rank:
            return -1.0
        return float(self.values[-1]) if self.rank else float("inf")

    def offer(self, values: NDArray[np.float32], coordinates: NDArray[np.int64]) -> None:
        """Consider further items, in place; values: (m,), coordinates: (m, c)."""
        keep = np.abs(values) >= self.threshold
        magnitudes = np.concatenate([self.values, np.abs(values[keep])])
        places = np.concatenate([self.coordinates, coordinates[keep]])
        order = np.lexsort((*places.T[::-1], -magnitudes))[: self.rank]
        self.values, self.coordinates = magnitudes[order], places[order]
