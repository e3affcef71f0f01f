"""The integer grids that values are rounded to.

Symmetric, b bits: integers −(2^(b−1)−1) … 2^(b−1)−1, step = absmax / (2^(b−1)−1), so that zero is
exact and both signs are alike. Asymmetric: integers 0 … 2^b−1 with an integer zero point, over a
range that holds zero. Steps are fp32, rounding is half to even, clamping is done in floating point.
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
        zero: fp32 integers, the grid's value of zero; 0 where it is symmetric.
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
            least, most: ends of the range, any shape and floating dtype. Those of a group that
                holds nothing may be +inf and −inf: its grid has the step 1.
            bits: 2 or more.
            symmetric: whether the range is made symmetric.

        Raises:
            NoGridError: NaN, or an infinite range.
        """
        # In fp64 until the end: absmax − absmin overflows fp16 and may overflow fp32.
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
    """A grid for each row of values, over what that row holds.

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
    """As fp32, never 0: of a range of zeros it is 1, of one that underflows the least normal."""
    step = exact.float()
    tiny = torch.finfo(torch.float32).tiny
    return torch.where(exact == 0, 1.0, step.clamp(min=tiny))
