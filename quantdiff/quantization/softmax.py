"""What happens to an attention call between its queries and its values."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from quantdiff.quantization.grid import Grid, RowGrids
from quantdiff.quantization.scheme import Scheme
from quantdiff.statistics import Visible

__all__ = ["Softmax"]


@dataclass(frozen=True, eq=False)
class Softmax:
    """Everything known of a call between its queries and its values.

    Attributes:
        scale, visible, softcap, bias: as in `quantdiff.statistics.measure_logits`.
        grid: one per sequence and head, of shape (B or 1, H, 1, 1), or one per row; None where
            logits are not quantized.
        heads: whose logits are rounded, (H,) bool; None for all.
        clips: whether logits may lie beyond the grid.
        maps: how the weights are rounded after the softmax, or None.
        map_heads: whose weights are rounded, (H,) bool; None for all.
        clipped: (H,), to which the number of clipped logits of each head is added; or None.
    """

    scale: float
    visible: Visible
    softcap: float | None = None
    bias: Callable[[int, int], Tensor] | None = None
    grid: Grid | RowGrids | None = None
    clips: bool = True
    maps: Scheme | None = None
    clipped: NDArray[np.int64] | None = None
    heads: Tensor | None = None
    map_heads: Tensor | None = None
