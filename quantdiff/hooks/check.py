"""Eager attention hands its weights back: they must be the softmax of what was recorded."""

import torch
from torch import Tensor

from quantdiff.errors import RecordingError
from quantdiff.hooks.masks import Bias
from quantdiff.statistics import Visible

__all__ = ["check_weights"]

_ROWS = 4  # queries looked at in each sequence


def check_weights(
    name: str,
    weights: Tensor,
    query: Tensor,
    key: Tensor,
    scale: float,
    visible: Visible,
    softcap: float | None,
    bias: Bias | None,
) -> None:
    """Compare the weights of a few queries with the softmax of their logits.

    Weights are compared after scaling each row to sum 1, so that an attention sink, which takes a
    share of every row, does not matter.

    Args:
        name: of the attention module.
        weights: (B, H, N, M), as the family's eager function returned them.
        query: (B, H, N, D); key: (B, G, M, D).
        scale, visible, softcap, bias: as they were recorded.

    Raises:
        RecordingError: the weights are others; something between q·kᵀ and softmax is not known.
    """
    batch, heads, rows, _ = query.shape
    keys = key.shape[2]
    if tuple(weights.shape) != (batch, heads, rows, keys):
        raise RecordingError(
            f"{name} returns attention weights of shape {tuple(weights.shape)}, not "
            f"{(batch, heads, rows, keys)}; quantdiff does not know what they mean"
        )
    autocast = torch.is_autocast_enabled(query.device.type)
    dtype = torch.get_autocast_dtype(query.device.type) if autocast else query.dtype
    rounding = torch.finfo(dtype).eps  # of the logits, where the model holds them in its own dtype
    columns = torch.arange(keys, device=query.device)
    for b in range(batch):
        counted = (visible.stop[b] > visible.start[b]).nonzero()[:, 0]
        picked = counted[:: max(1, len(counted) // _ROWS)].tolist()
        for n in picked:
            k = key[b].float().repeat_interleave(heads // key.shape[1], 0)  # (H, M, D)
            s = (k @ query[b, :, n, :, None].float())[..., 0] * scale  # (H, M)
            if softcap is not None:
                s = torch.tanh(s / softcap) * softcap
            if bias is not None:
                added = bias(n, n + 1)
                s = s + added[b if len(added) > 1 else 0, :, 0].float()
            seen = (columns >= visible.start[b, n]) & (columns < visible.stop[b, n])
            extra = visible.mask_rows(n, n + 1)
            seen = seen[None] if extra is None else seen & extra[b if len(extra) > 1 else 0, :, 0]
            seen = seen.expand(s.shape)
            expected = s.masked_fill(~seen, -torch.inf).softmax(-1).nan_to_num()
            found = weights[b, :, n].float()
            total = found.sum(-1, keepdim=True)
            # A sink may take all but nothing of a row, which then cannot be compared.
            found = torch.where(total > 1e-30, found / total, expected)
            largest = float(torch.where(seen, s, 0.0).abs().max())
            if float((found - expected).abs().max()) > 1e-3 + rounding * largest:
                raise RecordingError(
                    f"the eager attention of {name} gives other weights than the softmax of "
                    "q·kᵀ·scaling with its mask; something in between is not known to quantdiff"
                )
