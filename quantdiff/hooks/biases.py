"""What is added to the logits: position biases, and what only looks like them."""

from collections.abc import Callable

import torch
from torch import Tensor

from quantdiff.errors import RecordingError
from quantdiff.hooks.dispatch import AttentionCall

__all__ = ["ROWS", "Bias", "position_bias", "refuse_fill"]

Bias = Callable[[int, int], Tensor]

ROWS = 256  # of a mask that are processed at once

_LOW = -1e3  # a logit this far below the others has no weight
_NEAR = 0.01  # relative change of a fill that small biases added to it may cause


def position_bias(call: AttentionCall, bias: Bias | None) -> Bias | None:
    """Everything that is added to the logits: the mask's bias and a `position_bias` keyword."""
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
    """Refuse an additive mask with entries above `floor` that are most likely a mask themselves.

    A fill such as −1e9 leaves no weight, but it is not a position bias, and would make some logits
    huge. It is recognized by its value, which is far from all others nearer to 0; a bias that
    gets as low gradually, as ALiBi's does, has others close by.

    Args:
        name: of what received the mask.
        mask: (B or 1, H or 1, N, M).
        floor: at or below it nothing may be attended.

    Raises:
        RecordingError: there are entries at or below −1000, and none between the largest of them
            and half of it. Names the value.
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
