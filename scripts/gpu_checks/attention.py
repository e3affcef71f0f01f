"""Every attention module on every backend, against quantdiff.attention.reference in fp64."""

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor

from gpu_checks.common import Check, Found, MissingPartError, Place, relative
from quantdiff.attention import (
    DifferentialAttentionV1,
    DifferentialAttentionV2,
    GroupedDifferentialAttention,
    MultiheadAttention,
    flash,
    rotary_table,
)
from quantdiff.attention.backends import visible
from quantdiff.attention.base import Attention
from quantdiff.attention.reference import differential_attention, lambda_v1, lambda_v2, sub_norm
from quantdiff.errors import UsageError

__all__ = ["attention_checks", "flash_state"]

KINDS = ("standard", "v1", "v2", "grouped")
# Relative to the largest magnitude, and to the root mean square.
BOUNDS = {torch.bfloat16: (5e-2, 2e-2), torch.float32: (1e-4, 1e-5)}


def flash_state(kernel: flash.Kernel) -> str | None:
    """None where a flash-attn package works, else why it does not."""
    try:
        found = importlib.import_module(kernel.module)
    except Exception as error:  # whatever a broken build raises
        return f"{kernel.name}: {type(error).__name__}: {error}".splitlines()[0]
    for name in ("flash_attn_func", "flash_attn_varlen_func"):
        if not hasattr(found, name):
            return f"{kernel.name}: {kernel.module} has no {name}"
    return None


def attention_checks(place: Place, *, flex: bool) -> list[Check]:
    """The checks of flex, which take long to compile on a GPU, or those of all other backends."""
    checks: list[Check] = []
    widths = (16,) if place.small else (64, 128)
    for width in widths:
        for kind in KINDS:
            for dtype in BOUNDS:
                if flex:
                    # Each needs a compilation: on a GPU the two extreme layouts suffice.
                    short = not place.small and (
                        kind not in ("standard", "v1") or width != widths[0]
                    )
                    names: list[tuple[str, flash.Kernel | None]] = [] if short else [("flex", None)]
                else:
                    names = [("eager", None), ("sdpa", None)]
                    names += [("flash", kernel) for kernel in flash.KERNELS]
                for backend, kernel in names:
                    title = kernel.name if kernel else backend
                    name = f"{kind}, d = {width}, {title}, {str(dtype)[6:]}"
                    checks.append(
                        (name, partial(_check, place, kind, width, backend, kernel, dtype))
                    )
    return checks


@contextmanager
def _only(kernel: flash.Kernel | None) -> Iterator[None]:
    """Make the backend `flash` use only this package."""
    if kernel is None:
        yield
        return
    known = flash.KERNELS
    flash.KERNELS = (kernel,)
    flash.forget()
    try:
        yield
    finally:
        flash.KERNELS = known
        flash.forget()


def _build(kind: str, width: int) -> Attention:
    """Eight query heads (ten where grouped), each key head read by two or more of them."""
    size = 8 * width
    if kind == "standard":
        return MultiheadAttention(size, 1, 8, 4)
    if kind == "v1":
        return DifferentialAttentionV1(size, 1, 4, 2)
    if kind == "v2":
        return DifferentialAttentionV2(size, 4, 2, width)
    return GroupedDifferentialAttention(size, 1, 10, 2, 4, width)


def _check(
    place: Place,
    kind: str,
    width: int,
    backend: str,
    kernel: flash.Kernel | None,
    dtype: torch.dtype,
) -> Found:
    if kernel is not None and (reason := flash_state(kernel)) is not None:
        raise MissingPartError(reason)
    torch.manual_seed(0)
    rows = 67 if place.small else 515
    module = _build(kind, width)
    module.heads.backend = backend
    with torch.no_grad():
        module.q_proj.weight *= 4  # or attention would be nearly uniform
    module = module.to(place.device, dtype)
    x = torch.randn(3, rows, module.embed_dim, dtype=dtype).to(place.device)
    table = rotary_table(torch.arange(rows, device=place.device), width)
    mask = torch.ones(3, rows, dtype=torch.bool, device=place.device)
    mask[1, : rows // 3], mask[2, rows // 2 :] = False, False  # left and right padding
    caught: list[tuple[Tensor, ...]] = []
    module.heads.register_forward_pre_hook(lambda _, args: caught.append(args))
    found = Found()
    with _only(kernel), torch.no_grad():
        for title, kept in (("plain", None), ("padded", mask)):
            try:
                output = module(x, table, kept)
            except UsageError as error:
                if kernel is None:
                    raise
                raise MissingPartError(str(error)) from None
            exact = _reference(module, x, *caught.pop()[:3], kept)
            largest, rms = relative(output, exact)
            found.within[f"{title} max"] = largest, BOUNDS[dtype][0]
            found.within[f"{title} rms"] = rms, BOUNDS[dtype][1]
        if kernel is not None:
            value_width = width * module.heads.layout.value_width
            parts = flash.plan(width, value_width, flash.capability(x))[1]
            found.told["values"] = "whole" if parts == 1 else f"in {parts} calls"
    return found


def _reference(
    module: Attention, x: Tensor, query: Tensor, key: Tensor, value: Tensor, kept: Tensor | None
) -> Tensor:
    """The module's output from the queries, keys and values that its backend received, in fp64."""
    x, query, key, value = (t.cpu().double() for t in (x, query, key, value))
    weights = {name: t.cpu().double() for name, t in module.state_dict().items()}
    rows, keys = query.shape[2], key.shape[2]
    seen = visible(rows, keys, None if kept is None else kept.cpu())
    lam = None
    if "lambda_q1" in weights:
        vectors = (weights[f"lambda_{name}"] for name in ("q1", "k1", "q2", "k2"))
        lam = lambda_v1(*vectors, module.lambda_init)
    elif "lambda_proj.weight" in weights:
        lam = lambda_v2(x @ weights["lambda_proj.weight"].T).transpose(1, 2)[..., None]
    out = differential_attention(
        query, key, value, scale=module.heads.scale, seen=seen, layout=module.heads.layout, lam=lam
    )  # (B, h, N, w)
    if "lambda_q1" in weights:
        out = sub_norm(out, weights["subln.weight"]) * (1 - module.lambda_init)
    return out.transpose(1, 2).flatten(2) @ weights[f"{module.output_name}.weight"].T
