"""Statistics of attention logits and plain tensors in one pass, block by block.

The logits never exist as a whole: a block of query rows is multiplied with the keys it may attend,
counted and dropped. On a CPU, compiled kernels are used if they were built; elsewhere, and for
capped or biased logits, plain torch is used.
"""

from collections.abc import Callable, Iterator

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quantdiff.statistics import native
from quantdiff.statistics.blocks import (
    BLOCK_ELEMENTS,
    Part,
    nothing,
    torch_logits,
    torch_values,
    unit_of,
)
from quantdiff.statistics.lasting import lasting_zeros
from quantdiff.statistics.lse import lse_logits
from quantdiff.statistics.moments import Moments
from quantdiff.statistics.site import SiteStatistics
from quantdiff.statistics.visible import Visible

__all__ = ["NonFiniteError", "logit_extremes", "measure_logits", "measure_values"]

_BINS = native.BINS


class NonFiniteError(ValueError):
    """A NaN or an infinity among the values; `group` is the head."""

    def __init__(self, group: int) -> None:
        super().__init__(f"NaN or infinity in group {group}")
        self.group = group


@torch.no_grad()
def measure_logits(
    q: Tensor,
    k: Tensor,
    scale: float,
    visible: Visible,
    site: SiteStatistics,
    locate: Callable[[NDArray[np.int64]], NDArray[np.int64]],
    *,
    softcap: float | None = None,
    bias: Callable[[int, int], Tensor] | None = None,
    compiled: bool = True,
    log_sum_exp: bool | None = None,
) -> None:
    """Add the logits softcap(q·kᵀ·scale) + bias to a site's statistics.

    Args:
        q: (B, H, N, D), any floating dtype; products and sums are fp32 of the given values.
        k: (B, G, M, D), or (1, G, M, D) for all sequences; H a multiple of G: query head h uses key
            head h // (H / G).
        scale: factor of q·kᵀ.
        visible: what may be attended.
        site: statistics of H groups to add to, with moments and histogram if it has them.
        locate: maps (n, 4) int64 of (head, batch, query row, key) to the coordinates of
            `site.top`; must keep the order.
        softcap: c of c·tanh(x / c), or None.
        bias: (first row, last row + 1) → (B or 1, H or 1, rows, M), added after the cap.
        compiled: False selects the plain torch path.
        log_sum_exp: whether to find extremes from a flash kernel's log-sum-exp; None means only
            on a CUDA GPU, for a site without moments, if a kernel supports the call.

    Raises:
        NonFiniteError: a NaN or an infinity among the logits that count; nothing was added.
        ValueError: queries and keys that do not fit together, or `log_sum_exp` where impossible.
    """
    k = _keys_of_all(q, k)
    if not q.numel() or not k.numel():
        return
    with torch.autocast(q.device.type, enabled=False):
        full = site.moments is not None
        if log_sum_exp or (log_sum_exp is None and q.is_cuda):
            # A kernel needs the model's own dtype; the values are the same numbers.
            plain = softcap is None and bias is None and not full
            known = lse_logits(q, k, scale, visible, site) if plain else None
            if known is not None:
                _add(known, _no_unit(q.shape[0] * q.shape[1]), q.shape[0], site, locate)
                return
            if log_sum_exp:
                raise ValueError(
                    "the log-sum-exp of these logits is not known: it tells extremes alone, and no "
                    "flash kernel takes a cap, a bias, a mask or window, or this dtype and device"
                )
        q, k = q.float(), k.float()
        unit = _logit_unit(q, k, scale) if full else _no_unit(q.shape[0] * q.shape[1])
        parts = _logits(q, k, scale, visible, unit, site, softcap, bias, compiled)
        _add(parts, unit, q.shape[0], site, locate)


def _keys_of_all(q: Tensor, k: Tensor) -> Tensor:
    """Expand k (B or 1, G, M, D) to the keys (B, G, M, D) of each sequence of q (B, H, N, D).

    Raises:
        ValueError: they do not fit together.
    """
    if q.shape[1] % k.shape[1]:
        raise ValueError(f"{q.shape[1]} query heads do not divide into {k.shape[1]} key heads")
    if len(k) not in (1, len(q)) or q.shape[3] != k.shape[3]:
        raise ValueError(
            f"queries of shape {tuple(q.shape)} do not go with keys of shape {tuple(k.shape)}: "
            "keys have the queries' width, and their batch or 1"
        )
    return k.expand(len(q), -1, -1, -1)


def _logits(
    q: Tensor,
    k: Tensor,
    scale: float,
    visible: Visible,
    unit: NDArray[np.float32],
    site: SiteStatistics,
    softcap: float | None,
    bias: Callable[[int, int], Tensor] | None,
    compiled: bool,
) -> Iterator[Part]:
    """Use the compiled kernels where possible, else plain torch; q and k are fp32."""
    plain = softcap is None and bias is None
    if compiled and plain and q.device.type == "cpu" and native.available():
        return _compiled_logits(q, k, scale, visible, unit, site)
    return torch_logits(q, k, scale, visible, unit, site, softcap, bias)


@torch.no_grad()
def logit_extremes(
    q: Tensor,
    k: Tensor,
    scale: float,
    visible: Visible,
    *,
    softcap: float | None = None,
    bias: Callable[[int, int], Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """The smallest and the largest logit of each sequence and head.

    Args:
        q, k, scale, visible, softcap, bias: as in `measure_logits`.

    Returns:
        (B, H) fp32 each, on q's device; +inf and −inf where nothing is visible.

    Raises:
        NonFiniteError: a NaN or an infinity among the logits that count.
        ValueError: queries and keys that do not fit together.
    """
    k = _keys_of_all(q, k)
    batch, heads = q.shape[:2]
    site = SiteStatistics.empty("", 0, heads, full=False, rank=0, coordinates=4)
    parts: Iterator[Part] | None = None
    with torch.autocast(q.device.type, enabled=False):
        if q.is_cuda and softcap is None and bias is None:
            parts = lse_logits(q, k, scale, visible, site)
        if parts is None:
            unit = _no_unit(batch * heads)
            parts = _logits(
                q.float(), k.float(), scale, visible, unit, site, softcap, bias, compiled=True
            )
        least = np.full((batch, heads), np.inf, np.float32)
        most = -least
        for part in parts:
            partial = part.partial.reshape(batch, heads)
            bad = partial["bad"].any(0)
            if bad.any():
                raise NonFiniteError(int(np.flatnonzero(bad)[0]))
            least = np.minimum(least, partial["min"])
            most = np.maximum(most, partial["max"])
    return torch.from_numpy(least).to(q.device), torch.from_numpy(most).to(q.device)


@torch.no_grad()
def measure_values(
    values: Tensor,
    rows: Tensor,
    site: SiteStatistics,
    locate: Callable[[NDArray[np.int64]], NDArray[np.int64]],
    *,
    compiled: bool = True,
) -> None:
    """Add the rows of a tensor to a site's statistics.

    Args:
        values: (N, D), or (G, N, D) for a site of G groups, any floating dtype.
        rows: (N,) bool, the rows that count.
        site: statistics of one group, or G, to add to, with extremes of D channels if it has them.
        locate: maps (n, 4) int64 of (group, 0, row, column) to the coordinates of `site.top`.
        compiled: False selects the plain torch path.

    Raises:
        NonFiniteError: a NaN or an infinity in a row that counts; nothing was added.
    """
    if not values.numel():
        return
    with torch.autocast(values.device.type, enabled=False):
        x = values.float()
        x = x if x.dim() == 3 else x[None]  # (G, N, D)
        x = x if x.stride(-1) == 1 else x.contiguous()
        wanted = site.moments is not None or site.channels is not None
        wanted = wanted and bool(rows.any())
        kept = x[:, rows.to(x.device)] if wanted and not rows.all() else x
        unit = _value_unit(kept) if wanted else _no_unit(len(x))
        if compiled and x.device.type == "cpu" and native.available():
            parts = _compiled_values(x, rows, unit, site)
        else:
            parts = torch_values(x, rows, unit, site)
        _add(parts, unit, 1, site, locate, kept if wanted else None)


def _add(
    parts: Iterator[Part],
    unit: NDArray[np.float32],
    batch: int,
    site: SiteStatistics,
    locate: Callable[[NDArray[np.int64]], NDArray[np.int64]],
    values: Tensor | None = None,
) -> None:
    """Gather the parts of one call, and add them only if all of them are finite.

    `values` (G, n, C), if given, are those whose extremes a site with channels keeps.
    """
    heads = site.groups
    sums = np.zeros((batch, heads, 4))
    fresh = SiteStatistics.empty(
        site.name, site.layer, heads, full=site.histogram is not None, rank=site.top.rank,
        coordinates=site.top.coordinates.shape[1],
        width=None if site.channels is None else site.width,
    )  # fmt: skip
    counts = np.zeros((batch, heads), np.int64)
    for part in parts:
        partial = part.partial.reshape(batch, heads)
        bad = partial["bad"].any(0)
        if bad.any():
            raise NonFiniteError(int(np.flatnonzero(bad)[0]))
        counts += partial["count"]
        sums += partial["moment"]
        fresh.min = np.minimum(fresh.min, partial["min"].min(0))
        fresh.max = np.maximum(fresh.max, partial["max"].max(0))
        if part.uncapped is not None:
            before = fresh.uncapped
            fresh.uncapped = part.uncapped if before is None else np.maximum(before, part.uncapped)
        if fresh.histogram is not None and part.counts is not None:
            fresh.histogram.add(part.counts, part.first)
        if len(part.items):
            place = np.stack([part.items[name] for name in ("head", "batch", "row", "column")], 1)
            place = place.astype(np.int64)
            place[:, 2] += part.row
            fresh.top.offer(part.items["value"], locate(place))
    fresh.count = counts.sum(0)
    if fresh.moments is not None:
        units = unit.reshape(batch, heads, 2).astype(np.float64)
        for b in range(batch):
            weight, pivot = units[b].T
            fresh.moments.merge(Moments.from_sums(counts[b], sums[b], weight, pivot))
        for moment in (fresh.moments.m2, fresh.moments.m3, fresh.moments.m4):
            moment[fresh.min == fresh.max] = 0.0  # no spread, whatever rounding left
    if fresh.channels is not None and values is not None:
        fresh.channels.add(values)
    site.merge(fresh)


def _no_unit(groups: int) -> NDArray[np.float32]:
    return np.tile(np.array([[1.0, 0.0]], np.float32), (groups, 1))


def _some(x: Tensor) -> Tensor:
    """Fewer than 512 rows of x (..., N, D), evenly spaced: pivot and weight need no more."""
    return x[..., :: max(1, x.shape[-2] // 256), :]


def _logit_unit(q: Tensor, k: Tensor, scale: float) -> NDArray[np.float32]:
    """In closed form: mean over all pairs (Σq)·(Σk) / NM, spread from the rows' mean norms."""
    repeat = q.shape[1] // k.shape[1]
    q, k = _some(q), _some(k)
    key_mean = k.mean(2).repeat_interleave(repeat, 1)  # (B, H, D)
    key_length = k.norm(dim=-1).mean(2).repeat_interleave(repeat, 1)  # (B, H)
    spread = q.norm(dim=-1).mean(2) * key_length * (abs(scale) / q.shape[-1] ** 0.5)
    return unit_of((q.mean(2) * key_mean).sum(-1) * scale, spread)


def _value_unit(x: Tensor) -> NDArray[np.float32]:
    std, mean = torch.std_mean(_some(x), (1, 2), correction=0)
    return unit_of(mean, std)


# A table of 65,536 counts per head is kept between calls; only bins in use are read and cleared.
_tables: dict[int, NDArray[np.int64]] = {}


def _call(
    q: Tensor,
    k: Tensor | None,
    scale: float,
    start: Tensor,
    stop: Tensor,
    mask: Tensor | None,
    unit: NDArray[np.float32],
    site: SiteStatistics,
) -> tuple[NDArray[np.void], NDArray[np.int64] | None, int, NDArray[np.void]]:
    full = site.histogram is not None
    heads = q.shape[1]
    table = _tables.pop(heads, None)  # popped, so that two threads never share one
    if table is None:
        table = lasting_zeros((heads, _BINS), np.int64)
    partial, bins, items = native.run(
        q, k, scale=scale, start=start.contiguous(), stop=stop.contiguous(), mask=mask, unit=unit,
        full=full, rank=site.top.rank, threshold=site.top.threshold, histogram=table,
    )  # fmt: skip
    low, high = int(bins[:, 0].min()), int(bins[:, 1].max()) + 1
    counts = None
    if high > low:
        used = table.reshape(heads, 2, _BINS // 2)[:, :, low:high]
        counts = used.copy()
        used[:] = 0
    _tables[heads] = table
    return partial, counts, low, items


def _compiled_values(
    x: Tensor, rows: Tensor, unit: NDArray[np.float32], site: SiteStatistics
) -> Iterator[Part]:
    """Parts of x (G, N, D), one group after the other."""
    stop = rows.int()[None].cpu()
    start = torch.zeros_like(stop)
    for g, group in enumerate(x):
        partial, counts, first, items = _call(
            group[None, None], None, 1.0, start, stop, None, unit[g : g + 1], site
        )
        whole, items["head"] = nothing(len(x)), g
        whole[g] = partial[0]
        if counts is not None and len(x) > 1:
            table = np.zeros((len(x), *counts.shape[1:]), np.int64)
            table[g] = counts[0]
            counts = table
        yield Part(whole, counts, first, items, 0)


def _compiled_logits(
    q: Tensor,
    k: Tensor,
    scale: float,
    visible: Visible,
    unit: NDArray[np.float32],
    site: SiteStatistics,
) -> Iterator[Part]:
    q = q if q.stride(-1) == 1 else q.contiguous()
    k = k if k.stride(-1) == 1 else k.contiguous()
    rows = q.shape[2]
    step = rows
    if visible.mask is not None:
        step = max(1, BLOCK_ELEMENTS // k.shape[2])
    for first in range(0, rows, step):
        last = min(first + step, rows)
        mask = visible.mask_rows(first, last)
        if mask is not None and mask.stride(-1) != 1:
            mask = mask.contiguous()
        result = _call(
            q[:, :, first:last], k, scale, visible.start[:, first:last],
            visible.stop[:, first:last], mask, unit, site,
        )  # fmt: skip
        yield Part(*result, first)
