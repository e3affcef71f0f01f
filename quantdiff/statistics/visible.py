"""Which logits count: the keys that each query may attend."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Visible"]


@dataclass(eq=False)
class Visible:
    """Which keys each query may attend, and which queries count.

    Attributes:
        start, stop: (B, N) int32; query n may attend keys start ≤ m < stop. A query that does not
            count has stop ≤ start.
        mask: what the interval cannot express: (B or 1, H or 1, N, M) bool, True = may be attended;
            or a function (first row, last row + 1) → the same for those rows only.
    """

    start: Tensor
    stop: Tensor
    mask: Tensor | Callable[[int, int], Tensor] | None = None

    @classmethod
    def causal(
        cls, batch: int, queries: int, keys: int, device: torch.device | str = "cpu"
    ) -> "Visible":
        """Every query sees the keys up to its own position; the last query sees all keys."""
        stop = torch.arange(keys - queries + 1, keys + 1, dtype=torch.int32, device=device)
        stop = stop.expand(batch, queries).contiguous()
        return cls(torch.zeros_like(stop), stop)

    @classmethod
    def everything(
        cls, batch: int, queries: int, keys: int, device: torch.device | str = "cpu"
    ) -> "Visible":
        """Every query sees every key."""
        start = torch.zeros(batch, queries, dtype=torch.int32, device=device)
        return cls(start, torch.full_like(start, keys))

    def only(self, rows: Tensor) -> "Visible":
        """The same, counting only the queries marked in `rows`, (B, N) bool."""
        return Visible(self.start, torch.where(rows, self.stop, self.start), self.mask)

    def mask_rows(self, first: int, last: int) -> Tensor | None:
        """The mask's rows [first, last), (B or 1, H or 1, last − first, M), or None."""
        if self.mask is None:
            return None
        if isinstance(self.mask, Tensor):
            return self.mask[:, :, first:last]
        return self.mask(first, last)
