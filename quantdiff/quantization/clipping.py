"""Counts of values beyond the ends of their grids."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from quantdiff.statistics import Visible

__all__ = ["Clipping"]


@dataclass(eq=False)
class Clipping:
    """Clipped values of one site, by head.

    Attributes:
        clipped: values beyond the ends of their grid by more than rounding, (H,) int64.
        seen: values that were quantized, (H,) int64.
    """

    clipped: NDArray[np.int64]
    seen: NDArray[np.int64]

    @classmethod
    def none(cls, heads: int) -> "Clipping":
        """The counts of a site that has not run."""
        return cls(np.zeros(heads, np.int64), np.zeros(heads, np.int64))

    def add(
        self,
        clipped: NDArray[np.int64],
        visible: Visible,
        chosen: Tensor | None,
        places: NDArray[Any] | None,
    ) -> None:
        """Add the counts of a call.

        Args:
            clipped: number for each of its heads, (H,).
            visible: what may be attended in it.
            chosen: which of its heads were quantized, (H,) bool; None for all.
            places: indices of its heads among the site's; None for 0 … H − 1.
        """
        seen = _visible_count(visible, len(clipped))
        if chosen is not None:
            seen *= chosen.cpu().numpy()
        places = np.arange(len(clipped)) if places is None else places
        short = int(places.max()) + 1 - len(self.seen)
        if short > 0:  # the maps of a module may come in separate calls
            self.clipped, self.seen = (
                np.concatenate([x, np.zeros(short, np.int64)]) for x in (self.clipped, self.seen)
            )
        np.add.at(self.clipped, places, clipped)
        np.add.at(self.seen, places, seen)

    @property
    def share(self) -> float:
        """Clipped share of the values of all heads, in 0 … 1."""
        return float(self.clipped.sum() / max(self.seen.sum(), 1))


def _visible_count(visible: Visible, heads: int) -> NDArray[np.int64]:
    """Number of logits that may be attended, by head, (H,) int64."""
    if visible.mask is None:
        each = int((visible.stop - visible.start).clamp(min=0).sum())
        return np.full(heads, each, np.int64)
    count = np.zeros(heads, np.int64)
    rows, step = visible.start.shape[1], 256
    for first in range(0, rows, step):
        mask = visible.mask_rows(first, first + step)
        assert mask is not None
        column = np.arange(mask.shape[-1])
        start, stop = (
            x[:, first : first + step, None].cpu().numpy() for x in (visible.start, visible.stop)
        )
        inside = (column >= start) & (column < stop)  # (B, n, M)
        seen = mask.cpu().numpy() & inside[:, None]  # (B, 1 or H, n, M)
        count += seen.sum((0, 2, 3))
    return count
