"""In-place rounding of a block of logits or weights, (H, n, m)."""

from collections.abc import Callable

from torch import Tensor

from quantdiff.quantization.grid import Grid

__all__ = ["beyond", "may_clip", "of_heads", "rounded", "row_extremes"]


def rounded(s: Tensor, grid: Grid, clips: bool) -> Tensor:
    """`grid.quantize` in place."""
    symmetric = grid.low < 0
    s.div_(grid.step).round_()
    if not symmetric:
        s.add_(grid.zero)
    if may_clip(grid, clips):
        s.clamp_(grid.low, grid.high)
    if not symmetric:
        s.sub_(grid.zero)
    return s.mul_(grid.step)


def of_heads(x: Tensor, heads: Tensor | None, change: Callable[[Tensor], Tensor]) -> Tensor:
    """Change x, (H, …), in place, in some heads."""
    if heads is None:
        return change(x)
    others = x[~heads]
    x = change(x)
    x[~heads] = others
    return x


def beyond(s: Tensor, grid: Grid, heads: Tensor | None) -> Tensor:
    """Where `grid.clipped` holds, in some heads."""
    outside = grid.clipped(s)
    return outside if heads is None else outside & heads[:, None, None]


def may_clip(grid: Grid, clips: bool) -> bool:
    """Whether to clamp: an asymmetric zero point is rounded, so an end may be exceeded by one."""
    return clips or grid.low == 0


def row_extremes(s: Tensor, seen: Tensor | None) -> tuple[Tensor, Tensor]:
    """Least and largest logit of each row, (H, n, 1) each, with invisible ones set to 0 in place.

    Every grid includes zero, so the added zeros do not change it.
    """
    if seen is not None:
        s.masked_fill_(~seen, 0.0)
    least, most = s.aminmax(dim=-1, keepdim=True)
    return least, most
