"""The statistics of logits and tensors in plain torch, block by block, on any device."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quantdiff.statistics import native
from quantdiff.statistics.site import SiteStatistics
from quantdiff.statistics.top import Top
from quantdiff.statistics.visible import Visible

__all__ = ["BLOCK_ELEMENTS", "Part", "torch_logits", "torch_values"]

BLOCK_ELEMENTS = 1 << 21  # of a block of logits: 8 MiB of fp32


@dataclass(eq=False)
class Part:
    """What one block gave: records of native.PARTIAL (B·H,), histogram counts and the first bin,
    records of native.ITEM, and the row at which the block begins."""

    partial: NDArray[np.void]
    counts: NDArray[np.int64] | None
    first: int
    items: NDArray[np.void]
    row: int


def torch_logits(
    q: Tensor,
    k: Tensor,
    scale: float,
    visible: Visible,
    unit: NDArray[np.float32],
    site: SiteStatistics,
    top: Top,
    softcap: float | None,
    bias: Callable[[int, int], Tensor] | None,
) -> Iterator[Part]:
    """Parts of the logits softcap(q·kᵀ·scale) + bias; q: (B, H, N, D), k: (B, G, M, D), fp32."""
    batch, heads, rows, _ = q.shape
    keys = k.shape[2]
    k = k.repeat_interleave(heads // k.shape[1], 1)  # (B, H, M, D)
    step = max(1, BLOCK_ELEMENTS // (heads * keys))
    columns = torch.arange(keys, device=q.device)
    start, stop = visible.start.to(q.device), visible.stop.to(q.device)
    for b in range(batch):
        for first in range(0, rows, step):
            last = min(first + step, rows)
            # With hints from the interval, keys that nobody in the block sees are skipped.
            low, high = int(start[b, first:last].min()), int(stop[b, first:last].max())
            if high <= low:
                continue
            s = _exact_product(q[b, :, first:last], k[b, :, low:high]) * scale  # (H, n, m)
            if softcap is not None:
                s = torch.tanh(s / softcap) * softcap
            if bias is not None:
                added = bias(first, last)
                s = s + added[b if added.shape[0] > 1 else 0, :, :, low:high].float()
            seen = (columns[low:high] >= start[b, first:last, None]) & (
                columns[low:high] < stop[b, first:last, None]
            )
            seen = seen[None].expand(s.shape)
            extra = visible.mask_rows(first, last)
            if extra is not None:
                seen = seen & extra[b if extra.shape[0] > 1 else 0, :, :, low:high].to(q.device)
            part = _block(s, seen, unit.reshape(batch, heads, 2)[b], site, top)
            whole = np.zeros((batch, heads), native.PARTIAL)
            whole["min"], whole["max"] = np.inf, -np.inf
            whole[b] = part.partial
            part.partial = whole.reshape(-1)
            part.items["batch"] = b
            part.items["column"] += low
            part.row = first
            yield part


def torch_values(
    x: Tensor, rows: Tensor, unit: NDArray[np.float32], site: SiteStatistics, top: Top
) -> Iterator[Part]:
    """Parts of the marked rows of x (N, D) fp32."""
    step = max(1, BLOCK_ELEMENTS // max(x.shape[1], 1))
    for first in range(0, len(x), step):
        block = x[None, first : first + step]  # (1, n, D)
        seen = rows[first : first + step].to(x.device)[None, :, None].expand(block.shape)
        part = _block(block, seen, unit, site, top)
        part.row = first
        yield part


def _exact_product(a: Tensor, b: Tensor) -> Tensor:
    """a·bᵀ in true fp32, whatever the process allows for its own products."""
    if a.device.type != "cuda":
        return a @ b.mT
    allowed = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    try:
        return a @ b.mT
    finally:
        torch.backends.cuda.matmul.allow_tf32 = allowed


def _block(
    s: Tensor, seen: Tensor, unit: NDArray[np.float32], site: SiteStatistics, top: Top
) -> Part:
    """The statistics of one block, s and seen: (H, n, m)."""
    heads = s.shape[0]
    partial = np.zeros(heads, native.PARTIAL)
    count = seen.sum((1, 2))
    partial["count"] = count.cpu().numpy()
    low = s.masked_fill(~seen, torch.inf).amin((1, 2))
    high = s.masked_fill(~seen, -torch.inf).amax((1, 2))
    partial["min"], partial["max"] = low.cpu().numpy(), high.cpu().numpy()
    partial["bad"] = (~torch.isfinite(s) & seen).any(-1).any(-1).cpu().numpy()
    counts, first = None, 0
    if site.histogram is not None and not partial["bad"].any():
        weight, pivot = torch.from_numpy(unit).to(s.device).T[:, :, None, None]
        t = torch.where(seen, s * weight - pivot, 0.0)
        t2 = t * t
        sums = [x.sum((1, 2), dtype=torch.float64) for x in (t, t2, t2 * t, t2 * t2)]
        partial["moment"] = torch.stack(sums, -1).cpu().numpy()
        counts, first = _count_bins(s, seen)
    items = np.zeros(0, native.ITEM)
    if top.rank and not partial["bad"].any():
        magnitude = torch.where(seen, s.abs(), -1.0).flatten()
        floor = torch.topk(magnitude, min(top.rank, len(magnitude))).values[-1]
        floor = floor.clamp(min=max(top.threshold, 0.0))
        head, row, column = (
            x.cpu().numpy() for x in ((magnitude >= floor).view(s.shape)).nonzero(as_tuple=True)
        )
        items = np.zeros(len(head), native.ITEM)
        items["value"] = s[head, row, column].cpu().numpy()
        items["head"], items["row"], items["column"] = head, row, column
    return Part(partial, counts, first, items, 0)


def _count_bins(s: Tensor, seen: Tensor) -> tuple[NDArray[np.int64], int]:
    """Histogram counts (H, 2, w) and the magnitude bin of column 0."""
    heads = s.shape[0]
    bits = s.contiguous().view(torch.int32) >> 16
    magnitude, negative = bits & 0x7FFF, (bits < 0).int()
    used = magnitude[seen]
    if not used.numel():
        return np.zeros((heads, 2, 0), np.int64), 0
    low, high = int(used.min()), int(used.max()) + 1
    width = high - low
    head = torch.arange(heads, device=s.device, dtype=torch.int32)[:, None, None]
    key = (2 * head + negative) * width + (magnitude - low)
    counts = torch.bincount(key[seen], minlength=2 * heads * width)
    return counts.view(heads, 2, width).cpu().numpy().astype(np.int64), low
