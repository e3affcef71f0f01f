"""Measures of attention maps, the softmax weights, in one pass and without an n×n tensor.

`MAP_DEFINITIONS` defines each measure. `map_rows.py` measures rows, block by block, and
`map_statistics.py` keeps sums and extremes over them.
"""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from quantdiff.statistics.map_rows import Pairs, Rows, Spans, map_rows
from quantdiff.statistics.map_statistics import MapStatistics
from quantdiff.statistics.visible import Visible

__all__ = ["MAP_DEFINITIONS", "MapStatistics", "measure_maps"]

MAP_DEFINITIONS = {
    "map": (
        "the weights w of one query over the n keys that it sees: softmax of the logits (capped "
        "and biased as in the model; a learned sink takes a share without being a key), or softmax "
        "1 − λ·softmax 2 of a differential head; a row is one query of one head; means are over "
        "rows, and only rows of real queries that see a key count"
    ),
    "rows": "rows counted",
    "weights": "visible entries counted, over all rows",
    "row_sum": (
        "mean, minimum and maximum of Σw: 1 for softmax, less beside a learned sink, 1 − λ for a "
        "difference"
    ),
    "negative_share": "entries w < 0 / visible entries",
    "negative_mass": "mean of Σ|w| over the entries w < 0",
    "sink": (
        "mean of w on the sequence's first token, signed; over the sink rows: all rows but those "
        "whose only visible key is the first token; a row that cannot see it (sliding window, "
        "mask) counts with 0"
    ),
    "sink_share": "mean over the sink rows of |w on the first token| / Σ|w|, 0 where Σ|w| is 0",
    "sink_rows": "rows counted in sink and sink_share",
    "entropy": "mean of −Σ p ln p in nats, p = |w| / Σ|w|; 0 where Σ|w| is 0",
    "context_rms": (
        "‖w‖₂ of a row, the RMS of the output for independent values of unit RMS: minimum, median "
        "(to 0.5 %) and maximum; softmax: in [1/√n, 1], in (0, 1) beside a learned sink"
    ),
    "context_rms_scaled": (
        "minimum of ‖w‖₂·√n; 1 or more for softmax, less only for a difference or beside a learned "
        "sink"
    ),
    "norm_gain": (
        "1 / context_rms, of differences: by how much an RMS norm over the head's output amplifies "
        "output and gradient, for values of unit RMS and without the norm's ε; null where a row's "
        "weights are all 0"
    ),
    "similarity": (
        "of a layer and kind: mean pairwise cosine similarity of the heads' rows for one query, "
        "over the visible keys, (‖Σŵ‖² − h) / (h(h − 1)) with ŵ = w / ‖w‖ and h heads; mean over "
        "the queries for which every head sees two keys or more and has a weight other than 0; "
        "null for one head"
    ),
    "span_mass": "mean of Σw over the span's keys, at the span row of each sequence that has one",
    "rest_mass": "the same over all other visible keys",
    "span_share": "mean of Σ|w| over the span's keys / Σ|w| at the span row, 0 where Σ|w| is 0",
    "span_rows": "span rows counted",
}


@torch.no_grad()
def measure_maps(
    q: Tensor,
    k: Tensor,
    scale: float,
    visible: Visible,
    sites: Mapping[str, MapStatistics],
    *,
    lam: float | Tensor | None = None,
    first: Sequence[int] | None = None,
    second: Sequence[int] | None = None,
    softcap: float | None = None,
    bias: Callable[[int, int], Tensor] | None = None,
    sink: Tensor | None = None,
    key_zero: Tensor | None = None,
    spans: Spans | None = None,
    span_rows: Tensor | None = None,
) -> None:
    """Add the maps softmax(softcap(q·kᵀ·scale) + bias) to the statistics kept of them.

    Blocks of rows are computed in fp32 and summed in fp64; memory grows with N and M, never with
    their product. Which of the two weights of a difference is larger is decided by their
    logarithms, so that the sign is right even if they underflow.

    Args:
        q: (B, H, N, D), any floating dtype and device, heads in the order of the projection.
        k: (B, G, M, D), H a multiple of G; query head h uses key head h // (H / G). For layouts
            that pair heads otherwise, such as those whose maps have their own keys, pass the keys
            head by head: (B, H, M, D).
        scale: factor of q·kᵀ.
        visible: what may be attended. Queries that do not count, and rows whose mask leaves no
            key, are ignored. With one mask per head, a difference sees what either map sees, in
            rows where both see something.
        sites: statistics to add to. For standard heads `softmax`, with heads 0 … H − 1; for
            differential ones `branch 1` and `branch 2`, with the heads of `first` and of `second`,
            each once and in increasing order, and `difference`, with `first`.
        lam: λ, a number, or broadcastable to (B, h, N, 1) for h pairs; None for standard heads.
        first, second: heads of map 1 and map 2, pair by pair; a head may be in many pairs.
        softcap: c of c·tanh(x / c), or None.
        bias: (first row, last row + 1) → (B or 1, H or 1, rows, M), added after the cap.
        sink: (H,) learned logits that take a share of the softmax without a key: rows then sum to
            less than 1.
        key_zero: (B,) int, key index of each sequence's first token; None means 0.
        spans: for each sequence (first key, last key + 1), or None.
        span_rows: (B,) int, the query row at which a span's mass is taken, −1 for none; a row that
            does not count is ignored.

    Raises:
        NonFiniteError: a NaN or an infinity among the logits that count, the sinks or λ, with the
            head; nothing was added.
        ValueError: heads that do not divide, or arguments that do not fit together.
    """
    batch, heads, rows, _ = q.shape
    if heads % k.shape[1]:
        raise ValueError(f"{heads} query heads do not divide into {k.shape[1]} key heads")
    pairs = _pairs(lam, first, second, (batch, rows), q.device)
    _check_sites(sites, heads, pairs)
    zeros = [0] * batch if key_zero is None else key_zero.tolist()
    at = [-1] * batch if span_rows is None else span_rows.tolist()
    ends: Spans = [None] * batch if spans is None else spans
    if (spans is None) != (span_rows is None):
        raise ValueError("spans and span_rows are given together or not at all")
    if {len(zeros), len(at), len(ends)} != {batch}:
        raise ValueError(f"key_zero, spans and span_rows have one entry per sequence, {batch}")
    for span in ends:
        if span is not None and not 0 <= span[0] < span[1] <= k.shape[2]:
            raise ValueError(f"{span} is no span of {k.shape[2]} keys")
    if not q.numel() or not k.numel():
        return
    sink = None if sink is None else sink.to(q.device).float()
    fresh = {
        kind: MapStatistics.empty(site.name, site.layer, kind, site.heads)
        for kind, site in sites.items()
    }
    for b in range(batch):
        parts: dict[str, list[Rows]] = {kind: [] for kind in sites}
        with torch.autocast(q.device.type, enabled=False):
            blocks = map_rows(
                q[b].float(), k[b].float(), scale, visible, b, pairs=pairs, softcap=softcap,
                bias=bias, sink=sink, zero=zeros[b], span=ends[b], span_row=at[b],
            )  # fmt: skip
            for block in blocks:
                for kind, measured in block.items():
                    parts[kind].append(measured)
        for kind, measured_rows in parts.items():
            if measured_rows:
                fresh[kind].add({
                    name: torch.cat([part[name] for part in measured_rows], -1).cpu().numpy()
                    for name in measured_rows[0]
                })  # fmt: skip
    for kind, site in sites.items():
        site.merge(fresh[kind])


def _pairs(
    lam: float | Tensor | None,
    first: Sequence[int] | None,
    second: Sequence[int] | None,
    shape: tuple[int, int],
    device: torch.device,
) -> Pairs | None:
    """The pairs of differential heads with their λ as (B, h, N, 1), shape: (B, N)."""
    if lam is None and first is None and second is None:
        return None
    if lam is None or first is None or second is None or len(first) != len(second):
        raise ValueError("lam, first and second are given together, first and second pair by pair")
    full = (shape[0], len(first), shape[1], 1)
    value = torch.as_tensor(lam, dtype=torch.float32, device=device)
    try:
        return Pairs(list(first), list(second), value.expand(full))
    except RuntimeError:
        raise ValueError(f"λ of shape {tuple(value.shape)} does not broadcast to {full}") from None


def _check_sites(sites: Mapping[str, MapStatistics], heads: int, pairs: Pairs | None) -> None:
    """Refuse sites that do not match these heads."""
    if pairs is None:
        expected = {"softmax": list(range(heads))}
    else:
        expected = {
            "branch 1": sorted(set(pairs.first)),
            "branch 2": sorted(set(pairs.second)),
            "difference": pairs.first,
        }
        if not 0 <= min(pairs.first + pairs.second) <= max(pairs.first + pairs.second) < heads:
            raise ValueError(f"pairs of heads that are not among the {heads} query heads")
    found = {kind: site.heads for kind, site in sites.items() if site.kind == kind}
    if found != expected or len(found) != len(sites):
        raise ValueError(f"sites of maps and heads {found}, not {expected}")
