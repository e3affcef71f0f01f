"""Quantized attention, in blocks and in flex attention, against everything materialised in fp64."""

import math
import time
from functools import partial

import torch
from torch import Tensor

from gpu_checks.common import Check, Found, Place
from quantdiff import Scheme
from quantdiff.hooks.logits import Logits
from quantdiff.quantization import attention, flex
from quantdiff.quantization.logits import softmax_of
from quantdiff.statistics import Visible

__all__ = ["quantization_checks"]

SITE = "attention_logits"
HEADS, GROUPS = 8, 2
NEAR = 1e-4  # of a step: chance decides where a logit this near to a boundary goes


def quantization_checks(place: Place) -> list[Check]:
    """Blocks for every dtype and granularity, flex attention where it compiles, and their times."""
    checks: list[Check] = []
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for granularity in ("tensor", "head", "row"):
            for symmetric in (True, False):
                scheme = Scheme(SITE, 4, granularity=granularity, symmetric=symmetric)
                kind = "symmetric" if symmetric else "asymmetric"
                name = f"blocks, {granularity}, {kind}, {str(dtype).removeprefix('torch.')}"
                checks.append((name, partial(_compare, place, scheme, dtype, compiled=False)))
        name = f"flex, {str(dtype).removeprefix('torch.')}"
        scheme = Scheme(SITE, 6, granularity="head")
        checks.append((name, partial(_compare, place, scheme, dtype, compiled=True)))
    checks.append(("gradients in blocks", partial(_gradients, place)))
    checks.append(("time of a call", partial(_times, place)))
    return checks


def _inputs(place: Place, rows: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Visible]:
    generator = torch.Generator().manual_seed(rows)
    q, k, v = (
        (torch.randn(2, h, rows, 64, generator=generator) * 2).to(place.device, dtype)
        for h in (HEADS, GROUPS, GROUPS)
    )
    visible = Visible.causal(2, rows, rows, place.device)
    pad = rows // 5
    visible.start[1] = pad
    visible.stop[1, :pad] = 0
    return q, k, v, visible


def _exact(
    q: Tensor, k: Tensor, v: Tensor, visible: Visible, scheme: Scheme
) -> tuple[Tensor, Tensor]:
    """Output (B, H, N, D) in fp64, and which rows hold a logit near a boundary, (B, H, N)."""
    wide, values = (x.double().repeat_interleave(HEADS // GROUPS, 1) for x in (k, v))
    x = q.double() @ wide.mT * q.shape[-1] ** -0.5  # (B, H, N, M)
    column = torch.arange(x.shape[-1], device=x.device)
    seen = (column >= visible.start[:, None, :, None]) & (column < visible.stop[:, None, :, None])
    over = {"tensor": (1, 2, 3), "head": (2, 3), "row": (3,)}[scheme.granularity]
    least = torch.where(seen, x, 0.0).amin(over, keepdim=True)
    most = torch.where(seen, x, 0.0).amax(over, keepdim=True)
    if scheme.symmetric:
        low, high = 1 - 2 ** (scheme.bits - 1), 2 ** (scheme.bits - 1) - 1
        step = (torch.maximum(-least, most) / high).float().double()
        zero = torch.zeros_like(step)
    else:
        low, high = 0, 2**scheme.bits - 1
        step = ((most - least) / high).float().double()
        zero = torch.round(-least / step)
    step = torch.where(step == 0, 1.0, step)
    y = x / step
    rounded = ((torch.round(y) + zero.nan_to_num()).clamp(low, high) - zero.nan_to_num()) * step
    weights = torch.where(seen, rounded, -torch.inf).softmax(-1).nan_to_num()
    near = (((y - y.floor() - 0.5).abs() < NEAR) & seen).any(-1)
    return weights @ values, near


def _compare(place: Place, scheme: Scheme, dtype: torch.dtype, *, compiled: bool) -> Found:
    q, k, v, visible = _inputs(place, 150 if place.small else 700, dtype)
    softmax = softmax_of(Logits(q, k, q.shape[-1] ** -0.5, visible), scheme, None, "check")
    run = flex.attend if compiled else attention.attend
    with torch.no_grad():
        out = run(q, k, v, softmax).double()
    exact, near = _exact(q, k, v, visible, scheme)
    gap = (out - exact).abs().amax(-1)[~near] / v.double().abs().max()  # (rows,)
    rounding = 2e-5 if dtype == torch.float32 else 1e-2
    found = Found()
    # Sums in another order also move a logit that is a little farther from its boundary.
    found.within["share of rows that differ"] = float((~(gap <= rounding)).double().mean()), 0.005
    found.within["not finite"] = float((~torch.isfinite(out)).sum()), 0.0
    found.told["rows left out"] = f"{float(near.double().mean()):.1%}"
    return found


def _gradients(place: Place) -> Found:
    """Straight-through gradients: at 8 bits they are nearly those of the plain softmax."""
    q, k, v, visible = _inputs(place, 100, torch.float32)
    given = [x.clone().requires_grad_() for x in (q, k, v)]
    scale = q.shape[-1] ** -0.5
    logits = Logits(given[0], given[1], scale, visible)
    out = attention.attend(*given, softmax_of(logits, Scheme(SITE, 8, granularity="row"), None, ""))
    found = torch.autograd.grad(out.square().sum(), given)
    wide, values = (x.repeat_interleave(HEADS // GROUPS, 1) for x in given[1:])
    x = given[0] @ wide.mT * scale
    column = torch.arange(x.shape[-1], device=x.device)
    seen = (column >= visible.start[:, None, :, None]) & (column < visible.stop[:, None, :, None])
    some = seen.any(-1, keepdim=True)
    weights = torch.where(some, x.masked_fill(~seen, -torch.inf), 0.0).softmax(-1)
    plain = torch.where(seen, weights, 0.0) @ values
    expected = torch.autograd.grad(plain.square().sum(), given)
    result = Found()
    for name, a, b in zip("qkv", found, expected, strict=True):
        cosine = torch.nn.functional.cosine_similarity(a.flatten(), b.flatten(), dim=0)
        result.within[f"1 − cosine to the plain gradient of {name}"] = 1 - float(cosine), 0.01
    return result


def _times(place: Place) -> Found:
    """Ratios to plain scaled_dot_product_attention, medians of interleaved calls."""
    rows = 256 if place.small else 4096
    dtype = torch.float32 if place.small else torch.bfloat16
    q, k, v, visible = _inputs(place, rows, dtype)
    logits = Logits(q, k, q.shape[-1] ** -0.5, visible)
    static = softmax_of(logits, Scheme(SITE, 4, granularity="head"), None, "")
    row = softmax_of(logits, Scheme(SITE, 4, granularity="row"), None, "")
    plain = torch.nn.functional.scaled_dot_product_attention
    calls = {
        "sdpa": lambda: plain(q, k, v, is_causal=True, enable_gqa=True),
        "blocks, known range": lambda: attention.attend(q, k, v, static),
        "blocks, row": lambda: attention.attend(q, k, v, row),
        "flex, known range": lambda: flex.attend(q, k, v, static),
    }
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    with torch.no_grad():
        for turn in range(2 if place.small else 12):
            for name, call in calls.items():
                place.wait()
                begin = time.perf_counter()
                call()
                place.wait()
                if turn:
                    seconds[name].append(time.perf_counter() - begin)
    medians = {name: sorted(times)[len(times) // 2] for name, times in seconds.items()}
    found = Found()
    found.within["calls that took no time"] = float(sum(not x > 0 for x in medians.values())), 0.0
    base = medians.pop("sdpa")
    found.told["sdpa"] = f"{base * 1e3:.2f} ms at n = {rows}"
    found.told |= {name: f"× {value / base:.2f}" for name, value in medians.items()}
    assert math.isfinite(base)
    return found
