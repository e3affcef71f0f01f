"""Softmax attention over grouped heads, in the requested implementation.

All backends take and return the same: causal attention of N queries at the end of M keys, padding
left out, rows of padded queries zero.
"""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import _disable_current_modes

from quantdiff.attention import flash
from quantdiff.attention.blocks import block_mask, causal_blocks
from quantdiff.errors import UsageError

__all__ = ["BACKENDS", "attend", "choose", "visible"]


def visible(rows: int, keys: int, kept: Tensor | None, device: Any = None) -> Tensor:
    """Which keys a query may attend to: (1 or B, 1, N, M), True where it may.

    Args:
        rows, keys: N and M; the queries are the last N of the M tokens.
        kept: (B, M), False at padding; or None.
    """
    place = torch.arange(keys, device=device if kept is None else kept.device)
    seen = place[None, :] <= place[keys - rows :, None]  # (N, M)
    if kept is None:
        return seen[None, None]
    return seen & kept[:, None, None, :] & kept[:, None, keys - rows :, None]


def attend(
    query: Tensor, key: Tensor, value: Tensor, *, scale: float, kept: Tensor | None, backend: str
) -> Tensor:
    """Causal softmax attention with grouped queries.

    Args:
        query: (B, H, N, d).
        key: (B, G, M, d), M ≥ N; query head i reads key head i // (H/G).
        value: (B, G, M, w).
        scale: of the logits.
        kept: (B, M) bool, False at padding; None where there is none.
        backend: a name of `BACKENDS`, or `auto`.

    Returns:
        (B, H, N, w), zeros in the rows of padded queries.

    Raises:
        UsageError: an unknown backend, or shapes that it does not support.
    """
    if kept is not None and bool(kept.all()):
        kept = None
    if backend == "auto":
        backend = choose(query, value.shape[-1])
    if backend not in BACKENDS:
        known = ", ".join([*BACKENDS, "auto"])
        raise UsageError(f"unknown attention backend {backend!r}; known: {known}")
    out = BACKENDS[backend](query, key, value, scale, kept)
    if kept is not None:
        real = kept[:, None, -query.shape[2] :, None]
        out = out.masked_fill(~real, 0.0)
    return out


def choose(query: Tensor, value_width: int) -> str:
    """What `auto` means for these tensors: flash on a GPU where it is installed, else sdpa."""
    if not query.is_cuda or query.dtype not in (torch.float16, torch.bfloat16):
        return "sdpa"
    found = flash.find(query.shape[-1], value_width, flash.capability(query))
    return "sdpa" if found is None else "flash"


def _with_diagonal(rows: int, keys: int, kept: Tensor) -> Tensor:
    """`visible`, but a padded query sees itself: a row without any key gives NaN gradients."""
    seen = visible(rows, keys, kept)
    place = torch.arange(keys, device=kept.device)
    return seen | (place[None, :] == place[keys - rows :, None])


def _eager(query: Tensor, key: Tensor, value: Tensor, scale: float, kept: Tensor | None) -> Tensor:
    groups = query.shape[1] // key.shape[1]
    rows, keys = query.shape[2], key.shape[2]
    key, value = (x.repeat_interleave(groups, 1) for x in (key, value))
    logits = (query * scale) @ key.transpose(2, 3)  # (B, H, N, M), within fp16's range
    if kept is None:
        seen = visible(rows, keys, None, query.device)
    else:
        seen = _with_diagonal(rows, keys, kept)
    logits = logits.masked_fill(~seen, -torch.inf)
    upper = torch.float64 if query.dtype == torch.float64 else torch.float32
    return logits.softmax(-1, dtype=upper).to(query.dtype) @ value


def _sdpa(query: Tensor, key: Tensor, value: Tensor, scale: float, kept: Tensor | None) -> Tensor:
    width, rows, keys = query.shape[-1], query.shape[2], key.shape[2]
    if value.shape[-1] > width and value.shape[-1] % width == 0:
        # torch's fused kernels require equal widths; the one that does not materialises (N, M).
        parts = [_sdpa(query, key, part, scale, kept) for part in value.split(width, -1)]
        return torch.cat(parts, -1)
    mask = None
    if kept is not None:
        mask = _with_diagonal(rows, keys, kept)
    elif 1 < rows < keys:
        mask = visible(rows, keys, None, query.device)
    grouped = query.shape[1] != key.shape[1]
    if grouped and query.is_cuda and (mask is not None or query.dtype == torch.float32):
        # torch's only fused kernel for these has no groups; without it (N, M) is materialised.
        key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))
        grouped = False
    return F.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=mask,
        is_causal=mask is None and rows > 1,
        scale=scale,
        enable_gqa=grouped,
    )


def _flex(query: Tensor, key: Tensor, value: Tensor, scale: float, kept: Tensor | None) -> Tensor:
    from torch.nn.attention.flex_attention import flex_attention

    cpu = query.device.type == "cpu"
    if cpu and torch.is_grad_enabled() and any(x.requires_grad for x in (query, key, value)):
        raise UsageError("flex_attention has no backward pass on a CPU; use backend='sdpa'")
    rows, keys = query.shape[2], key.shape[2]
    past = keys - rows

    def mask_mod(b: Tensor, h: Tensor, n: Tensor, m: Tensor) -> Tensor:
        causal = m <= n + past
        if kept is None:
            return causal
        return (causal & kept[b, m] & kept[b, n + past]) | (m == n + past)

    blocks = causal_blocks(rows, keys, kept, query.device)
    mask = block_mask(*blocks, (rows, keys), mask_mod)
    # Not compiled on a CPU: compiling takes longer there than most runs.
    function: Callable[..., Tensor] = flex_attention if cpu else _compiled_flex()
    # It does not run under a mode such as the one that a recording uses to find flash-attn. Code
    # that is being compiled runs under none.
    with nullcontext() if torch.compiler.is_compiling() else _disable_current_modes():
        return function(
            query,
            key,
            value,
            block_mask=mask,
            scale=scale,
            enable_gqa=query.shape[1] != key.shape[1],
        )


_COMPILED: list[Callable[..., Tensor]] = []


def _compiled_flex() -> Callable[..., Tensor]:
    from torch.nn.attention.flex_attention import flex_attention

    if not _COMPILED:
        _COMPILED.append(torch.compile(flex_attention))
    return _COMPILED[0]


def _flash(query: Tensor, key: Tensor, value: Tensor, scale: float, kept: Tensor | None) -> Tensor:
    kernel, parts = flash.plan(query.shape[-1], value.shape[-1], flash.capability(query))
    chunks = value.chunk(parts, -1)
    outs = [flash.call(kernel, query, key, chunk, scale, kept) for chunk in chunks]
    return outs[0] if parts == 1 else torch.cat(outs, -1)


BACKENDS: dict[str, Callable[[Tensor, Tensor, Tensor, float, Tensor | None], Tensor]] = {
    "eager": _eager,
    "sdpa": _sdpa,
    "flex": _flex,
    "flash": _flash,
}
