"""What the queries of an attention call see, in blocks of rows: never an n×n tensor."""

from collections.abc import Iterator

import torch
from torch import Tensor

from quantdiff.statistics import Visible

__all__ = ["attended", "has_choice"]

_ROWS = 64  # per block


def attended(visible: Visible, keys: int) -> Tensor:
    """Which of a call's keys any query that counts may attend, (B, M) bool."""
    found = torch.zeros(len(visible.stop), keys, dtype=torch.bool, device=visible.stop.device)
    for seen in _blocks(visible, keys):
        found |= seen.any(2).any(1)
    return found


def has_choice(visible: Visible, keys: int) -> bool:
    """Whether any query sees two or more keys; a single one has weight 1 whatever its logit."""
    return any(bool((seen.sum(-1) > 1).any()) for seen in _blocks(visible, keys))


def _blocks(visible: Visible, keys: int) -> Iterator[Tensor]:
    """(B, 1 or H, n, M) bool each."""
    start, stop = visible.start[:, None, :, None], visible.stop[:, None, :, None]
    column = torch.arange(keys, device=stop.device)
    for first in range(0, stop.shape[2], _ROWS):
        rows = slice(first, first + _ROWS)
        seen = (column >= start[:, :, rows]) & (column < stop[:, :, rows])
        extra = visible.mask_rows(first, min(rows.stop, stop.shape[2]))
        yield seen if extra is None else seen & extra[..., :keys]
