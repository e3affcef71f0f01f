"""The integer grids that values are rounded to.

Symmetric, b bits: integers −(2^(b−1)−1) … 2^(b−1)−1, step = absmax / (2^(b−1)−1), so zero is exact
and both signs are treated equally. Asymmetric: integers 0 … 2^b−1 with an integer zero point, over
a range that includes zero. Steps are fp32, rounding is half to even, clamping is floating-point.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Grid", "NoGridError", "RowGrids"]


class NoGridError(ValueError):
    """A range is not finite."""


@dataclass(frozen=True, eq=False)
class Grid:
    """A grid for each of several groups of values.

    Attributes:
        step: fp32, greater than 0, of any shape that broadcasts with the values.
        zero: fp32 integers, the zero point; 0 for symmetric grids.
        low, high: the smallest and the largest integer.
    """

    step: Tensor
    zero: Tensor
    low: int
    high: int

    @classmethod
    def of(cls, least: Tensor, most: Tensor, bits: int, symmetric: bool) -> "Grid":
        """The grid of a range.

        Args:
            least, most: ends of the range, any shape and floating dtype. Those of an empty group
                may be +inf and −inf: its grid has step 1.
            bits: 2 or more.
            symmetric: whether the range is made symmetric.

        Raises:
            NoGridError: NaN, or an infinite range.
        """
        # In fp64 until the end: most − least may overflow fp16 and fp32.
        least, most = least.double(), most.double()
        empty = least > most
        least = torch.where(empty, 0.0, least)
        most = torch.where(empty, 0.0, most)
        if not bool((torch.isfinite(least) & torch.isfinite(most)).all()):
            raise NoGridError("a range with NaN or infinity has no grid")
        if symmetric:
            high = 2 ** (bits - 1) - 1
            step = _step(torch.maximum(least.abs(), most.abs()) / high)
            return cls(step, torch.zeros_like(step), -high, high)
        high = 2**bits - 1
        least, most = least.clamp(max=0), most.clamp(min=0)
        step = _step((most - least) / high)
        zero = torch.round(-least / step.double()).clamp(0, high).float()
        return cls(step, zero, 0, high)

    def integers(self, values: Tensor) -> Tensor:
        """The integer of each value, as fp32 (fp64 for fp64)."""
        return (torch.round(values / self.step) + self.zero).clamp(self.low, self.high)

    def quantize(self, values: Tensor) -> Tensor:
        """Each value's point on the grid, in the dtype of the product with the fp32 step."""
        return (self.integers(values) - self.zero) * self.step

    def clipped(self, values: Tensor) -> Tensor:
        """Where a value lies beyond the grid's ends by more than rounding: bool."""
        rounded = torch.round(values / self.step) + self.zero
        return (rounded < self.low) | (rounded > self.high)


@dataclass(frozen=True)
class RowGrids:
    """A grid for each row of values, over the range of that row.

    Attributes:
        bits, symmetric: as in `Grid.of`.
    """

    bits: int
    symmetric: bool

    @property
    def low(self) -> int:
        """The smallest integer."""
        return -(2 ** (self.bits - 1) - 1) if self.symmetric else 0

    @property
    def high(self) -> int:
        """The largest integer."""
        return 2 ** (self.bits - 1) - 1 if self.symmetric else 2**self.bits - 1

    def of(self, least: Tensor, most: Tensor) -> Grid:
        """The grids of rows with these ends; as `Grid.of`."""
        return Grid.of(least, most, self.bits, self.symmetric)


def _step(exact: Tensor) -> Tensor:
    """As fp32, never 0: 1 for a range of zeros, the smallest normal for one that underflows."""
    step = exact.float()
    tiny = torch.finfo(torch.float32).tiny
    return torch.where(exact == 0, 1.0, step.clamp(min=tiny))
