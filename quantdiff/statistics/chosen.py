"""Logits of a few chosen queries, computed in fp32."""

from collections.abc import Iterator

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quantdiff.statistics.blocks import Part, Sieve, block_part, nothing
from quantdiff.statistics.precision import exact_product

__all__ = ["chosen_logits"]

TILE = 8  # queries of one head that share a product
GATHERED = 1 << 24  # key elements copied for it at a time: 64 MiB

_NO_UNIT = np.zeros(0, np.float32)


def chosen_logits(
    q: Tensor,
    k: Tensor,
    scale: float,
    places: NDArray[np.int64],
    spans: NDArray[np.int64],
    sieve: Sieve,
) -> Iterator[Part]:
    """Parts with extremes and large magnitudes of some queries' logits q·kᵀ·scale, without counts.

    Args:
        q: (B, H, N, D), any floating dtype; products are computed in fp32 from the given values.
        k: (B, G, M, D), H a multiple of G; query head h uses key head h // (H / G).
        scale: factor of q·kᵀ.
        places: (c, 3) of (sequence, head, query), all different.
        spans: (c, 2); the query sees the keys spans[:, 0] ≤ m < spans[:, 1].
        sieve: decides which magnitudes are large.
    """
    if not len(places):
        return
    batch, heads, _, width = q.shape
    order = np.lexsort(places.T[::-1])
    places, spans = places[order], spans[order]
    group = places[:, 0] * heads + places[:, 1]  # (c,)
    begins = np.flatnonzero(np.diff(group, prepend=-1))
    within = np.arange(len(group)) - np.repeat(begins, np.diff(begins, append=len(group)))
    fresh = within % TILE == 0
    groups = group[fresh]  # (tiles,)
    rows, starts, stops = np.zeros((3, len(groups), TILE), np.int64)  # slots left at 0 see nothing
    slot = np.cumsum(fresh) - 1, within % TILE
    rows[slot], starts[slot], stops[slot] = places[:, 2], spans[:, 0], spans[:, 1]
    low = int(spans[:, 0].min())
    step = max(1, GATHERED // ((int(spans[:, 1].max()) - low) * width))
    for first in range(0, len(groups), step):
        some = slice(first, first + step)
        here, row, high = groups[some], rows[some], int(stops[some].max())
        b, h, n, start, stop = (
            torch.from_numpy(x).to(q.device)
            for x in (here // heads, here % heads, row, starts[some], stops[some])
        )
        queries = q[b[:, None], h[:, None], n].float()  # (t, TILE, D)
        keys = k[b, h // (heads // k.shape[1]), low:high].float()  # (t, m, D)
        s = exact_product(queries, keys) * scale  # (t, TILE, m)
        column = torch.arange(low, high, device=q.device)
        seen = (column >= start[..., None]) & (column < stop[..., None])
        part = block_part(s, seen, _NO_UNIT, None, sieve)
        whole = nothing(batch * heads)
        np.minimum.at(whole["min"], here, part.partial["min"])
        np.maximum.at(whole["max"], here, part.partial["max"])
        np.maximum.at(whole["bad"], here, part.partial["bad"])
        items, tile = part.items, part.items["head"].copy()
        items["row"] = row[tile, items["row"]]
        items["batch"], items["head"] = here[tile] // heads, here[tile] % heads
        items["column"] += low
        yield Part(whole, None, 0, items, 0)
