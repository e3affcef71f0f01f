"""Keys, values and attention maps on their grids in plain fp64, and how near results must be."""

import torch

from quantdiff.attention import layout
from tests import reference
from tests.hooks.test_differential import OWN

LAYOUTS = (*OWN, "halves")
WIDTHS = range(2, 9)
SMALL = 1e-6  # of the largest value
# Sums over other shapes round otherwise, and so may what lies this near to a boundary, in steps.
REACH = 1e-4


def on_grids(x, over, kept, scheme, reach=2e-5):
    """x with a grid over each group of its dimensions, fp64, and where either side is right.

    Args:
        x: any shape.
        over: the dimensions that share a grid.
        kept: bool, broadcastable to x: what sets the ranges, which hold zero.
        scheme: its bits and symmetry.
        reach: how near to a boundary chance decides, in steps: at 255 of them a division in fp32
            is off by 1.5e-5.
    """
    x = x.double()
    inside = torch.where(kept, x, 0.0)
    least, most = inside.amin(over, keepdim=True), inside.amax(over, keepdim=True)
    if scheme.symmetric:
        high = 2 ** (scheme.bits - 1) - 1
        low, span = -high, torch.maximum(-least, most)
    else:
        high, least, most = 2**scheme.bits - 1, least.clamp(max=0), most.clamp(min=0)
        low, span = 0, most - least
    step = (span / high).float().double()
    step = torch.where(step == 0, 1.0, step)
    zero = torch.zeros_like(step) if scheme.symmetric else (-least / step).round()
    y = x / step
    near = ((y - y.floor() - 0.5).abs() < reach) & kept
    return ((y.round() + zero).clamp(low, high) - zero) * step, near


def in_cache(x, kept, scheme, reach=2e-5):
    """Keys or values, (B, G, M, D), as a quantized cache holds them; kept: (B, M)."""
    real = kept[:, None, :, None]
    if scheme.group is None:
        over = {"token": (3,), "head": (2, 3), "channel": (2,)}[scheme.granularity]
        return on_grids(x, over, real, scheme, reach)
    parts = on_grids(x.unflatten(-1, (-1, scheme.group)), (4,), real[..., None], scheme, reach)
    return tuple(part.flatten(-2) for part in parts)


def reached(name, q, k, v, seen):
    """Where in the output, (B, H, N, w), the chosen keys and values, bool as those, count."""
    k, v = arranged(name, q, k, v)
    by_key = (seen & k.any(-1)[:, :, None]).any(-1, keepdim=True)
    return by_key | (seen.double() @ v.double() > 0)


def check(found, expected, unsure, share=0.05):
    """Equal, but for what a value on a boundary counts in; that may be a small share."""
    gap = torch.where(unsure, 0.0, (found - expected).abs()).max()
    assert gap <= SMALL * (1 + expected.abs().max())
    assert unsure.double().mean() <= share


def cached(caught):
    """Queries, keys and values as a cache holds them, real tokens, what is seen."""
    q, k, v, kept = caught["args"]
    kept = kept.bool()
    causal = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool).tril()
    return q, k, v, kept, causal & kept[:, None, :, None] & kept[:, None, None]


def arranged(name, q, k, v):
    """Keys of every query head, and values of every head's width."""
    kinds = layout(name)
    parts = zip(*kinds.value_heads(q.shape[1], v.shape[1]), strict=True)
    wide = torch.cat([v[:, list(part)] for part in parts], -1)
    return k[:, kinds.key_heads(q.shape[1], k.shape[1])], wide


def maps_and_values(q, k, v, seen, scale):
    x = reference.logits(q, k, scale)
    weights = torch.where(seen, x.masked_fill(~seen, -torch.inf).softmax(-1), 0.0).nan_to_num()
    v = v.double().repeat_interleave(q.shape[1] // v.shape[1], 1)
    return weights, v


def rounded_maps(weights, wide, seen, bits, granularity):
    """The output with rounded weights, and which rows have one at a boundary."""
    over = {"tensor": (1, 2, 3), "head": (2, 3), "row": (3,)}[granularity]
    step = (weights.amax(over, keepdim=True) / (2**bits - 1)).float().double()
    step = torch.where(step == 0, 1.0, step)
    y = weights / step
    # An fp32 softmax is off by some 1e-6 of a weight.
    unsure = (((y - y.floor() - 0.5).abs() < 2e-6 * 2**bits) & seen).any(-1, keepdim=True)
    return y.round() * step @ wide, unsure
