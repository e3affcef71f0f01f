"""The log-sum-exp route on the machine's flash kernel, and recorded numbers where TF32 is allowed.

Both are compared with the streaming statistics and with logits materialised in fp64.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import numpy as np
import torch
from torch import Tensor

from gpu_checks.common import Check, Found, MissingPartError, Place, largest
from quantdiff.statistics import NonFiniteError, SiteStatistics, Visible, lse, measure_logits

__all__ = ["lse_checks", "tf32_checks"]

RANK = 100


def _site(heads: int) -> SiteStatistics:
    return SiteStatistics.empty("site", 0, heads, full=False, rank=RANK, coordinates=4)


def _measure(case: "_Case", **options: bool) -> SiteStatistics:
    site = _site(case.q.shape[1])
    measure_logits(case.q, case.k, case.scale, case.visible, site, lambda places: places, **options)
    return site


class _Case:
    """Queries, keys, and what may be attended to, on the device.

    Attributes:
        q: (B, H, N, D); k: (B, H / 4, M, D).
        scale, visible: as in `measure_logits`.
        exact: logits in fp64, (B, H, N, M).
        seen: which of them count, (B, 1, N, M).
    """

    def __init__(
        self,
        place: Place,
        *,
        rows: int,
        width: int = 64,
        dtype: torch.dtype = torch.bfloat16,
        shape: str = "causal",
        more_keys: int = 0,
        sign: int = 1,
        kind: str = "normal",
    ) -> None:
        generator = torch.Generator().manual_seed(rows + width)
        batch, heads = (1, 4) if rows > 4000 else (3, 8)
        keys = rows + more_keys
        sizes = (batch, heads, rows, width), (batch, heads // 4, keys, width)
        if kind == "integers":  # products are exact, and many of them equal
            q, k = (torch.randint(-2, 3, size, generator=generator).float() for size in sizes)
        else:
            q, k = (torch.randn(size, generator=generator) for size in sizes)
        if kind == "outliers":
            q[0, 1, rows // 2, 5], k[0, 0, rows // 3, 5] = 800.0, 100.0
        if kind == "alike":
            k[:] = k[:, :, :1]
        self.q, self.k = q.to(place.device, dtype), k.to(place.device, dtype)
        self.scale = sign * (0.25 if kind == "integers" else width**-0.5)
        if shape == "everything":
            self.visible = Visible.everything(batch, rows, keys, place.device)
        else:
            self.visible = Visible.causal(batch, rows, keys, place.device)
        row = torch.arange(rows, device=place.device)
        pad = torch.tensor([[0], [rows // 5], [rows]], device=place.device)[:batch]
        if shape == "left":
            self.visible.start = torch.minimum(self.visible.start + pad, self.visible.stop).int()
            self.visible = self.visible.only(row >= pad)
        elif shape == "right":
            self.visible = self.visible.only(row < rows - pad)
        wide = self.k.double().repeat_interleave(4, 1)  # (B, H, M, D)
        self.exact = (self.q.double() @ wide.mT) * self.scale
        column = torch.arange(keys, device=place.device)
        start, stop = (x[:, None, :, None] for x in (self.visible.start, self.visible.stop))
        self.seen = (column >= start) & (column < stop)
        # An fp32 product of two such vectors may be off by this much.
        longest = float(self.q.double().norm(dim=-1).max() * wide.norm(dim=-1).max())
        self.rounding = abs(self.scale) * longest * (width + 8) * 2.0**-23


def lse_checks(place: Place) -> list[Check]:
    """Shapes, widths and values of every kind that the route must handle."""
    rows = 301 if place.small else 1501
    options: dict[str, dict[str, object]] = {
        "causal, d = 128": {"width": 128},
        "causal, fp16": {"dtype": torch.float16},
        "everything": {"shape": "everything"},
        "left padding": {"shape": "left"},
        "right padding": {"shape": "right"},
        "with a cache": {"more_keys": 75},
        "one query": {"rows": 1, "more_keys": rows},
        "d = 20": {"width": 20},
        "d = 80": {"width": 80},
        "d = 256": {"width": 256},
        "negative scale": {"sign": -1},
        "outliers of 1e4": {"kind": "outliers"},
        "integers, many ties": {"kind": "integers"},
        "all keys alike": {"kind": "alike", "shape": "everything"},
    }
    if place.small:
        options["causal, fp32"] = {"dtype": torch.float32}
    else:
        options["n = 12,000"] = {"rows": 12_000, "width": 128}
    checks: list[Check] = [
        (name, partial(_lse, place, **{"rows": rows} | given)) for name, given in options.items()
    ]
    checks.append(("a NaN is refused", partial(_refused, place, rows)))
    if not place.small:
        checks.append(("causal, fp32", _no_fp32))
    return checks


def _no_fp32() -> Found:
    raise MissingPartError("torch's flash kernel takes fp16 and bf16; fp32 is streamed")


def _lse(place: Place, **options: object) -> Found:
    case = _Case(place, **options)  # type: ignore[arg-type]
    runs = lse._runs(case.q, case.k, case.visible)
    if runs is None:
        raise MissingPartError("no flash kernel takes these inputs here")
    chosen = lse._chosen(case.q, case.k, case.scale, _site(case.q.shape[1]), runs)
    route = _measure(case, log_sum_exp=True)
    streamed = _measure(case, log_sum_exp=False, compiled=False)
    least, most = (
        torch.where(case.seen, case.exact, fill).movedim(1, 0).flatten(1)
        for fill in (torch.inf, -torch.inf)
    )  # (H, B·N·M)
    low, high = least.amin(1).cpu().numpy(), most.amax(1).cpu().numpy()
    room = case.rounding
    found = Found()
    count = case.seen.expand_as(case.exact).sum((0, 2, 3)).cpu().numpy()
    found.within["count"] = float(np.abs(route.count - count).max()), 0.0
    for name, site in (("", route), (" streamed", streamed)):
        gap = largest([*np.abs(site.min - low), *np.abs(site.max - high)])
        found.within[f"extremes{name}"] = gap, room
    lengths = torch.where(case.seen, case.exact.abs(), 0.0).flatten()
    exact = lengths.topk(min(RANK, int(count.sum()))).values.cpu().numpy()
    same = len(route.top.values) == len(exact)
    gap = float(np.abs(route.top.values - exact).max()) if same else math.inf
    found.within["top 100"] = gap, room
    head, batch, row, column = torch.from_numpy(route.top.coordinates.T.copy()).to(place.device)
    there = case.exact[batch, head, row, column].abs().cpu().numpy()
    found.within["at their places"] = float(np.abs(route.top.values - there).max()), room
    if options.get("kind") == "integers":
        other = (route.top.coordinates != streamed.top.coordinates).any(1).sum()
        found.within["other places than streamed"] = float(other), 0.0
    found.within |= _share(case, runs)
    found.told["rows"] = int(case.seen.any(-1).sum()) * case.q.shape[1]
    found.told["multiplied out"] = "all" if chosen is None else len(chosen[1])
    return found


def _share(case: _Case, runs: list[lse._Run]) -> dict[str, tuple[float, float]]:
    """The share of the error granted to the bounds that they use, 1 being all of it."""
    shares: dict[str, list[float]] = {"granted above": [], "granted below": []}
    for run in runs:
        bounds = lse._bounds(case.q, case.k, case.scale, run, lse.STEEPEST)
        if bounds is None:
            continue
        for i, sign in enumerate((1, -1)):
            values = torch.where(case.seen, sign * case.exact, -torch.inf).amax(-1)  # (B, H, N)
            true = run.rows(values[..., None])[..., 0]
            gap = true - bounds.largest[i].double()
            shares["granted above"].append(float((gap / bounds.above[i]).max()))
            shares["granted below"].append(float((-gap / bounds.below[i]).max()))
    return {name: (largest(some), 1.0) for name, some in shares.items() if some}


def _refused(place: Place, rows: int) -> Found:
    case = _Case(place, rows=rows)
    case.k[0, 0, rows - 1, 3] = math.nan
    site = _site(case.q.shape[1])
    try:
        measure_logits(
            case.q, case.k, case.scale, case.visible, site, lambda places: places, log_sum_exp=True
        )
    except NonFiniteError:
        return Found({"counted": (float(site.count.sum()), 0.0)})
    return Found({"not refused": (1.0, 0.0)})


@contextmanager
def _allowed(way: str) -> Iterator[None]:
    """Allow TF32 for products of fp32, in one of torch's ways."""
    products = torch.backends.cuda.matmul
    try:
        if way == "set_float32_matmul_precision":
            torch.set_float32_matmul_precision("high")
        elif way == "allow_tf32":
            products.allow_tf32 = True
        else:
            products.fp32_precision = "tf32"
        yield
    finally:
        products.fp32_precision = "none"
        torch.set_float32_matmul_precision("highest")


def tf32_checks(place: Place) -> list[Check]:
    """The same numbers, bit for bit, whatever products the process allows."""
    ways = ("set_float32_matmul_precision", "allow_tf32", "fp32_precision")
    return [(way, partial(_tf32, place, way)) for way in ways]


def _tf32(place: Place, way: str) -> Found:
    rows = 301 if place.small else 1501
    exact, half = (
        _Case(place, rows=rows, width=64, dtype=dtype) for dtype in (torch.float32, torch.bfloat16)
    )
    takes: dict[str, Callable[[], SiteStatistics]] = {
        "streamed": lambda: _measure(exact, compiled=False, log_sum_exp=False),
        "log-sum-exp": lambda: _measure(half, log_sum_exp=True),
    }
    before = {name: take() for name, take in takes.items()}
    with _allowed(way):
        after = {name: take() for name, take in takes.items()}
        bare: Tensor = exact.q[:, ::4] @ exact.k.mT * exact.scale  # (B, H / 4, N, M)
        still = torch.backends.cuda.matmul.fp32_precision == "tf32"
    found = Found()
    for name, site in after.items():
        other = before[name]
        gaps = [site.min - other.min, site.max - other.max, site.top.values - other.top.values]
        found.within[name] = largest(np.abs(gap).max() for gap in gaps), 0.0
    low = torch.where(exact.seen, exact.exact, torch.inf).amin((0, 2, 3)).cpu().numpy()
    gap = float(np.abs(after["streamed"].min - low).max())
    found.within["against fp64"] = gap, exact.rounding
    found.within["setting changed"] = float(not still), 0.0
    found.told["a bare product's error"] = float((bare.double() - exact.exact[:, ::4]).abs().max())
    return found
