"""What a mask reveals about a pass's own tokens: which are padding, and what is packed together."""

import torch
from torch import Tensor

from quantdiff.errors import RecordingError
from quantdiff.hooks.biases import ROWS
from quantdiff.statistics import Visible

__all__ = ["PACKED", "check_apart", "padding_in"]

PACKED = (
    "position_ids that start anew pack several sequences into one, which quantdiff does not "
    "record; give each a row of its own, padded, with the 2-D mask of the padding"
)


def padding_in(visible: Visible, column: int) -> Tensor:
    """Which tokens are padding, (B, N) bool.

    Padding is a token that no token may attend, not even itself. If attended tokens do not attend
    themselves, as with a mask strictly below the diagonal, this also holds for the last real token:
    then, of such tokens, only those that may attend nothing count as padding.

    Args:
        visible: which keys the N tokens may attend.
        column: index of the first of their own keys.
    """
    batch, rows = visible.stop.shape
    attended = torch.zeros(batch, rows, dtype=torch.bool, device=visible.stop.device)
    itself = torch.zeros_like(attended)
    for i in range(0, rows, ROWS):
        seen = _own(visible, i, min(i + ROWS, rows), column)
        attended |= seen.any(1)
        itself[:, i : i + ROWS] = seen.diagonal(i, 1, 2)
    if bool(attended.any()) and torch.equal(itself, attended):
        return ~attended
    return ~attended & (visible.stop <= visible.start)


def check_apart(visible: Visible, positions: Tensor, real: Tensor, column: int) -> None:
    """Refuse several sequences in one row: the mask separates them where positions restart.

    Args:
        visible, column: as in `padding_in`.
        positions: (N), (B or 1, N), or (axes, B or 1, N), the first axis being the text's.
        real: (B, N) bool, False at padding.

    Raises:
        RecordingError: a real token may not attend the real token before it, and its position is
            not one more than that token's.
    """
    rows = real.shape[1]
    positions = positions[0] if positions.dim() == 3 else positions
    if rows < 2 or positions.shape[-1] != rows:
        return
    real = real.to(positions.device)
    anew = (positions.diff(dim=-1) != 1) & real[:, 1:] & real[:, :-1]
    if not bool(anew.any()):
        return
    before = [
        _own(visible, i, min(i + ROWS, rows), column).diagonal(i - 1, 1, 2)
        for i in range(1, rows, ROWS)
    ]
    if bool((anew & ~torch.cat(before, 1).to(anew.device)).any()):
        raise RecordingError(PACKED)


def _own(visible: Visible, first: int, last: int, column: int) -> Tensor:
    """Which of the N tokens the queries [first, last) may attend in any head, (B, n, N)."""
    columns = torch.arange(column, column + visible.stop.shape[1], device=visible.stop.device)
    start, stop = (x[:, first:last, None] for x in (visible.start, visible.stop))
    seen = (start <= columns) & (columns < stop)
    extra = visible.mask_rows(first, last)
    return seen if extra is None else seen & extra[..., columns].any(1)
