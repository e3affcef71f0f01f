"""Measures of each row of attention maps, by blocks of rows, in plain torch on any device.

A block of logits is turned into weights, measured and dropped; only a few numbers per row are kept,
so that memory grows with the length and not with its square.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from quantdiff.statistics.blocks import GPU_SHIFT
from quantdiff.statistics.precision import exact_product
from quantdiff.statistics.streaming import NonFiniteError
from quantdiff.statistics.visible import Visible

__all__ = ["BLOCK_ELEMENTS", "Pairs", "Rows", "Spans", "map_rows"]

BLOCK_ELEMENTS = 1 << 19  # weights per block; about eight blocks exist at a time

# Stands for −inf where a key is hidden: 0 · HIDDEN is 0, and infinite logits stay distinguishable.
HIDDEN = torch.finfo(torch.float32).min
TINY = torch.finfo(torch.float32).tiny

# By name, each (h, n) for h maps and n rows, fp32 unless stated otherwise:
#   visible        keys that the row sees; 0 for a row that does not count
#   total, mass    Σw and Σ|w|
#   negative       entries w < 0, and negative_mass = Σ|w| over them
#   first          w on the first token; alone, bool: it is the only key that the row sees
#   entropy        −Σ p ln p, p = |w| / Σ|w|; 0 where all weights are 0
#   norm           ‖w‖₂
#   span, span_abs Σw and Σ|w| on the span; NaN in all rows but the span row
#   cosine         (n,), mean cosine similarity of two maps' rows; NaN where there is none
Rows = dict[str, Tensor]
Spans = Sequence[tuple[int, int] | None]


@dataclass(eq=False)
class Pairs:
    """The maps of differential heads: softmax of `first` − λ · softmax of `second`.

    Attributes:
        first, second: heads of map 1 and map 2, pair by pair.
        lam: λ, (B, h, N, 1) fp32.
    """

    first: list[int]
    second: list[int]
    lam: Tensor


@dataclass(eq=False)
class _Keys:
    """Which keys the n rows of a block see: columns m of the block, for 1 or H heads.

    Attributes:
        seen: (1 or H, n, m) bool if there is a mask, else None.
        visible: (1 or H, n) fp32, number of keys seen.
        first: (1 or H, n) bool, whether the first token is seen.
        column: column of the first token in the block, or None if it lies outside.
        span: (row of the block, first column, last + 1) if the block holds a span row.
    """

    seen: Tensor | None
    visible: Tensor
    first: Tensor
    column: int | None
    span: tuple[int, int, int] | None

    def of_pairs(self, first: list[int], second: list[int]) -> "_Keys":
        """Keys that a difference sees: those that either map sees, in rows where both see one."""
        if len(self.visible) == 1 or self.seen is None:
            return self
        seen = self.seen[first] | self.seen[second]  # (h, n, m)
        both = (self.visible[first] > 0) & (self.visible[second] > 0)  # (h, n)
        return _Keys(
            seen,
            torch.where(both, seen.sum(-1, dtype=torch.float32), 0.0),
            self.first[first],  # matters only if one key is seen, then by both maps
            self.column,
            self.span,
        )


def map_rows(
    q: Tensor,
    k: Tensor,
    scale: float,
    visible: Visible,
    sequence: int,
    *,
    pairs: Pairs | None,
    softcap: float | None,
    bias: Callable[[int, int], Tensor] | None,
    sink: Tensor | None,
    zero: int,
    span: tuple[int, int] | None,
    span_row: int,
) -> Iterator[dict[str, Rows]]:
    """Measure the rows of one sequence that count, by kind of map.

    Args:
        q: (H, N, D) fp32; k: (G, M, D) fp32, H a multiple of G.
        sequence: its index in the batch, for arguments with a batch dimension.
        zero, span, span_row: of this sequence, as in `maps.measure_maps`.
        scale, visible, pairs, softcap, bias, sink: of the batch, as there.

    Raises:
        NonFiniteError: a NaN or an infinity among the logits that count, the sinks or λ.
    """
    heads, rows, _ = q.shape
    block = BLOCK_ELEMENTS if q.device.type == "cpu" else BLOCK_ELEMENTS << GPU_SHIFT
    step = max(1, block // (heads * k.shape[1]))
    starts, stops = visible.start[sequence].cpu(), visible.stop[sequence].cpu()  # (N,)
    for first in range(0, rows, step):
        last = min(first + step, rows)
        counted = (stops[first:last] > starts[first:last]).nonzero()[:, 0]  # (n,)
        if not len(counted):
            continue
        start, stop = starts[first:last][counted], stops[first:last][counted]  # (n,)
        low, high = int(start.min()), int(stop.max())
        taken = counted.to(q.device)
        s = _logits(q[:, first:last][:, taken], k[:, low:high]) * scale  # (H, n, m)
        if softcap is not None:
            s = torch.tanh(s / softcap) * softcap
        if bias is not None:
            s = s + _of_sequence(bias(first, last), sequence).to(s)[:, taken, low:high]
        extra = visible.mask_rows(first, last)
        if extra is not None:
            extra = _of_sequence(extra, sequence).to(q.device)[:, taken, low:high]
        keys = _hide(s, start, stop, low, extra, zero)
        if span is not None:
            begin, end = (min(max(column - low, 0), high - low) for column in span)
            for row in (counted == span_row - first).nonzero()[:, 0].tolist():
                keys.span = (row, begin, end)
        lam = None if pairs is None else pairs.lam[sequence, :, first:last][:, taken]  # (h, n, 1)
        yield _measure(s, keys, sink, pairs, lam)


def _of_sequence(x: Tensor, sequence: int) -> Tensor:
    """(1 or H, n, M) of x (B or 1, 1 or H, n, M)."""
    return x[sequence if len(x) > 1 else 0]


def _logits(q: Tensor, k: Tensor) -> Tensor:
    """(H, n, m) of q (H, n, D) and k (G, m, D) in true fp32, without repeating the keys."""
    grouped = q.reshape(len(k), -1, q.shape[-1])  # (G, H/G · n, D)
    return exact_product(grouped, k).view(q.shape[0], q.shape[1], -1)


def _hide(
    s: Tensor, start: Tensor, stop: Tensor, low: int, extra: Tensor | None, zero: int
) -> _Keys:
    """Hide keys of a block s (H, n, m) that rows may not attend, in place; start, stop: (n,)."""
    width = s.shape[-1]
    inside = 0 <= zero - low < width
    column = zero - low if inside else None
    first = ((start <= zero) & (stop > zero))[None].to(s.device)  # (1, n)
    left, right = int(start.max()) - low, int(stop.min()) - low
    begin, end = start.to(s.device)[:, None] - low, stop.to(s.device)[:, None] - low  # (n, 1)
    columns = torch.arange(width, device=s.device)
    if extra is not None:
        seen = extra & (columns >= begin) & (columns < end)  # (1 or H, n, m)
        s.masked_fill_(~seen, HIDDEN)
        none = torch.zeros_like(seen[..., 0])
        first = none if column is None else first & seen[..., column]
        return _Keys(seen, seen.sum(-1, dtype=torch.float32), first, column, None)
    # Between the last start and the first stop every row sees every key.
    left = min(left, width)
    for edge in (slice(0, left), slice(max(left, right), width)):
        here = columns[edge]
        if len(here):
            s[..., edge].masked_fill_((here < begin) | (here >= end), HIDDEN)
    return _Keys(None, (end - begin).float().T, first, column, None)


def _measure(
    s: Tensor, keys: _Keys, sink: Tensor | None, pairs: Pairs | None, lam: Tensor | None
) -> dict[str, Rows]:
    """Measure the rows of a block of logits s (H, n, m), which is overwritten, by kind of map."""
    low, high = s.amin(-1), s.amax(-1)  # (H, n)
    # Written so that NaN fails the comparison; −inf lies below HIDDEN.
    bad = ~((low >= HIDDEN) & (high < torch.inf)).all(-1)
    if sink is not None:
        bad |= ~(sink < torch.inf)
        high = torch.maximum(high, sink[:, None])
    if bad.any():
        raise NonFiniteError(int(bad.nonzero()[0]))
    t = s.sub_(high[..., None])  # (H, n, m)
    w = t.exp()
    keys_part = w.sum(-1)  # (H, n)
    z = keys_part if sink is None else keys_part + torch.exp(sink[:, None] - high)
    w *= (1 / z)[..., None]  # z is 1 or more: its largest term is e⁰
    total = w.sum(-1)
    none = torch.zeros_like(total)
    # −Σ p ln p with p = e^t / Σe^t, which excludes a sink.
    entropy = keys_part.clamp(min=TINY).log() - (w * t).sum(-1) / total.clamp(min=TINY)
    softmax = {
        "total": total,
        "mass": total,
        "negative": none,
        "negative_mass": none,
        "entropy": torch.where(total > 0, entropy, 0.0),
        **_places(w, w, keys),
    }
    if pairs is None or lam is None:
        return {"softmax": softmax | {"cosine": _cosine(w, softmax)}}
    measured = {}
    for kind, branch in (("branch 1", pairs.first), ("branch 2", pairs.second)):
        index = sorted(set(branch))
        part = {name: values[index] for name, values in softmax.items()}
        measured[kind] = part | {"cosine": _cosine(w[index], part)}
    wrong = ~lam.isfinite().flatten(1).all(1)
    if wrong.any():
        raise NonFiniteError(pairs.first[int(wrong.nonzero()[0])])
    # Where both weights underflow, their logarithms still show which is larger.
    gap = z[pairs.first].log() - z[pairs.second].log() + lam[..., 0].log()  # (h, n)
    negative = t[pairs.first] < t[pairs.second] + gap[..., None]  # (h, n, m)
    d = w[pairs.first] - lam * w[pairs.second]  # (h, n, m)
    magnitude = d.abs()
    mass = magnitude.sum(-1)  # (h, n)
    spread = (magnitude * magnitude.clamp(min=TINY).log()).sum(-1)
    entropy = mass.clamp(min=TINY).log() - spread / mass.clamp(min=TINY)
    difference = {
        "total": d.sum(-1),
        "mass": mass,
        "negative": negative.float().sum(-1),
        "negative_mass": -d.clamp(max=0).sum(-1),
        "entropy": torch.where(mass > 0, entropy, 0.0),
        **_places(d, magnitude, keys.of_pairs(pairs.first, pairs.second)),
    }
    return measured | {"difference": difference | {"cosine": _cosine(d, difference)}}


def _places(w: Tensor, magnitude: Tensor, keys: _Keys) -> Rows:
    """Weights w (h, n, m) on the first token and on the span, number of keys seen, and norm."""
    shape = w.shape[:2]
    span = torch.full((2, *shape), torch.nan, device=w.device)
    if keys.span is not None:
        row, begin, end = keys.span
        for i, x in enumerate((w, magnitude)):
            span[i, :, row] = x[:, row, begin:end].sum(-1)
    first = torch.zeros(shape, device=w.device)
    return {
        "visible": keys.visible.expand(shape),
        "first": first if keys.column is None else w[..., keys.column].clone(),
        "alone": ((keys.visible == 1) & keys.first).expand(shape),
        # A plain sum, which torch adds up pairwise; a vector norm would be summed in order.
        "norm": (w * w).sum(-1).sqrt(),
        "span": span[0],
        "span_abs": span[1],
    }


def _cosine(w: Tensor, rows: Rows) -> Tensor:
    """Mean cosine similarity of two maps' rows, (n,): (‖Σŵ‖² − h) / (h(h − 1)), ŵ = w / ‖w‖."""
    heads, norm = len(w), rows["norm"]  # (h, n)
    usable = ((rows["visible"] >= 2) & (norm > 0)).all(0)
    if heads < 2:
        usable = torch.zeros_like(usable)
    unit = w * (1 / norm)[..., None]  # (h, n, m)
    mean = (unit.sum(0).square().sum(-1) - heads) / max(heads * (heads - 1), 1)
    return torch.where(usable, mean, torch.nan)
