"""Attention maps recorded on the device, against maps materialised in fp64 and against the CPU."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

import quantdiff
from gpu_checks.common import Check, Found, Place, largest
from gpu_checks.recording import FAMILIES, padded_batch, small_model
from quantdiff.hooks import maps as hooked
from quantdiff.statistics import map_rows
from quantdiff.statistics.blocks import GPU_SHIFT
from quantdiff.statistics.profile import Profile

__all__ = ["maps_checks"]

MEASURES = (
    "row_sum", "negative_mass", "sink", "entropy", "context_rms_min", "context_rms_median",
    "context_rms_max", "similarity",
)  # fmt: skip
Summary = tuple[int, str, dict[str, float | None]]  # of a site: layer, kind, measures
# Errors are relative to the value, or to this where the value is smaller.
FLOOR = 0.1
# Of means, of extremes, and of the median, which is read from a histogram with bins of 0.5 %.
Bounds = tuple[float, float, float]
# Against fp64 of the same queries and keys, as the model's dtype left them: for both dtypes.
EXACT: Bounds = (1e-5, 1e-4, 6e-3)
# Against the same model on the CPU in eager attention, where every step rounds differently, in bf16
# to eight bits: logits of 20 then differ by a tenth, and so does a weight. Means average that out
# (eager and sdpa on a CPU: 0.007 at most), but the row whose two maps cancel most does not (0.07).
DRIFT: dict[torch.dtype, Bounds] = {
    torch.float32: (1e-4, 1e-4, 1.2e-2),
    torch.bfloat16: (3e-2, 0.25, 4e-2),
}


def maps_checks(place: Place) -> list[Check]:
    """Each kind of differential attention and the baseline, in both precisions."""
    return [
        (f"{family}, maps, {str(dtype)[6:]}", partial(_check, place, family, dtype))
        for family in FAMILIES
        for dtype in DRIFT
    ]


@dataclass(eq=False)
class _Call:
    """What one layer's maps are made of, on the CPU and in fp64.

    Attributes:
        weights: softmax maps of all query heads, (B, H, N, M).
        lam: λ, broadcastable to (B, h, N, 1), or None for standard heads.
        first, second: heads of map 1 and map 2, pair by pair.
    """

    weights: Tensor
    lam: Tensor | None
    first: list[int]
    second: list[int]

    def kinds(self) -> dict[str, Tensor]:
        """The maps (B, h, N, M) of every kind that is recorded."""
        if self.lam is None:
            return {"softmax": self.weights}
        difference = self.weights[:, self.first] - self.lam * self.weights[:, self.second]
        return {
            "branch 1": self.weights[:, sorted(set(self.first))],
            "branch 2": self.weights[:, sorted(set(self.second))],
            "difference": difference,
        }


@contextmanager
def _watched(real: Tensor) -> Iterator[list[_Call]]:
    """The maps of every measured layer; what they see follows from the real tokens alone."""
    calls: list[_Call] = []
    measure = hooked.measure_maps
    place = torch.arange(real.shape[1])
    seen = (place <= place[:, None]) & real[:, None, None, :]  # (B, 1, N, M)

    def watch(q: Tensor, k: Tensor, scale: float, *rest: Any, **options: Any) -> None:
        query, key = q.double().cpu(), k.double().cpu()
        s = query @ key.repeat_interleave(q.shape[1] // k.shape[1], 1).mT * scale
        lam = options.get("lam")
        calls.append(_Call(
            s.masked_fill(~seen, -torch.inf).softmax(-1),
            None if lam is None else torch.as_tensor(lam).double().cpu(),
            options.get("first", []),
            options.get("second", []),
        ))  # fmt: skip
        measure(q, k, scale, *rest, **options)

    hooked.measure_maps = watch
    try:
        yield calls
    finally:
        hooked.measure_maps = measure


@contextmanager
def _blocks_of(rows: int, heads: int, keys: int, device: torch.device) -> Iterator[None]:
    """Measure maps this many rows at a time, as happens with longer texts."""
    known = map_rows.BLOCK_ELEMENTS
    elements = rows * heads * keys
    map_rows.BLOCK_ELEMENTS = elements if device.type == "cpu" else -(-elements >> GPU_SHIFT)
    try:
        yield
    finally:
        map_rows.BLOCK_ELEMENTS = known


def _model(family: str, small: bool) -> PreTrainedModel:
    """A model whose attention is far from uniform: on even maps all errors would look small."""
    model = small_model(family, small)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.q_proj.weight *= 4
    return model


def _record(model: Any, batch: dict[str, Tensor]) -> Profile:
    with torch.no_grad(), quantdiff.record(model, maps=True, detail="extremes") as recorder:
        model(**batch, use_cache=False)
    return recorder.profile()


def _summaries(profile: Profile) -> list[Summary]:
    return [
        (site.layer, site.kind, {name: site.summary[name] for name in MEASURES})
        for site in profile.maps or []
    ]


@cache
def _on_the_cpu(family: str, small: bool, dtype: torch.dtype) -> Profile:
    """The same model on the CPU, in eager attention."""
    model = _model(family, small).to(dtype)
    model.set_attn_implementation("eager")
    return _record(model, padded_batch(small))


def _check(place: Place, family: str, dtype: torch.dtype) -> Found:
    model = _model(family, place.small).to(place.device, dtype)
    batch = {name: x.to(place.device) for name, x in padded_batch(place.small).items()}
    real = batch["attention_mask"].cpu().bool()
    with _watched(real) as calls:
        profile = _record(model, batch)
    heads, keys = model.config.num_attention_heads, real.shape[1]
    with _blocks_of(7, heads, keys, place.device):
        blocks = _record(model, batch)
    exact = [
        (layer, kind, _materialised(w, real))
        for layer, call in enumerate(calls)
        for kind, w in call.kinds().items()
    ]
    found = Found()
    found.within["layers"] = abs(len(calls) - model.config.num_hidden_layers), 0.0
    mine = _summaries(profile)
    found.within |= _errors("", mine, exact, EXACT)
    found.within |= _errors(" in blocks", _summaries(blocks), exact, EXACT)
    other = _summaries(_on_the_cpu(family, place.small, dtype))
    found.within |= _errors(" to CPU", mine, other, DRIFT[dtype])
    return found


def _materialised(w: Tensor, real: Tensor) -> dict[str, float | None]:
    """The measures of maps w (B, h, N, M) fp64 by their definitions, over the real queries."""
    pad = (~real).sum(1)  # padding is on the left
    batch, row = real.nonzero(as_tuple=True)
    w = w.transpose(1, 2)[batch, row]  # (rows, h, M)
    size = w.abs().sum(-1, keepdim=True)
    p = w.abs() / size
    norm = w.norm(dim=-1)  # (rows, h)
    more = row > pad[batch]  # sees a key other than the first token
    unit = (w / norm[..., None])[more]
    cosine = unit @ unit.mT  # (rows, h, h)
    h = w.shape[1]
    alike = (cosine.sum((1, 2)) - h) / (h * (h - 1)) if h > 1 else None
    measures = {
        "row_sum": w.sum(-1).mean(),
        "negative_mass": w.clamp(max=0).abs().sum(-1).mean(),
        "sink": w.gather(-1, pad[batch][:, None, None].expand(-1, h, 1))[more].mean(),
        "entropy": -torch.xlogy(p, p).sum(-1).mean(),
        "context_rms_min": norm.min(),
        "context_rms_median": norm.quantile(0.5),
        "context_rms_max": norm.max(),
        "similarity": None if alike is None else alike.mean(),
    }
    return {name: None if x is None else float(x) for name, x in measures.items()}


def _errors(
    title: str,
    mine: list[Summary],
    others: list[Summary],
    bounds: Bounds,
) -> dict[str, tuple[float, float]]:
    """The largest error of each measure over layers and kinds."""
    errors: dict[str, list[float]] = {name: [] for name in MEASURES}
    assert [x[:2] for x in mine] == [x[:2] for x in others], "other layers or kinds of maps"
    for (_, _, found), (_, _, exact) in zip(mine, others, strict=True):
        for name in MEASURES:
            x, y = found[name], exact[name]
            if x is None or y is None:
                error = 0.0 if x is y else float("inf")
            else:
                error = abs(x - y) / max(abs(y), FLOOR)
            errors[name].append(error)
    mean, extreme, median = bounds
    bound = dict.fromkeys(MEASURES, mean)
    bound |= {
        "context_rms_min": extreme, "context_rms_median": median, "context_rms_max": extreme,
    }  # fmt: skip
    return {f"{name}{title}": (largest(errors[name]), bound[name]) for name in MEASURES}
