"""The k largest magnitudes with their coordinates, exact; ties go to the lowest coordinate."""

from typing import Self

import numpy as np
from numpy.typing import NDArray

from quantdiff.statistics.lasting import lasting_zeros

__all__ = ["Top"]


class Top:
    """The `rank` largest magnitudes offered, in descending order."""

    def __init__(self, rank: int, coordinates: int) -> None:
        """Start empty; each item will have the given number of coordinates."""
        self._count = 0
        self._values = lasting_zeros((rank,), np.float32)
        self._coordinates = lasting_zeros((rank, coordinates), np.int64)

    @classmethod
    def of(cls, rank: int, values: NDArray[np.float32], coordinates: NDArray[np.int64]) -> Self:
        """The largest of the given items; values: (n,), coordinates: (n, c)."""
        top = cls(rank, coordinates.shape[1])
        top.offer(values, coordinates)
        return top

    @property
    def rank(self) -> int:
        """How many are kept."""
        return len(self._values)

    @property
    def values(self) -> NDArray[np.float32]:
        """Magnitudes, descending, (n,) with n ≤ rank."""
        return self._values[: self._count]

    @property
    def coordinates(self) -> NDArray[np.int64]:
        """Coordinates, (n, c); among equal magnitudes the lowest come first."""
        return self._coordinates[: self._count]

    @property
    def threshold(self) -> float:
        """Smaller magnitudes than this cannot enter; −1 while there is room."""
        if self._count < self.rank:
            return -1.0
        return float(self._values[-1]) if self.rank else float("inf")

    def offer(self, values: NDArray[np.float32], coordinates: NDArray[np.int64]) -> None:
        """Consider further items; values: (m,), coordinates: (m, c)."""
        keep = np.abs(values) >= self.threshold
        magnitudes = np.concatenate([self.values, np.abs(values[keep])])
        places = np.concatenate([self.coordinates, coordinates[keep]])
        order = np.lexsort((*places.T[::-1], -magnitudes))[: self.rank]
        self._count = len(order)
        self._values[: self._count] = magnitudes[order]
        self._coordinates[: self._count] = places[order]
