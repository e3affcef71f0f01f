"""The sites `keys` and `values`: what a quantized key-value cache holds.

Keys are those that meet the queries, after their rotary embedding; what lies in a model's cache
stays as it is, and is rounded anew in each attention call. For the granularities `token` and
`group` that is the same as rounding once on the way into the cache; ranges over several tokens
(`head`, `channel`) grow with the text.
"""

import dataclasses

from torch import Tensor

from quantdiff.hooks.logits import Logits
from quantdiff.quantization.rounding import in_groups, rounded
from quantdiff.quantization.scheme import Scheme

__all__ = ["keys_of", "values_of"]

# Over which dimensions of (B, G, M, D) a range goes.
_OVER = {"head": (2, 3), "token": (3,), "channel": (2,)}


def keys_of(logits: Logits, scheme: Scheme | None, kept: Tensor | None, name: str) -> Logits:
    """The same call with rounded keys."""
    if scheme is None:
        return logits
    return dataclasses.replace(logits, key=_heads(logits.key, scheme, kept, name))


def values_of(value: Tensor, scheme: Scheme | None, kept: Tensor | None, name: str) -> Tensor:
    """Rounded values, (B, G, M, w)."""
    return value if scheme is None else _heads(value, scheme, kept, name)


def _heads(x: Tensor, scheme: Scheme, kept: Tensor | None, name: str) -> Tensor:
    """x: (B, G, M, D); kept: (B, M) bool, the real tokens, or None for all."""
    real = None if kept is None else kept.to(x.device)[:, None, :, None]
    if scheme.group is None:
        return rounded(x, _OVER[scheme.granularity], scheme, name, real)
    parts = in_groups(x, scheme.group, name, scheme.site)
    real = None if real is None else real[..., None]
    return rounded(parts, (4,), scheme, name, real).flatten(-2)
