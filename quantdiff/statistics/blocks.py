"""The statistics of logits and tensors in plain torch, block by block, on any device."""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quantdiff.statistics import native
from quantdiff.statistics.precision import exact_product
from quantdiff.statistics.site import SiteStatistics
from quantdiff.statistics.visible import Visible

__all__ = [
    "BLOCK_ELEMENTS",
    "GPU_SHIFT",
    "Part",
    "Sieve",
    "block_elements",
    "block_part",
    "nothing",
    "torch_logits",
    "torch_values",
    "unit_of",
]

BLOCK_ELEMENTS = 1 << 20  # logits per block: 4 MiB of fp32
GPU_SHIFT = 5  # a GPU uses blocks 32 times as large, or launches would take most of the time
SMALL = 4096  # elements summed in fp32 before fp64 takes over

Bias = Callable[[int, int], Tensor]


def block_elements(device: torch.device) -> int:
    """Number of logits per block on a device."""
    return BLOCK_ELEMENTS if device.type == "cpu" else BLOCK_ELEMENTS << GPU_SHIFT


@dataclass(eq=False)
class Part:
    """Results of one block of rows.

    Attributes:
        partial: records of native.PARTIAL, (B·H,).
        counts: histogram counts (H, 2, w), or None.
        first: magnitude bin of column 0 of `counts`.
        items: large magnitudes, records of native.ITEM.
        row: first row of the block; the items' rows count from it.
        uncapped: largest magnitudes before the soft cap, (H,), if there is one.
    """

    partial: NDArray[np.void]
    counts: NDArray[np.int64] | None
    first: int
    items: NDArray[np.void]
    row: int
    uncapped: NDArray[np.float32] | None = None


def torch_logits(
    q: Tensor,
    k: Tensor,
    scale: float,
    visible: Visible,
    unit: NDArray[np.float32],
    site: SiteStatistics,
    softcap: float | None,
    bias: Bias | None,
) -> Iterator[Part]:
    """Parts of the logits softcap(q·kᵀ·scale) + bias; q: (B, H, N, D), k: (B, G, M, D), fp32."""
    batch, heads, rows, _ = q.shape
    keys = k.shape[2]
    k = k.repeat_interleave(heads // k.shape[1], 1)  # (B, H, M, D)
    step = max(1, block_elements(q.device) // (heads * keys))
    starts, stops = visible.start.to(q.device), visible.stop.to(q.device)
    columns = torch.arange(keys, device=q.device)
    table = _Table(heads, q.device) if site.histogram is not None else None
    sieve = Sieve(site)
    units = unit.reshape(batch, heads, 2)
    fresh = [True] * batch
    for b in range(batch):
        for first in range(0, rows, step):
            last = min(first + step, rows)
            counted = (stops[b, first:last] > starts[b, first:last]).nonzero()[:, 0]
            if not len(counted):
                continue
            start, stop = starts[b, first:last][counted], stops[b, first:last][counted]  # (n,)
            low, high = int(start.min()), int(stop.max())
            s = exact_product(q[b, :, first:last][:, counted], k[b, :, low:high]) * scale
            raw = s
            if softcap is not None:
                s = torch.tanh(s / softcap) * softcap
            if bias is not None:
                added = bias(first, last)
                s = s + added[b if len(added) > 1 else 0].to(s)[:, counted, low:high]
            extra = visible.mask_rows(first, last)
            if extra is not None:
                extra = extra[b if len(extra) > 1 else 0].to(q.device)[:, counted]
            if fresh[b] and (softcap is not None or bias is not None):
                # The closed form knows neither cap nor bias: take the unit from the first block.
                here = columns[low:high]
                seen = ((here >= start[:, None]) & (here < stop[:, None]))[None]
                seen = seen if extra is None else seen & extra[:, :, low:high]
                units[b] = _unit_of_seen(s, seen)
            fresh[b] = False
            # Keys that every row of the block sees need no mask: all but the edges if causal.
            edges = [low, low, high, high]
            if extra is None:
                edges[1] = min(int(start.max()), high)
                edges[2] = max(int(stop.min()), edges[1])
            for i, (left, right) in enumerate(itertools.pairwise(edges)):
                if left == right:
                    continue
                seen = None
                if i != 1 or extra is not None:
                    here = columns[left:right]
                    seen = (here >= start[:, None]) & (here < stop[:, None])
                    seen = seen[None] if extra is None else seen & extra[:, :, left:right]
                piece = s[:, :, left - low : right - low]
                part = block_part(piece, seen, units[b], table, sieve)
                whole = nothing(batch * heads)
                whole[b * heads : (b + 1) * heads] = part.partial
                part.partial = whole
                part.items["batch"] = b
                part.items["row"] = counted.cpu().numpy()[part.items["row"]]
                part.items["column"] += left
                part.row = first
                if softcap is not None:
                    before = raw[:, :, left - low : right - low].abs()
                    before = before if seen is None else torch.where(seen, before, 0.0)
                    part.uncapped = before.amax((1, 2)).cpu().numpy()
                yield part
    if table is not None:
        yield table.part(batch)


def torch_values(
    x: Tensor, rows: Tensor, unit: NDArray[np.float32], site: SiteStatistics
) -> Iterator[Part]:
    """Parts of the marked rows of x (G, N, D) fp32."""
    groups, _, width = x.shape
    counted = rows.to(x.device).nonzero()[:, 0]
    step = max(1, block_elements(x.device) // max(groups * width, 1))
    table = _Table(groups, x.device) if site.histogram is not None else None
    sieve = Sieve(site)
    for first in range(0, len(counted), step):
        here = counted[first : first + step]
        part = block_part(x[:, here], None, unit, table, sieve)
        part.items["row"] = here.cpu().numpy()[part.items["row"]]
        yield part
    if table is not None:
        yield table.part(1)


class _Table:
    """Counts of the sixteen leading bits, accumulated on the device over the blocks of one call."""

    def __init__(self, heads: int, device: torch.device) -> None:
        self.heads = heads
        self.counts = torch.zeros(heads, native.BINS + 1, dtype=torch.int64, device=device)
        self.offset = torch.arange(heads, dtype=torch.int32, device=device)[:, None, None]
        self.offset = self.offset * (native.BINS + 1)

    def count(self, s: Tensor, seen: Tensor | None) -> None:
        """Count a block s (H, n, m) where `seen` holds."""
        key = (s.contiguous().view(torch.int32) >> 16) & 0xFFFF
        if seen is not None:
            key = torch.where(seen, key, native.BINS)  # a bin that is not read
        key = (key + self.offset).flatten()
        self.counts += torch.bincount(key, minlength=self.counts.numel()).view_as(self.counts)

    def part(self, batch: int) -> Part:
        """The counts as a part without other results."""
        counts = self.counts[:, : native.BINS].reshape(self.heads, 2, -1).cpu().numpy()
        return Part(nothing(batch * self.heads), counts, 0, np.zeros(0, native.ITEM), 0)


def unit_of(mean: Tensor, spread: Tensor) -> NDArray[np.float32]:
    """Weight and weighted pivot, (n, 2), that bring values to about mean 0 and spread 1."""
    pivot = np.nan_to_num(mean.double().cpu().numpy(), posinf=0.0, neginf=0.0)
    width = spread.double().cpu().numpy()
    usable = np.isfinite(width) & (width > 0)
    exponent = np.round(-np.log2(np.where(usable, width, 1.0)))
    weight = np.exp2(np.clip(exponent, -100, 100))
    return np.stack([weight, pivot * weight], -1).reshape(-1, 2).astype(np.float32)


def _unit_of_seen(s: Tensor, seen: Tensor) -> NDArray[np.float32]:
    """Weight and weighted pivot of the entries of s (H, n, m) that count."""
    count = seen.expand(s.shape).sum((1, 2)).clamp(min=1)
    x = torch.where(seen, s.double(), 0.0)
    mean = x.sum((1, 2)) / count
    spread = torch.where(seen, x - mean[:, None, None], 0.0).square().sum((1, 2)) / count
    return unit_of(mean, spread.sqrt())


def nothing(groups: int) -> NDArray[np.void]:
    """Empty records of native.PARTIAL, (groups,)."""
    partial = np.zeros(groups, native.PARTIAL)
    partial["min"], partial["max"] = np.inf, -np.inf
    return partial


def block_part(
    s: Tensor,
    seen: Tensor | None,
    unit: NDArray[np.float32],
    table: _Table | None,
    sieve: "Sieve",
) -> Part:
    """Statistics of a block s (H, n, m), only where `seen` (1 or H, n, m) holds if it is given."""
    heads = s.shape[0]
    partial = nothing(heads)
    part = Part(partial, None, 0, np.zeros(0, native.ITEM), 0)
    shown = s if seen is None else torch.where(seen, s, torch.inf)
    low = shown.amin((1, 2)).cpu().numpy()
    shown = s if seen is None else torch.where(seen, s, -torch.inf)
    high = shown.amax((1, 2)).cpu().numpy()
    if seen is None:
        partial["count"] = s.shape[1] * s.shape[2]
    else:
        partial["count"] = seen.sum((1, 2)).expand(heads).cpu().numpy()
    filled = partial["count"] > 0
    partial["min"][filled], partial["max"][filled] = low[filled], high[filled]
    # amin and amax propagate NaN.
    partial["bad"] = filled & ~(np.isfinite(low) & np.isfinite(high))
    if partial["bad"].any() or not filled.any():
        return part
    if table is not None:
        weight, pivot = torch.from_numpy(unit).to(s.device).T[:, :, None, None]
        # With few values, the rounding of fp32 squares does not average out.
        t = (s.double() if s[0].numel() <= SMALL else s) * weight - pivot
        t = (t if seen is None else torch.where(seen, t, 0.0)).flatten(1)
        t2 = t * t
        sums = [_sum(x) for x in (t, t2, t2 * t, t2 * t2)]
        partial["moment"] = torch.stack(sums, -1).cpu().numpy()
        table.count(s, seen)
    absmax = max(-float(low[filled].min()), float(high[filled].max()))
    if sieve.rank and absmax >= sieve.floor:
        part.items = sieve.pass_through(s, seen)
    return part


class Sieve:
    """Filter for values that may be among the `rank` largest magnitudes of a call."""

    def __init__(self, site: SiteStatistics) -> None:
        self.rank = site.top.rank
        self.floor = max(site.top.threshold, 0.0)

    def pass_through(self, s: Tensor, seen: Tensor | None) -> NDArray[np.void]:
        """Records of native.ITEM with head, row, column and value."""
        magnitude = s.abs() if seen is None else torch.where(seen, s.abs(), -1.0)
        if not self.floor and magnitude.numel() > self.rank:
            # The first block sets a floor; comparing later ones with it is cheaper.
            self.floor = max(0.0, float(torch.topk(magnitude.flatten(), self.rank).values[-1]))
        places = (magnitude >= self.floor).nonzero(as_tuple=True)
        items = np.zeros(len(places[0]), native.ITEM)
        items["value"] = s[places].cpu().numpy()
        for name, place in zip(("head", "row", "column"), places, strict=True):
            items[name] = place.cpu().numpy()
        if len(items) > self.rank:
            kept = np.partition(np.abs(items["value"]), -self.rank)[-self.rank]
            self.floor = max(self.floor, float(kept))
            items = items[np.abs(items["value"]) >= kept]
        return items


def _sum(x: Tensor) -> Tensor:
    """Row-wise sum, (H,): short runs in fp32, their sums in fp64."""
    whole = x.shape[1] // SMALL * SMALL
    total = x[:, whole:].sum(1, dtype=torch.float64)
    if whole:
        total += x[:, :whole].reshape(len(x), -1, SMALL).sum(2).sum(1, dtype=torch.float64)
    return total
