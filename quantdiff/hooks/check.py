"""Eager attention returns its weights, which must be the softmax of what was recorded."""

import torch
from torch import Tensor

from quantdiff.errors import RecordingError
from quantdiff.hooks.biases import Bias
from quantdiff.statistics import Visible

__all__ = ["check_weights"]

_ROWS = 4  # about so many queries are checked in each sequence


def check_weights(
    name: str,
    weights: Tensor,
    query: Tensor,
    key: Tensor,
    scale: float,
    visible: Visible,
    softcap: float | None,
    bias: Bias | None,
) -> bool:
    """Compare the weights of a few queries with the softmax of their logits.

    Logarithms of weights are compared up to a constant per row, so neither an attention sink, which
    takes a share of every row, nor dropout, which scales what it leaves, matters.

    Args:
        name: of the attention module.
        weights: (B, H, N, M), as the family's eager function returned them.
        query: (B, H, N, D); key: (B, G, M, D).
        scale, visible, softcap, bias: as they were recorded.

    Returns:
        Whether there was anything to compare: a row of one key has weight 1 whatever its logit.

    Raises:
        RecordingError: the weights differ; something between q·kᵀ and softmax is not known.
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
    if (
        query.is_cuda
        and dtype == torch.float32
        and torch.backends.cuda.matmul.fp32_precision == "tf32"
    ):
        rounding = 2.0**-10
    columns = torch.arange(keys, device=query.device)
    told = False
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
            found = weights[b, :, n].float()
            if not bool(torch.isfinite(found).all()):
                raise RecordingError(f"NaN or infinity among the attention weights of {name}")
            largest = float(torch.where(seen, s.abs(), 0.0).max())
            # In logit units, so that a flat row is as informative as a peaked one. A sink shifts a
            # row as a whole; weights close to 0 are left out, as they are mostly rounding.
            masked = s.masked_fill(~seen, -torch.inf)
            heavy = seen & (masked > masked.amax(-1, keepdim=True) - 4) & (found > 1e-30)
            gap = torch.where(heavy, found.clamp(min=1e-37).log() - s, 0.0)
            count = heavy.sum(-1, keepdim=True).clamp(min=1)
            gap = torch.where(heavy, gap - gap.sum(-1, keepdim=True) / count, 0.0)
            hidden = torch.where(seen, 0.0, found).max()
            if float(gap.abs().max()) > 1e-2 + 4 * rounding * (1 + largest) or float(hidden) > 1e-6:
                raise RecordingError(
                    f"the eager attention of {name} gives other weights than the softmax of "
                    "q·kᵀ·scaling with its mask; something in between is not known to quantdiff"
                )
            told = told or int(heavy.sum(-1).max()) > 1
    return told
