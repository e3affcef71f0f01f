"""Extremes of attention logits from the log-sum-exp of a flash kernel; no logit is stored.

A flash kernel returns LSE(n) = ln Σ_m exp(s(n, m)) of every row alongside its output. If its
softmax scale is T times that of the logits, LSE/T lies between the row's largest logit and ln(M)/T
above it, where M is the number of keys. With −q in place of q it bounds the smallest one. So two
forward passes bound both extremes of every row, and only rows that may, by their bounds, hold an
extreme of their head or one of the largest magnitudes of the site are computed, in fp32.

How far a bound may be off (u = 2⁻²⁴, A = |scale|·‖q‖·max‖k‖ of the row, d the head width):

- A sum of d fp32 products has an error of at most d·u·A (Higham, Accuracy and Stability of
  Numerical Algorithms, 2002, section 3.1). A tensor core truncates where others round, and does so
  at most 17 times for 16 products: 2.2·d·u·A. Both the kernel and the product that it is compared
  with have such an error: together less than 4·(d + 8)·u·A.
- The scale, its product with the largest sum, the logarithm added to it, the exponents (rounded at
  the size of the largest) and the division by T: at most 8 roundings; 16·u·|LSE/T| is allowed.
- The sum of up to 2²² exponentials and their own errors change LSE by less than 0.5: 0.5/T.

T·A stays below 2³⁰, where the exponent of 2 is rounded by at most 64, so that the exponentials
neither vanish nor overflow.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import log

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quantdiff.statistics import native
from quantdiff.statistics.blocks import Part, Sieve, nothing, torch_logits
from quantdiff.statistics.chosen import chosen_logits
from quantdiff.statistics.kernels import kernel_takes, log_sum_exp
from quantdiff.statistics.site import SiteStatistics
from quantdiff.statistics.visible import Visible

__all__ = ["lse_logits", "row_extremes"]

SHARPEST = 2.0**30  # the largest T·A
STEEPEST = 1e30  # the largest T, used if all logits are almost zero
LARGEST = 1e36  # largest product or logit: beyond it fp32 may overflow
FEW = 256  # rows that are computed whatever their share; beyond that, at most an eighth
MOST_KEYS = 1 << 22
_U = 2.0**-24
_TINY = 2.0**-50  # squares below 2**-126 are lost in a norm, products below it in a sum


@dataclass(frozen=True)
class _Run:
    """Sequences that one kernel call processes together.

    Attributes:
        batch: their indices.
        first, last: rows first ≤ n < last count.
        start, shared: keys start ≤ m < shared are seen by all of these rows.
        stop: keys shared ≤ m < stop, none or one per row; row n sees them up to its own.
    """

    batch: list[int]
    first: int
    last: int
    start: int
    shared: int
    stop: int

    def rows(self, x: Tensor) -> Tensor:
        """The rows that count, (b, ·, n, ·), of x (B, ·, N, ·)."""
        x = x if self.batch == list(range(len(x))) else x[self.batch]
        return x[:, :, self.first : self.last]

    def keys(self, x: Tensor) -> Tensor:
        """The keys that are seen, (b, ·, m, ·), of x (B, ·, M, ·)."""
        x = x if self.batch == list(range(len(x))) else x[self.batch]
        return x[:, :, self.start : self.stop]


@dataclass(frozen=True)
class _Bounds:
    """Bounds for the rows of a run: (2, b, H, n) each, for s and for −s.

    Attributes:
        largest: estimate of the largest logit.
        above, below: how far the true one may lie above and below it.
    """

    largest: Tensor
    above: Tensor
    below: Tensor


@torch.no_grad()
def row_extremes(
    q: Tensor, k: Tensor, scale: float, visible: Visible, *, temperature: float = 1e4
) -> tuple[Tensor, Tensor] | None:
    """Largest and smallest logit of every query.

    Args:
        q: (B, H, N, D); fp32, fp16 or bf16 on a CPU, fp16 or bf16 on a CUDA GPU.
        k: (B, G, M, D), H a multiple of G; query head h uses key head h // (H / G).
        scale: factor of q·kᵀ.
        visible: what may be attended.
        temperature: T, the factor on top of the scale; large logits use a smaller one.

    Returns:
        Two tensors, (B, H, N) fp32, within ln(M)/T and the rounding derived in the module
        docstring; −inf and +inf in rows that do not count. None if no kernel supports these inputs:
        another dtype or device, a mask, rows whose keys are neither all the same nor one more with
        every row, values that are not finite or so large that fp32 may overflow.
    """
    runs = _runs(q, k, visible)
    if runs is None:
        return None
    high = torch.full(q.shape[:3], -torch.inf, device=q.device)
    low = torch.full(q.shape[:3], torch.inf, device=q.device)
    for run in runs:
        found = _bounds(q, k, scale, run, temperature)
        if found is None:
            return None
        high[run.batch, :, run.first : run.last] = found.largest[0]
        low[run.batch, :, run.first : run.last] = -found.largest[1]
    return high, low


def lse_logits(
    q: Tensor, k: Tensor, scale: float, visible: Visible, site: SiteStatistics
) -> Iterator[Part] | None:
    """Parts of the logits q·kᵀ·scale for a site without moments and histogram.

    They hold the count and only those logits that can change the site: its extremes and largest
    magnitudes come out the same as with `torch_logits`. If values are not finite, or so many rows
    are so similar that bounds cannot separate them, the parts are those of `torch_logits`.

    Args:
        q, k, scale, visible: as in `row_extremes`, in the dtype that the model multiplied.
        site: the site that the parts will be added to.

    Returns:
        The parts, or None if no kernel supports these inputs.
    """
    runs = _runs(q, k, visible)
    return None if runs is None else _parts(q, k, scale, visible, site, runs)


def _runs(q: Tensor, k: Tensor, visible: Visible) -> list[_Run] | None:
    """Group sequences of the same shape; None if the kernels do not support them."""
    if visible.mask is not None or k.shape[2] > MOST_KEYS or not kernel_takes(q, k):
        return None
    starts, stops = visible.start.cpu().numpy(), visible.stop.cpu().numpy()
    found: dict[tuple[int, int, int, int, int], list[int]] = {}
    for b in range(len(starts)):
        counted = np.flatnonzero(stops[b] > starts[b])
        if not len(counted):
            continue
        first, last = int(counted[0]), int(counted[-1]) + 1
        start, stop = starts[b, first:last], stops[b, first:last]
        if last - first != len(counted) or (start != start[0]).any():
            return None
        steps = np.diff(stop)
        if (steps == 0).all():
            shared = int(stop[0])
        elif (steps == 1).all():
            shared = int(stop[0]) - 1
        else:
            return None
        shape = (first, last, int(start[0]), shared, int(stop[-1]))
        found.setdefault(shape, []).append(b)
    return [_Run(batch, *shape) for shape, batch in found.items()]


def _norm(x: Tensor) -> Tensor:
    """Upper bound on the norms of the vectors of x (..., D)."""
    length = torch.linalg.vector_norm(x, dim=-1, dtype=torch.float32)
    return length * 1.001 + x.shape[-1] ** 0.5 * _TINY


def _bounds(q: Tensor, k: Tensor, scale: float, run: _Run, temperature: float) -> _Bounds | None:
    """Bounds for the rows of a run; None if the values are not finite or too large."""
    q, k = run.rows(q), run.keys(k)
    repeat, width = q.shape[1] // k.shape[1], q.shape[-1]
    if repeat > 1:
        k = k.repeat_interleave(repeat, 1)  # (b, H, m, D)
    product = _norm(q) * _norm(k).amax(-1, keepdim=True)  # (b, H, n)
    longest = float(product.amax())
    if not longest * max(abs(scale), 1.0) < LARGEST:  # or NaN
        return None
    size = product * abs(scale)
    sharp = min(temperature, STEEPEST, SHARPEST / max(longest * abs(scale), SHARPEST / STEEPEST))
    split, found = run.shared - run.start, []
    for sign in (1.0, -1.0):
        x = q if sign * scale >= 0 else -q
        parts = []
        if split:
            parts.append(log_sum_exp(x, k[:, :, :split], abs(scale) * sharp, causal=False))
        if split < k.shape[2]:
            parts.append(log_sum_exp(x, k[:, :, split:], abs(scale) * sharp, causal=True))
        # The larger of two is below their joint log-sum-exp and above the largest logit of both.
        found.append(parts[0] if len(parts) == 1 else torch.maximum(*parts))
    largest = torch.stack(found) / sharp  # (2, b, H, n)
    ties = log(k.shape[2]) / sharp
    slack = size * (4 * (width + 8) * _U) + 0.5 / sharp
    if not bool((largest.abs() * (1 - 16 * _U) <= size + slack + ties).all()):
        return None  # not a log-sum-exp of these values, or NaN
    above = largest.abs() * (16 * _U) + slack
    below = above + ties
    return _Bounds(largest, above, below)


def _parts(
    q: Tensor, k: Tensor, scale: float, visible: Visible, site: SiteStatistics, runs: list[_Run]
) -> Iterator[Part]:
    groups = q.shape[0] * q.shape[1]
    chosen = _chosen(q, k, scale, site, runs)
    if chosen is None:
        unit = np.zeros((groups, 2), np.float32)
        yield from torch_logits(q.float(), k.float(), scale, visible, unit, site, None, None)
        return
    floor, places, spans = chosen
    seen = (visible.stop - visible.start).clamp(min=0).sum(1).cpu().numpy()  # (B,)
    count = nothing(groups)
    count["count"] = np.repeat(seen, q.shape[1])
    yield Part(count, None, 0, np.zeros(0, native.ITEM), 0)
    sieve = Sieve(site)
    sieve.floor = max(sieve.floor, floor)
    yield from chosen_logits(q, k, scale, places, spans, sieve)


def _chosen(
    q: Tensor, k: Tensor, scale: float, site: SiteStatistics, runs: list[_Run]
) -> tuple[float, NDArray[np.int64], NDArray[np.int64]] | None:
    """Rows that may change a site, and a magnitude that its largest ones certainly reach.

    Returns:
        The magnitude; (c, 3) of (sequence, head, row); (c, 2), the keys that each row sees. None if
        the bounds do not help.
    """
    bounds = []
    for run in runs:
        found = _bounds(q, k, scale, run, STEEPEST)
        if found is None:
            return None
        bounds.append(found)
    if not bounds:
        return 0.0, np.zeros((0, 3), np.int64), np.zeros((0, 2), np.int64)
    sure = [b.largest - b.below for b in bounds]  # (2, b, H, n)
    held = torch.from_numpy(np.stack([site.max, -site.min])).to(q.device)
    reached = torch.stack([held, *(x.amax((1, 3)) for x in sure)]).amax(0)  # (2, H)
    floor = site.top.threshold
    lengths = torch.cat([x.amax(0).flatten() for x in sure])  # each of a different logit
    if 0 < site.top.rank <= len(lengths):
        floor = max(floor, float(torch.topk(lengths, site.top.rank).values[-1]))
    places, spans = [], []
    for run, bound in zip(runs, bounds, strict=True):
        most = bound.largest + bound.above  # (2, b, H, n)
        wanted = (most >= reached[:, None, :, None]).any(0) | (most.amax(0) >= floor)
        b, h, n = wanted.nonzero().cpu().numpy().T
        stop = np.minimum(run.shared + 1 + n, run.stop)
        spans.append(np.stack([np.full_like(stop, run.start), stop], 1))
        places.append(np.stack([np.array(run.batch)[b], h, run.first + n], 1))
    if sum(map(len, places)) > max(FEW, len(lengths) // 8):
        return None
    return floor, np.concatenate(places), np.concatenate(spans)
