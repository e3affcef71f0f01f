"""Attention over fake-quantized logits with torch's compiled flex attention: the GPU path.

The grid enters the kernel as a score modification, so logits never leave the chip. It must be
known in advance: grids per row, counting and gradients are left to the blocks of attention.py.
"""

from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from quantdiff.attention.blocks import BLOCK, block_mask
from quantdiff.quantization.grid import Grid
from quantdiff.quantization.softmax import Softmax
from quantdiff.statistics import Visible
from quantdiff.statistics.precision import true_fp32

__all__ = ["attend", "may_overflow", "takes"]

NARROWEST = 16  # smallest head width that flex attention takes on a GPU
# One graph for each kind of call: precision, groups, soft cap, sinks, widths. Several models soon
# need more than dynamo's 8, beyond which flex attention would silently materialise n×n logits.
GRAPHS = 64


def takes(q: Tensor, k: Tensor, v: Tensor, softmax: Softmax, sinks: Tensor | None = None) -> bool:
    """Whether this path can compute a call."""
    given = [x for x in (q, k, v, sinks) if x is not None]
    return (
        q.is_cuda
        and q.dtype in (torch.float32, torch.bfloat16, torch.float16)
        and min(q.shape[-1], v.shape[-1]) >= NARROWEST
        and isinstance(softmax.grid, Grid)
        and softmax.clipped is None
        and softmax.maps is None
        and softmax.heads is None
        and softmax.bias is None
        and softmax.visible.mask is None
        and not (torch.is_grad_enabled() and any(x.requires_grad for x in given))
        and not (softmax.clips and may_overflow(q, k, softmax.scale))
    )


def may_overflow(q: Tensor, k: Tensor, scale: float) -> bool:
    """Whether a logit may be NaN or infinite, which clamping would hide."""
    largest = q.detach().abs().amax().double() * k.detach().abs().amax().double()
    return not float(largest) * q.shape[-1] * max(scale, 1.0) < torch.finfo(torch.float32).max


@torch.no_grad()
def attend(
    q: Tensor, k: Tensor, v: Tensor, softmax: Softmax, sinks: Tensor | None = None
) -> Tensor:
    """softmax(quantized logits)·v, as `quantdiff.quantization.attention.attend`.

    Args:
        q: (B, H, N, D); k: (B, G, M, D); v: (B, G', M, w), of one dtype.
        softmax: with a grid and without a bias or a mask besides the intervals.
        sinks: (H,) or None.

    Returns:
        (B, H, N, w) in v's dtype, to which the weights are rounded before they multiply v.
    """
    grid, visible = softmax.grid, softmax.visible
    assert isinstance(grid, Grid)
    batch, heads = q.shape[:2]
    groups = max(k.shape[1], v.shape[1])
    k, v = (x.repeat_interleave(groups // x.shape[1], 1) for x in (k, v))
    step, zero = (x[:, :, 0, 0].expand(batch, heads).contiguous() for x in (grid.step, grid.zero))
    # Tensors, not numbers: numbers would be compiled in, once for every width.
    given = torch.tensor([softmax.scale, grid.low, grid.high], device=q.device)
    cap = None if softmax.softcap is None else torch.tensor(softmax.softcap, device=q.device)
    start, stop = visible.start.to(q.device), visible.stop.to(q.device)

    def score_mod(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        s = score.float() * given[0]  # half-precision scores are clamped wrongly on a CPU
        if cap is not None:
            s = torch.tanh(s / cap) * cap
        s = torch.round(s / step[b, h]) + zero[b, h]
        s = torch.minimum(torch.maximum(s, given[1]), given[2])
        return (s - zero[b, h]) * step[b, h]

    def mask_mod(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return (j >= start[b, i]) & (j < stop[b, i])

    # Compiled code does not run under other modes, such as the one that looks for flash-attn.
    with true_fp32(), _disable_current_modes(), torch._dynamo.config.patch(recompile_limit=GRAPHS):
        out = _flex()(
            q, k, v, score_mod=score_mod, scale=1.0, enable_gqa=groups != heads,
            return_lse=sinks is not None,
            block_mask=_blocks(Visible(start, stop), k.shape[2], mask_mod),
        )  # fmt: skip
    if sinks is not None:
        out, lse = out
        out = out * torch.sigmoid(lse - sinks.float()[None, :, None])[..., None]
    blind = (stop <= start)[:, None, :, None]  # (B, 1, N, 1)
    return out.masked_fill(blind, 0.0).to(v.dtype)


@cache
def _flex() -> Any:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention)


def _blocks(visible: Visible, keys: int, mask_mod: Any) -> Any:
    """The mask by blocks, from the intervals alone."""
    start, stop = visible.start, visible.stop.clamp(max=keys)
    batch, rows = start.shape
    pad = -rows % BLOCK
    blind = stop <= start
    # Rows that see nothing widen no block; those beyond the end narrow none.
    first = torch.where(blind, keys, start)
    last = torch.where(blind, 0, stop)

    def over(x: Tensor, fill: int) -> Tensor:
        return torch.nn.functional.pad(x, (0, pad), value=fill).view(batch, -1, BLOCK)  # (B, R, n)

    least, most = over(first, keys).amin(-1), over(last, 0).amax(-1)  # (B, R)
    latest, soonest = over(first, 0).amax(-1), over(last, keys).amin(-1)
    begin = torch.arange(0, keys, BLOCK, device=start.device)  # (C,)
    end = (begin + BLOCK).clamp(max=keys)
    some = (begin < most[..., None]) & (end > least[..., None])  # (B, R, C)
    whole = some & (latest[..., None] <= begin) & (soonest[..., None] >= end)
    whole &= end - begin == BLOCK
    return block_mask(some, whole, (rows, keys), mask_mod)
