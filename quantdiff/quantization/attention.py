"""Attention over fake-quantized logits, in blocks of query rows: never an n×n tensor.

Each block's logits are computed in fp32 (fp64 for fp64), rounded to their grid, passed through
softmax and multiplied with the values; the weights may be rounded too. Gradients are
straight-through: rounded values pass them on, clipped ones do not. The backward pass recomputes
each block.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from quantdiff.quantization import native
from quantdiff.quantization.grid import Grid, NoGridError
from quantdiff.quantization.in_place import beyond, may_clip, of_heads, rounded, row_extremes
from quantdiff.quantization.newest import Met, Newest
from quantdiff.quantization.softmax import Softmax
from quantdiff.statistics.precision import true_fp32

__all__ = ["attend"]

BLOCK_ELEMENTS = 1 << 19  # logits per block on a CPU; a GPU takes 32 times as many


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax: Softmax,
    sinks: Tensor | None = None,
    newest_keys: Newest | None = None,
    newest_values: Newest | None = None,
) -> Tensor:
    """softmax(quantized logits)·v.

    Args:
        q: (B, H, N, D); k: (B, G, M, D), query head h reading key head h // (H/G).
        v: (B, G', M, w), query head h reading value head h // (H/G').
        softmax: what happens in between.
        sinks: (H,) learned logits without a key, which are not quantized; or None.
        newest_keys, newest_values: those that replace k and v among each query's newest tokens.

    Returns:
        (B, H, N, w) in v's dtype; zeros in rows that may attend nothing.

    Raises:
        NoGridError: the range of a row with its own grid, or a logit that a static range may clip,
            is not finite.
    """
    learned = None
    if softmax.bias is not None and torch.is_grad_enabled() and softmax.bias(0, 1).requires_grad:
        learned = softmax.bias(0, q.shape[2])  # (B or 1, H or 1, N, M)
    first = newest_keys and newest_keys.first, newest_values and newest_values.first
    out: Tensor = _Attend.apply(  # type: ignore[no-untyped-call]
        q, k, v, sinks, newest_keys and newest_keys.exact, newest_values and newest_values.exact,
        learned, first, softmax,
    )  # fmt: skip
    return out


@dataclasses.dataclass(eq=False)
class _Block:
    """One block of rows of a sequence.

    Attributes:
        rows: of the queries.
        keys: m, the end of the keys that any of them sees.
        weights: (H, n, m), the softmax, rounded if the maps are quantized.
        plain: the unrounded softmax, where the gradient needs it; else None.
        slope: derivative of the soft cap, (H, n, m), or None for 1 everywhere.
        inside: which logits were not clipped, (H, n, m) bool, or None for all.
    """

    rows: slice
    keys: int
    weights: Tensor
    plain: Tensor | None
    slope: Tensor | None
    inside: Tensor | None


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
        exact_k: Tensor | None,
        exact_v: Tensor | None,
        learned: Tensor | None,
        first: tuple[Tensor | None, Tensor | None],
        softmax: Softmax,
    ) -> Tensor:
        with torch.autocast(q.device.type, enabled=False):
            upper = torch.float64 if q.dtype == torch.float64 else torch.float32
            out = torch.zeros(*q.shape[:3], v.shape[-1], dtype=upper, device=q.device)
            for b in range(len(q)):
                keys = Met.of(b, k, exact_k, first[0], upper)
                values = Met.of(b, v, exact_v, first[1], upper)
                for block in _blocks(q[b], keys, b, softmax, sinks, slopes=False):
                    out[b, :, block.rows] = values.weighed(block.weights, block.rows)
        ctx.save_for_backward(q, k, v, sinks, exact_k, exact_v, learned, out)
        ctx.softmax, ctx.first = softmax, first
        return out.to(v.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        q, k, v, sinks, exact_k, exact_v, learned, out = ctx.saved_tensors
        upper, first = out.dtype, ctx.first
        with torch.autocast(q.device.type, enabled=False):
            of_out = gradients[0].to(upper)
            of_q, of_k, of_v = (torch.zeros_like(x, dtype=upper) for x in (q, k, v))
            of_sinks, of_exact_k, of_exact_v, of_bias = (
                None if x is None else torch.zeros(x.shape, dtype=upper, device=x.device)
                for x in (sinks, exact_k, exact_v, learned)
            )
            for b in range(len(q)):
                query = q[b].to(upper)
                keys = Met.of(b, k, exact_k, first[0], upper)
                values = Met.of(b, v, exact_v, first[1], upper)
                # Views, into which the gradients are added.
                of_keys = Met.of(b, of_k, of_exact_k, first[0], upper)
                of_values = Met.of(b, of_v, of_exact_v, first[1], upper)
                for block in _blocks(q[b], keys, b, ctx.softmax, sinks, slopes=True):
                    rows, p = block.rows, block.weights
                    g = of_out[b, :, rows]  # (H, n, w)
                    values.add_gradients(of_values, p, g, rows)
                    of_p = values.against(g, rows, block.keys)  # (H, n, m)
                    if block.plain is None:
                        mean = (g * out[b, :, rows]).sum(-1, keepdim=True)  # Σ p·∂p
                    else:
                        p = block.plain
                        mean = (p * of_p).sum(-1, keepdim=True)
                    of_s = p * (of_p - mean)
                    if of_sinks is not None:
                        of_sinks -= ((1 - p.sum(-1, keepdim=True)) * mean).sum((1, 2))
                    if block.inside is not None:
                        of_s = of_s * block.inside
                    if of_bias is not None:
                        own = of_bias[b if len(of_bias) > 1 else 0, :, rows, : block.keys]
                        own += of_s if len(own) > 1 else of_s.sum(0, keepdim=True)
                    if block.slope is not None:
                        of_s = of_s * block.slope
                    of_s = of_s * ctx.softmax.scale
                    of_q[b, :, rows] = keys.weighed(of_s, rows)
                    keys.add_gradients(of_keys, of_s, query[:, rows], rows)
        given = (of_q.to(q.dtype), of_k.to(k.dtype), of_v.to(v.dtype))
        pairs = (
            (of_sinks, sinks), (of_exact_k, exact_k), (of_exact_v, exact_v), (of_bias, learned),
        )  # fmt: skip
        more = (None if found is None else found.to(x.dtype) for found, x in pairs)
        return *given, *more, None, None


def _blocks(
    q: Tensor, k: Met, b: int, softmax: Softmax, sinks: Tensor | None, *, slopes: bool
) -> Iterator[_Block]:
    """The blocks of sequence b; q: (H, N, D), k: its keys, (G, M, D)."""
    heads, rows, _ = q.shape
    upper, columns = k.rounded.dtype, k.rounded.shape[1]
    maps = _map_grid(q, k, b, softmax, sinks)
    q = q.to(upper)
    scale = softmax.scale
    if math.frexp(scale)[0] == 0.5:  # a power of two: multiplying q by it is exact
        q, scale = q * scale, 1.0
    visible = softmax.visible
    start, stop = visible.start[b].to(q.device), visible.stop[b].to(q.device)
    budget = BLOCK_ELEMENTS if q.device.type == "cpu" else BLOCK_ELEMENTS << 5
    step = max(1, min(rows, budget // (heads * columns)))
    grid = softmax.grid
    if isinstance(grid, Grid):
        own = b if len(grid.step) > 1 else 0
        grid = Grid(grid.step[own], grid.zero[own], grid.low, grid.high)  # (H, 1, 1)
    ends = stop.split(step)
    # Reused by all blocks: freeing and reallocating memory costs page faults.
    room = [torch.empty(heads * step * columns, dtype=upper, device=q.device) for _ in range(2)]
    lasts = torch.stack([part.max() for part in ends]).tolist()
    firsts = torch.stack([part.min() for part in ends]).tolist()
    latest = torch.stack([part.max() for part in start.split(step)]).tolist()
    for number, first in enumerate(range(0, rows, step)):
        last, keys = min(first + step, rows), lasts[number]
        if keys <= 0:
            continue
        with true_fp32():
            s = k.against(q[:, first:last], slice(first, last), keys, room[0])  # (H, n, m)
        if scale != 1:
            s.mul_(scale)
        slope = inside = None
        if softmax.softcap is not None:
            s = torch.tanh(s.div_(softmax.softcap))
            slope = 1 - s.square() if slopes else None
            s.mul_(softmax.softcap)
        if softmax.bias is not None:
            added = softmax.bias(first, last)
            s += added[b if len(added) > 1 else 0, :, :, :keys].to(upper)
        extra = visible.mask_rows(first, last)
        plain_rows = extra is None and not slopes and softmax.heads is None
        if grid is not None and plain_rows and _compiled(s):
            clipped = native.round_rows(
                s, start[first:last], stop[first:last], grid, clips=softmax.clips
            )
            if softmax.clipped is not None:
                softmax.clipped[:] += clipped
            weights = _weights(s, sinks, room[1])
            if maps is not None:
                weights = maps(weights)
            yield _Block(slice(first, last), keys, weights, None, None, None)
            continue
        seen = None
        if extra is not None or firsts[number] < keys or latest[number] > 0:
            column = torch.arange(keys, device=q.device)
            seen = (column >= start[first:last, None]) & (column < stop[first:last, None])  # (n, m)
            if extra is not None:
                seen = seen & extra[b if len(extra) > 1 else 0, :, :, :keys]
        if grid is not None:
            here = grid if isinstance(grid, Grid) else grid.of(*row_extremes(s, seen))
            if softmax.clips and slopes:  # the forward has already checked the same logits
                inside = ~beyond(s, here, softmax.heads)
            elif softmax.clips and not bool(
                torch.isfinite(torch.cat(row_extremes(s, seen))).all()
            ):  # clamping would make them finite
                raise NoGridError("NaN or infinity has no place on a grid")
            if softmax.clipped is not None and not slopes and may_clip(here, softmax.clips):
                outside = beyond(s, here, softmax.heads)
                outside = outside if seen is None else outside & seen
                softmax.clipped[:] += outside.sum((1, 2)).cpu().numpy()
            rounding = functools.partial(rounded, grid=here, clips=softmax.clips)
            s = of_heads(s, softmax.heads, rounding)
        if seen is not None:
            s.masked_fill_(~seen, -torch.inf)
        weights, plain = _weights(s, sinks, room[1]), None
        if maps is not None:
            plain = weights.clone() if slopes else None
            weights = maps(weights)
        yield _Block(slice(first, last), keys, weights, plain, slope, inside)


def _map_grid(
    q: Tensor, k: Met, b: int, softmax: Softmax, sinks: Tensor | None
) -> Callable[[Tensor], Tensor] | None:
    """A function rounding sequence b's weights in place, to a grid from zero to their largest."""
    scheme = softmax.maps
    if scheme is None:
        return None
    high = 2**scheme.bits - 1
    peaks: Tensor | None = None
    if scheme.granularity != "row":
        peaks = torch.zeros(len(q), 1, 1, device=q.device)
        before = dataclasses.replace(softmax, maps=None, clipped=None)
        for block in _blocks(q, k, b, before, sinks, slopes=False):
            peaks = torch.maximum(peaks, block.weights.amax((1, 2), keepdim=True))
        if scheme.granularity == "tensor":
            peaks = peaks.amax(0, keepdim=True)

    def on_grid(weights: Tensor) -> Tensor:
        most = weights.amax(-1, keepdim=True) if peaks is None else peaks
        step = Grid.of(torch.zeros_like(most), most, scheme.bits, False).step
        return weights.div_(step).round_().clamp_(max=high).mul_(step)

    return lambda weights: of_heads(weights, softmax.map_heads, on_grid)


def _compiled(s: Tensor) -> bool:
    return s.device.type == "cpu" and s.dtype == torch.float32 and native.available()


def _weights(s: Tensor, sinks: Tensor | None, room: Tensor) -> Tensor:
    """Softmax over the keys, in `room` where possible; zeros in a row of −inf."""
    if sinks is not None:
        column = sinks.to(s.dtype)[:, None, None].expand(*s.shape[:2], 1)
        return torch.cat([s, column], -1).softmax(-1)[..., :-1]
    weights = torch.softmax(s, -1, out=room[: s.numel()].view(s.shape))
    # A row that sees nothing is NaN; checking its first weight is enough.
    if bool(weights[..., 0].isnan().any()):
        blind = (s == -torch.inf).all(-1, keepdim=True)
        weights.masked_fill_(blind, 0.0)
    return weights
