"""Recordings of small models under every attention implementation of transformers."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import (
    DiffLlamaConfig,
    DiffLlamaForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
)

import quantdiff
from gpu_checks.common import Check, Found, MissingPartError, Place, largest
from quantdiff.models import DiffV2Config, DiffV2ForCausalLM
from quantdiff.statistics import streaming
from quantdiff.statistics.profile import Profile

__all__ = ["FAMILIES", "padded_batch", "recording_checks", "small_model"]

FAMILIES = {
    "Llama": (LlamaForCausalLM, LlamaConfig),
    "DiffLlama": (DiffLlamaForCausalLM, DiffLlamaConfig),
    "DiffV2": (DiffV2ForCausalLM, DiffV2Config),
}
FLASH = ("flash_attention_2", "flash_attention_3", "flash_attention_4")
# A recording in bf16 against the CPU's in fp32: what rounding does to the model itself.
DRIFT = {torch.bfloat16: 0.05, torch.float32: 1e-3}


def recording_checks(place: Place, *, flex: bool) -> list[Check]:
    """The checks of flex_attention, which take long to compile on a GPU, or those of the others."""
    checks: list[Check] = []
    for family in FAMILIES:
        wanted = [(name, torch.bfloat16) for name in ("eager", "sdpa", *FLASH)]
        wanted += [(name, torch.float32) for name in ("eager", "sdpa")]
        if flex:
            wanted = [("flex_attention", torch.bfloat16)]
        for implementation, dtype in wanted:
            name = f"{family}, {implementation}, {str(dtype)[6:]}"
            checks.append((name, partial(_check, place, family, implementation, dtype)))
    if not flex:
        checks.append(("generation with a static cache", partial(_generation, place)))
    return checks


def small_model(family: str, small: bool) -> PreTrainedModel:
    """A model of two layers with the same random weights every time, on the CPU and in fp32."""
    kind, config = FAMILIES[family]
    hidden, heads = (64, 4) if small else (512, 8)
    settings: dict[str, Any] = {
        "vocab_size": 300,
        "hidden_size": hidden,
        "intermediate_size": hidden,
        "num_hidden_layers": 2,
        "num_attention_heads": heads * (2 if family == "DiffV2" else 1),
        "num_key_value_heads": heads // 2,
        "initializer_range": hidden**-0.5,  # wide enough for attention that is not uniform
    }
    torch.manual_seed(0)
    model: PreTrainedModel = kind(config(**settings)).eval()
    return model


def padded_batch(small: bool) -> dict[str, Tensor]:
    """Three sequences, padded on the left."""
    length = 40 if small else 300
    ids = torch.randint(3, 300, (3, length), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[1, : length // 3], mask[2, : length // 2] = 0, 0
    return {"input_ids": ids, "attention_mask": mask}


@contextmanager
def _watched() -> Iterator[list[tuple[Tensor, Tensor, float]]]:
    """Queries, keys and scale of every call that is streamed."""
    calls: list[tuple[Tensor, Tensor, float]] = []
    names = ("torch_logits", "_compiled_logits")
    real = {name: getattr(streaming, name) for name in names}

    def watch(name: str) -> Any:
        def stream(q: Tensor, k: Tensor, scale: float, *rest: Any) -> Any:
            calls.append((q.double().cpu(), k.double().cpu(), scale))
            return real[name](q, k, scale, *rest)

        return stream

    for name in names:
        setattr(streaming, name, watch(name))
    try:
        yield calls
    finally:
        for name in names:
            setattr(streaming, name, real[name])


def _record(
    model: PreTrainedModel, batch: dict[str, Tensor], detail: Any
) -> tuple[Profile, Tensor]:
    with torch.no_grad(), quantdiff.record(model, detail=detail) as recorder:
        output = model(**batch, use_cache=False).logits
    return recorder.profile(), output


@cache
def _on_the_cpu(family: str, small: bool, rounded: torch.dtype) -> Profile:
    """The same weights, rounded the same way, in fp32 and eager attention."""
    model = small_model(family, small).to(rounded).float()
    model.set_attn_implementation("eager")
    return _record(model, padded_batch(small), "full")[0]


def _check(place: Place, family: str, implementation: str, dtype: torch.dtype) -> Found:
    model = small_model(family, place.small).to(place.device, dtype)
    try:
        model.set_attn_implementation(implementation)
    except (ImportError, ValueError) as error:
        raise MissingPartError(str(error).splitlines()[0]) from None
    batch = {name: x.to(place.device) for name, x in padded_batch(place.small).items()}
    real = batch["attention_mask"].cpu().bool()
    hidden: list[Tensor] = []
    handles = [
        layer.register_forward_hook(
            lambda _m, _a, out: hidden.append(out if isinstance(out, Tensor) else out[0])
        )
        for layer in model.model.layers
    ]
    with torch.no_grad():
        plain = model(**batch, use_cache=False).logits
    for handle in handles:
        handle.remove()
    with _watched() as calls:
        profile, output = _record(model, batch, "full")
    found = Found()
    found.within["outputs changed"] = float((plain != output).sum()), 0.0
    found.within |= _against_fp64(profile, calls, real)
    states = torch.stack(hidden).cpu()[:, real].double()  # (layers, tokens, C)
    gap = abs(profile.hidden_states.absmax - float(states.abs().max()))
    found.within["hidden top"] = gap / float(states.abs().max()), 1e-6
    found.within["hidden count"] = abs(profile.hidden_states.count - states.numel()), 0.0
    with _routed(found):
        short, _ = _record(model, batch, "extremes")
    found.within |= _alike(short, profile)
    reference = _on_the_cpu(family, place.small, dtype)
    for name, mine, other in (
        ("top-1", profile.attention_logits.rank(1), reference.attention_logits.rank(1)),
        ("top-100", profile.attention_logits.rank(100), reference.attention_logits.rank(100)),
        ("median", profile.attention_logits.median, reference.attention_logits.median),
        ("hidden top-1", profile.hidden_states.rank(1), reference.hidden_states.rank(1)),
    ):
        assert mine is not None, name
        assert other is not None, name
        found.within[f"{name} to CPU"] = abs(mine - other) / other, DRIFT[dtype]
    return found


def _generation(place: Place) -> Found:
    """A static cache, whose unused end is never attended to; on a GPU transformers compiles it."""
    model = small_model("Llama", place.small).to(place.device)
    batch = {name: x.to(place.device) for name, x in padded_batch(place.small).items()}
    given = {"max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    profiles = {}
    for kind in ("dynamic", "static"):
        options = {"cache_implementation": kind, "disable_compile": True}
        with torch.no_grad(), quantdiff.record(model) as recorder:
            model.generate(**batch, **given, **options)
        profiles[kind] = recorder.profile().attention_logits
    one, other = profiles["dynamic"], profiles["static"]
    found = Found()
    found.within["count"] = float(abs(one.count - other.count)), 0.0
    tops = [part.rank(1) or 0.0 for part in (one, other)]
    found.within["top-1"] = abs(tops[0] / tops[1] - 1), DRIFT[torch.float32]
    if place.device.type == "cuda":
        refused = False
        with torch.no_grad(), quantdiff.record(model):
            try:
                model.generate(**batch, **given, cache_implementation="static")
            except quantdiff.RecordingError:
                refused = True
        found.within["compiled, but not refused"] = float(not refused), 0.0
    return found


def _against_fp64(
    profile: Profile, calls: list[tuple[Tensor, Tensor, float]], real: Tensor
) -> dict[str, tuple[float, float]]:
    """The profile's logits against those of the same queries and keys in fp64."""
    part, length = profile.attention_logits, real.shape[1]
    place = torch.arange(length)
    seen = (place <= place[:, None]) & real[:, None, None, :] & real[:, None, :, None]
    exact: list[Tensor] = []
    extremes: list[float] = []
    counts = 0
    for site, (q, k, scale) in zip(part.sites, calls, strict=True):
        s = q @ k.repeat_interleave(q.shape[1] // k.shape[1], 1).mT * scale  # (B, H, N, N)
        exact.append(s)
        high = s.masked_fill(~seen, -torch.inf).amax((0, 2, 3)).numpy()
        low = s.masked_fill(~seen, torch.inf).amin((0, 2, 3)).numpy()
        gap = largest([*np.abs(site.max - high), *np.abs(site.min - low)])
        extremes.append(gap / largest([*np.abs(high), *np.abs(low)]))
        counts += int(np.abs(site.count - int(seen.sum())).sum())
    s = torch.stack(exact)  # (layers, B, H, N, N)
    all_seen = seen.expand(s.shape)
    magnitudes = s.abs()[all_seen].sort(descending=True).values
    values = part.largest.values
    top = float(np.abs(values / magnitudes[: len(values)].numpy() - 1).max())
    pad = length - real.sum(1)
    there = []
    for item in part.top(100):
        n, m = (int(pad[item.sequence]) + x for x in (item.query, item.key))
        there.append(abs(float(s[item.layer, item.sequence, item.head, n, m])) / item.value)
    median = float(np.median(magnitudes.numpy()))
    return {
        "count": (float(counts), 0.0),
        "extremes": (largest(extremes), 1e-5),
        "top 100": (top, 1e-5),
        "places": (float(np.abs(np.array(there) - 1).max()), 1e-5),
        "median": (abs((part.median or 0.0) / median - 1), 6e-3),
    }


@contextmanager
def _routed(found: Found) -> Iterator[None]:
    """Report how many of the calls the log-sum-exp took."""
    taken: list[bool] = []
    real = streaming.lse_logits

    def route(*given: Any) -> Any:
        parts = real(*given)
        taken.append(parts is not None)
        return parts

    streaming.lse_logits = route
    try:
        yield
    finally:
        streaming.lse_logits = real
    found.told["by log-sum-exp"] = f"{sum(taken)} of {len(taken)} calls"


def _alike(short: Profile, full: Profile) -> dict[str, tuple[float, float]]:
    """A recording of extremes only against those of the full one."""
    gaps: list[float] = []
    count = 0
    for a, b in zip(short.attention_logits.sites, full.attention_logits.sites, strict=True):
        size = float(b.absmax.max())
        count += int(np.abs(a.count - b.count).sum())
        gaps += [float(np.abs(x - y).max()) / size for x, y in ((a.min, b.min), (a.max, b.max))]
    values, others = short.attention_logits.largest.values, full.attention_logits.largest.values
    gaps.append(float(np.abs(values / others - 1).max()))
    return {"extremes alone": (largest(gaps), 1e-5), "their count": (float(count), 0.0)}
