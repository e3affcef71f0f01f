"""Signal and quantization noise of attention: logits, maps, and the maps' difference.

Each module is measured on the queries and keys that actually reach it, so that only its own
rounding counts, whatever was rounded before it. Noise is the quantized value minus the plain one;
the squares of noise and signal are summed in fp64 over what may be attended.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quantdiff.errors import UsageError
from quantdiff.hooks.found import Found
from quantdiff.hooks.logits import Logits, as_multiplied
from quantdiff.hooks.maps import Paired, WhenDone
from quantdiff.hooks.passes import Pass
from quantdiff.hooks.recorder import Recorder
from quantdiff.quantization.grid import Grid
from quantdiff.quantization.logits import softmax_of
from quantdiff.quantization.scheme import Scheme
from quantdiff.quantization.softmax import Softmax
from quantdiff.quantization.table import Table
from quantdiff.statistics.blocks import GPU_SHIFT
from quantdiff.statistics.precision import true_fp32

__all__ = ["Energies", "NoiseRecorder", "decibels"]

BLOCK_ELEMENTS = 1 << 18  # of a block of logits; about ten blocks live at a time


@dataclass(eq=False)
class Energies:
    """Sums of squares of one site, by head.

    Attributes:
        name, layer: of the site.
        heads: kind -> its heads. Standard heads have the kinds `logits` and `softmax`; differential
            ones `logits`, `branch 1`, `branch 2` and `difference`, the last with map 1's heads.
        signal, noise: kind -> (heads,) fp64.
        independent: of the difference, noise 1 + λ²·noise 2, summed entry by entry: its noise if
            the errors of its two maps were independent.
    """

    name: str
    layer: int
    heads: dict[str, list[int]]
    signal: dict[str, NDArray[np.float64]] = field(default_factory=dict)
    noise: dict[str, NDArray[np.float64]] = field(default_factory=dict)
    independent: NDArray[np.float64] | None = None

    def add(self, kind: str, plain: Tensor, rounded: Tensor) -> None:
        """Add a block, (heads, n, m) each, zero where nothing may be attended."""
        for sums, values in ((self.signal, plain), (self.noise, rounded - plain)):
            own = values.double().square().sum((1, 2)).cpu().numpy()
            sums[kind] = sums.get(kind, 0.0) + own

    def ratio(self, kind: str) -> float:
        """Signal-to-noise ratio of all heads together; infinite without noise."""
        noise = float(self.noise[kind].sum())
        return float(self.signal[kind].sum()) / noise if noise else math.inf

    @property
    def cancellation(self) -> float | None:
        """Noise of the difference over that of independent errors; 1 if errors are independent.

        Less where the subtraction cancels them, more where it adds them up; None for standard heads
        or without noise.
        """
        if self.independent is None or not self.independent.sum():
            return None
        return float(self.noise["difference"].sum() / self.independent.sum())


def decibels(ratio: float) -> float:
    """10·log10 of a ratio of energies."""
    return 10 * math.log10(ratio) if ratio > 0 else -math.inf


class NoiseRecorder:
    """Measures, within a context, what a scheme would do to each attention module of a model.

    The model's own computation is unchanged; to quantize it too, enter a `fake_quantize` context
    before or after.

    Args:
        model: any that can be recorded.
        scheme: for `attention_logits`.
        table: static ranges.

    Raises:
        UsageError: a scheme for another site, for some layers or heads only, of 16 bits, or a
            static one without a table.
    """

    def __init__(self, model: torch.nn.Module, scheme: Scheme, table: Table | None = None) -> None:
        some = scheme.layers is not None or scheme.heads is not None
        if scheme.site != "attention_logits" or some or not scheme.quantizes:
            raise UsageError(
                "noise is measured of a scheme that quantizes the logits of all layers and heads"
            )
        if scheme.static and table is None:
            raise UsageError(f"the range {scheme.range} comes from a calibration: give table=…")
        self._noise: _Noise | None = None

        def make(found: Found) -> "_Noise":
            self._noise = _Noise(found, scheme, table)
            return self._noise

        self._recorder = Recorder(
            model, top_k=0, detail="extremes", layers=None, layout=None, maps=False, spans=(),
            compiled=True, done=make,
        )  # fmt: skip

    def __enter__(self) -> "NoiseRecorder":
        self._recorder.__enter__()
        return self

    def __exit__(self, *exception: object) -> None:
        self._recorder.__exit__(*exception)

    def sites(self) -> list[Energies]:
        """What was measured, in the order of the layers."""
        assert self._noise is not None
        return sorted(self._noise.sites.values(), key=lambda site: site.layer)


class _Noise(WhenDone):
    def __init__(self, found: Found, scheme: Scheme, table: Table | None) -> None:
        super().__init__(found)
        self.sites: dict[str, Energies] = {}
        self._scheme, self._table = scheme, table

    @torch.no_grad()
    def measure(self, name: str, layer: int, call: Logits, pairs: Paired | None, now: Pass) -> None:
        heads = list(range(call.query.shape[1]))
        kinds = {"logits": heads, "softmax": heads}
        lam: Tensor | None = None
        if pairs is not None:
            first, second, given = pairs
            kinds = {
                "logits": heads,
                "branch 1": sorted(set(first)),
                "branch 2": sorted(set(second)),
                "difference": first,
            }
            shape = (call.query.shape[0], len(first), call.query.shape[2], 1)
            lam = torch.as_tensor(given, device=call.query.device).float().expand(shape)
        site = self.sites.setdefault(name, Energies(name, layer, kinds))
        softmax = softmax_of(call, self._scheme, self._table, name)
        query, key = as_multiplied(call.query, call.key)
        with torch.autocast(query.device.type, enabled=False):
            for b in range(len(query)):
                for rows, plain, rounded, seen in _blocks(query[b], key[b], softmax, b):
                    site.add("logits", plain, rounded)  # a grid includes zero
                    maps = [_maps(x, seen, call.sinks) for x in (plain, rounded)]
                    if pairs is None or lam is None:
                        site.add("softmax", *maps)
                        continue
                    for kind in ("branch 1", "branch 2"):
                        site.add(kind, *(x[kinds[kind]] for x in maps))
                    here = lam[b, :, rows]  # (h, n, 1)
                    site.add("difference", *(x[first] - here * x[second] for x in maps))
                    noise = (maps[1] - maps[0]).double().square()
                    alone = noise[first] + here.double().square() * noise[second]
                    more = alone.sum((1, 2)).cpu().numpy()
                    known = site.independent
                    site.independent = more if known is None else known + more


def _blocks(
    q: Tensor, k: Tensor, softmax: Softmax, b: int
) -> Iterator[tuple[slice, Tensor, Tensor, Tensor]]:
    """Rows of sequence b, their logits plain and rounded, and which count: (H, n, M) each."""
    q, k = q.float(), k.float()
    heads, rows, _ = q.shape
    visible, grid = softmax.visible, softmax.grid
    assert grid is not None
    start, stop = visible.start[b].to(q.device), visible.stop[b].to(q.device)
    column = torch.arange(k.shape[1], device=q.device)
    k = k.repeat_interleave(heads // len(k), 0)
    block = BLOCK_ELEMENTS if q.device.type == "cpu" else BLOCK_ELEMENTS << GPU_SHIFT
    step = max(1, block // (heads * k.shape[1]))
    for first in range(0, rows, step):
        last = min(first + step, rows)
        with true_fp32():
            s = q[:, first:last] @ k.mT * softmax.scale  # (H, n, M)
        if softmax.softcap is not None:
            s = torch.tanh(s / softmax.softcap) * softmax.softcap
        if softmax.bias is not None:
            added = softmax.bias(first, last)
            s = s + added[b if len(added) > 1 else 0].to(s)
        seen = (column >= start[first:last, None]) & (column < stop[first:last, None])
        extra = visible.mask_rows(first, last)
        if extra is not None:
            seen = seen & extra[b if len(extra) > 1 else 0].to(s.device)
        seen = seen.expand(s.shape)
        s = s.masked_fill(~seen, 0.0)
        if isinstance(grid, Grid):
            own = b if len(grid.step) > 1 else 0
            here = Grid(grid.step[own], grid.zero[own], grid.low, grid.high)
        else:
            here = grid.of(*s.aminmax(dim=-1, keepdim=True))
        yield slice(first, last), s, here.quantize(s), seen


def _maps(s: Tensor, seen: Tensor, sinks: Tensor | None) -> Tensor:
    """Softmax over the visible logits, zeros elsewhere."""
    s = s.masked_fill(~seen, -torch.inf)
    if sinks is not None:
        column = sinks.to(s)[:, None, None].expand(*s.shape[:2], 1)
        s = torch.cat([s, column], -1)
    weights = s.softmax(-1)[..., : seen.shape[-1]]
    return torch.where(seen, weights, 0.0)
