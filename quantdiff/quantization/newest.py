"""The newest keys and values, which a query meets unrounded: a window that slides with it."""

from dataclasses import dataclass

import torch
from torch import Tensor

from quantdiff.hooks.sequences import Batch
from quantdiff.statistics import Visible

__all__ = ["Met", "Newest", "first_exact"]


@dataclass(frozen=True, eq=False)
class Newest:
    """The part of a call's keys, or of its values, that is not rounded.

    Attributes:
        exact: (B, G, M, D), as they were before rounding.
        first: (B, N) int32; query n meets those at m ≥ first unrounded.
    """

    exact: Tensor
    first: Tensor

    def apart(self, visible: Visible) -> tuple[Visible, Visible]:
        """The rounded and the unrounded part of what each query may attend."""
        first = self.first.to(visible.stop.device)
        return (
            Visible(visible.start, torch.minimum(visible.stop, first), visible.mask),
            Visible(torch.maximum(visible.start, first), visible.stop, visible.mask),
        )


def first_exact(batch: Batch, keys: int, newest: int) -> Tensor:
    """Where the newest tokens of each query begin among the keys of a call.

    Args:
        batch: the tokens of the pass; padding does not count.
        keys: M.
        newest: how many tokens, up to the query's own, are met unrounded.

    Returns:
        (B, N) int32: those of the query at place i begin after place i − newest.
    """
    places = torch.from_numpy(batch.positions)  # (B, past + N), non-decreasing
    known = places[:, batch.key_offset(keys) :].contiguous()  # a fixed cache has room after them
    last = (places[:, batch.past :] - newest).contiguous()
    return torch.searchsorted(known, last, right=True).int()


@dataclass(eq=False)
class Met:
    """Keys, or values, of one sequence as its queries meet them.

    Attributes:
        rounded: (G, M, D).
        exact: (G, M, D), those that are met unrounded; None where all are rounded.
        first: (N,), from which key on each query meets `exact`.
    """

    rounded: Tensor
    exact: Tensor | None = None
    first: Tensor | None = None

    @classmethod
    def of(
        cls, b: int, rounded: Tensor, exact: Tensor | None, first: Tensor | None, dtype: torch.dtype
    ) -> "Met":
        """Those of sequence b, of tensors (B, G, M, D)."""
        if exact is None or first is None:
            return cls(rounded[b].to(dtype))
        return cls(rounded[b].to(dtype), exact[b].to(dtype), first[b].to(exact.device))

    def against(self, x: Tensor, rows: slice, keys: int, room: Tensor | None = None) -> Tensor:
        """Each row of x times the keys that it meets, (H, n, m).

        Args:
            x: (H, n, D), those of the queries `rows`.
            rows: of the queries.
            keys: m, how many of the keys.
            room: memory for the result, or None.
        """
        found = _product(x, self.rounded[:, :keys].mT, room)
        if self.exact is not None:
            low, fresh = self._fresh(rows, keys)
            new = _product(x, self.exact[:, low:keys].mT)
            found[..., low:] = torch.where(fresh, new, found[..., low:])
        return found

    def weighed(self, weights: Tensor, rows: slice) -> Tensor:
        """Sums of the values that each row meets, weighted by (H, n, m): (H, n, D)."""
        keys = weights.shape[-1]
        if self.exact is None:
            return _product(weights, self.rounded[:, :keys])
        low, older, new = self._split(weights, rows)
        return _product(older, self.rounded[:, :keys]) + _product(new, self.exact[:, low:keys])

    def add_gradients(self, of: "Met", x: Tensor, y: Tensor, rows: slice) -> None:
        """Add xᵀ·y, for x (H, n, m) and y (H, n, D), to the gradients `of` what was met."""
        keys, groups = x.shape[-1], len(self.rounded)
        if of.exact is None:
            of.rounded[:, :keys] += _grouped(x.mT @ y, groups)
            return
        low, older, new = self._split(x, rows)
        of.rounded[:, :keys] += _grouped(older.mT @ y, groups)
        of.exact[:, low:keys] += _grouped(new.mT @ y, groups)

    def _split(self, x: Tensor, rows: slice) -> tuple[int, Tensor, Tensor]:
        """First exact column; x, (H, n, m), at rounded ones; x from there on at exact ones."""
        low, fresh = self._fresh(rows, x.shape[-1])
        older = x.clone()
        older[..., low:].masked_fill_(fresh, 0.0)
        return low, older, x[..., low:].masked_fill(~fresh, 0.0)

    def _fresh(self, rows: slice, keys: int) -> tuple[int, Tensor]:
        """First column that any row meets unrounded, and from there which ones, (n, m − low)."""
        assert self.first is not None
        begin = self.first[rows]  # (n,)
        low = min(int(begin.min()), keys)
        return low, torch.arange(low, keys, device=begin.device) >= begin[:, None]


def _product(a: Tensor, b: Tensor, room: Tensor | None = None) -> Tensor:
    """(H, n, x) times (G, x, y), each b for H/G heads of a: (H, n, y); in `room`, if given."""
    heads, rows, width = a.shape
    out = None
    if room is not None:
        shape = len(b), heads // len(b) * rows, b.shape[2]
        out = room[: heads * rows * b.shape[2]].view(shape)
    return torch.bmm(a.reshape(len(b), -1, width), b, out=out).view(heads, rows, -1)


def _grouped(x: Tensor, groups: int) -> Tensor:
    """Sum (H, ...) over the heads of each of G groups."""
    return x.unflatten(0, (groups, -1)).sum(1)
