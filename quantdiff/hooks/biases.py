"""What is added to the logits: position biases, and what only looks like one."""

from collections.abc import Callable

import torch
from torch import Tensor

from quantdiff.errors import RecordingError
from quantdiff.hooks.dispatch import AttentionCall

__all__ = ["ROWS", "Bias", "position_bias", "refuse_fill"]

Bias = Callable[[int, int], Tensor]

ROWS = 256  # of a mask looked at in one go

_LOW = -1e3  # no weight is left of a logit so far below the others
_NEAR = 0.01  # of a fill, by which small biases that were added to it may move it


def position_bias(call: AttentionCall, bias: Bias | None) -> Bias | None:
    """What is added to the logits in all: the mask's bias and a `position_bias` keyword."""
    added = call.options.get("position_bias")
    if added is None:
        return bias
    rows, keys = call.query.shape[2], call.key.shape[2]
    if added.dim() != 4 or added.shape[2] not in (1, rows) or added.shape[3] < keys:
        raise RecordingError(f"a position_bias of shape {tuple(added.shape)} is not known")
    added = added[..., :keys].expand(-1, -1, rows, -1)
    if bias is None:
        return lambda i, j: added[:, :, i:j]
    return lambda i, j: added[:, :, i:j] + bias(i, j)


def refuse_fill(name: str, mask: Tensor, floor: float) -> None:
    """Refuse an additive mask whose entries above `floor` are in all likelihood a mask themselves.

    A fill such as −1e9 leaves no weight, but it is no position bias, and with it the logits would
    be some of the largest numbers there are. It is known by its value, which stands apart from all
    others nearer to 0: a bias that gets as low by and by, as ALiBi's does, has others close by.

    Args:
        name: of what the mask was given to.
        mask: (B or 1, H or 1, N, M).
        floor: at or below it nothing may be attended.

    Raises:
        RecordingError: there are entries at or below −1000, and none lies between the largest of
            them and its half. Names the value.
    """
    mask = mask.detach()
    blocks = [mask[:, :, i : i + ROWS] for i in range(0, mask.shape[2], ROWS)]
    lowest = [
        float(torch.where((block > floor) & (block <= _LOW), block, -torch.inf).amax())
        for block in blocks
    ]
    fill = max(lowest, default=-torch.inf)
    if fill == -torch.inf:
        return
    for block in blocks:
        share = block.float() / fill  # 1 at the fill, 0 where nothing is added
        if bool(((share >= 0.5) & (share < 1 - _NEAR)).any()):
            return
    raise RecordingError(
        f"{name} is given an attention mask filled with {fill:g}, which is added to the logits and "
        "would count among them: fill it with -inf or the dtype's minimum, or give a boolean mask"
    )
