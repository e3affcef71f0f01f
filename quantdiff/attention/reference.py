"""Differential attention in plain torch, everything materialised, at any dtype up to fp64.

The reference of every fast path. Sources: V1, arXiv 2410.05258, equations 1 to 3 and its
official code (microsoft/unilm, Diff-Transformer, multihead_flashdiff_1.py); V2, the official code
(Diff-Transformer-V2, multihead_flashdiffv2.py); grouped, arXiv 2510.06949.
"""

import math

import torch
from torch import Tensor

from quantdiff.attention.layouts import Layout

__all__ = [
    "differential_attention",
    "differential_maps",
    "lambda_init",
    "lambda_v1",
    "lambda_v2",
    "softmax_maps",
    "sub_norm",
]


def lambda_init(depth: float) -> float:
    """λ_init = 0.8 − 0.6·exp(−0.3·depth), the first layer having depth 0 (2410.05258, eq. 3).

    The paper counts layers from 1 and writes l − 1. Some public ports pass depth − 1 and so begin
    at −0.0099; a checkpoint must be read with the convention it was trained with.
    """
    return 0.8 - 0.6 * math.exp(-0.3 * depth)


def lambda_v1(q1: Tensor, k1: Tensor, q2: Tensor, k2: Tensor, init: float) -> Tensor:
    """λ = exp(λq1·λk1) − exp(λq2·λk2) + λ_init, a scalar (2410.05258, eq. 2).

    Args:
        q1, k1, q2, k2: the four vectors, (d,), in fp32 or fp64.
        init: λ_init of the layer.
    """
    return torch.exp((q1 * k1).sum()) - torch.exp((q2 * k2).sum()) + init


def lambda_v2(projected: Tensor) -> Tensor:
    """λ = sigmoid(W·x) per token and head, of the shape of its input (official V2 code)."""
    return torch.sigmoid(projected)


def softmax_maps(query: Tensor, key: Tensor, scale: float, seen: Tensor, layout: Layout) -> Tensor:
    """The softmax map of every query head.

    Args:
        query: (B, H, N, d); key: (B, G, M, d), heads in the order of their projections.
        scale: of the logits.
        seen: broadcastable to (B, H, N, M), True where a query may attend. A row with nothing to
            attend to is all zeros.
        layout: which key head a query head reads.

    Returns:
        (B, H, N, M), of the query's dtype.
    """
    key = key[:, layout.key_heads(query.shape[1], key.shape[1])]  # (B, H, M, d)
    logits = torch.einsum("bhnd,bhmd->bhnm", query, key) * scale
    logits = logits.masked_fill(~seen, -torch.inf)
    top = logits.amax(-1, keepdim=True).nan_to_num(neginf=0.0)
    weights = torch.exp(logits - top)
    return weights / weights.sum(-1, keepdim=True).clamp(min=torch.finfo(weights.dtype).tiny)


def differential_maps(maps: Tensor, lam: Tensor, layout: Layout) -> Tensor:
    """Map 1 minus λ times map 2 of every pair.

    Args:
        maps: softmax maps, (B, H, N, M).
        lam: λ, broadcastable to (B, h, N, 1): a scalar in V1, one per token and head in V2.
        layout: a differential one.

    Returns:
        (B, h, N, M); its rows sum to 1 − λ.
    """
    first, second = layout.pairs(maps.shape[1])
    return maps[:, first] - lam * maps[:, second]


def sub_norm(x: Tensor, weight: Tensor | None, eps: float = 1e-5) -> Tensor:
    """RMS norm of each head's output (2410.05258, section 2.1): x / √(mean(x²) + eps) · weight.

    Args:
        x: (..., w).
        weight: (w,), or None.
        eps: 1e-5 in the official code.
    """
    x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    return x if weight is None else x * weight


def differential_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    scale: float,
    seen: Tensor,
    layout: Layout,
    lam: Tensor | None = None,
) -> Tensor:
    """The output of every head left after the subtraction, before any norm.

    Args:
        query: (B, H, N, d); key, value: (B, G, M, d).
        scale, seen: as in `softmax_maps`.
        layout: of the heads; `none` gives standard attention.
        lam: as in `differential_maps`; None for `none`.

    Returns:
        (B, h, N, w), where w is d or 2d and h the number of heads left.
    """
    heads, kv_heads = query.shape[1], key.shape[1]
    weights = softmax_maps(query, key, scale, seen, layout)
    sources = layout.value_heads(heads, kv_heads)
    if layout.differential:
        if lam is None:
            raise ValueError(f"lam is missing; the layout {layout} subtracts λ times its map 2")
        weights = differential_maps(weights, lam, layout)
        sources = [sources[head] for head in layout.pairs(heads)[0]]
    # (B, h, M, w): the value heads of each, side by side.
    value = torch.cat([value[:, list(part)] for part in zip(*sources, strict=True)], -1)
    return torch.einsum("bhnm,bhmw->bhnw", weights, value)
