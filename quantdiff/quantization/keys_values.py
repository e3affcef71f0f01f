"""The sites `keys` and `values`: what a quantized key-value cache holds.

Keys are rounded as the queries meet them, after their rotary embedding; the contents of a model's
cache stay unchanged and are rounded anew in each attention call. For the granularities `token` and
`group`, and for static ranges, this equals rounding once on the way into the cache; dynamic ranges
over several tokens (`head`, `channel`) grow with the text. Each query's newest tokens may stay
unrounded: one pass over a whole text then gives the same as one pass per token.
"""

import dataclasses
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from quantdiff.errors import QuantizationError
from quantdiff.hooks.logits import Logits
from quantdiff.hooks.sequences import Batch
from quantdiff.hooks.shown import distinct_heads
from quantdiff.quantization.chosen import chosen_heads
from quantdiff.quantization.newest import Newest, first_exact
from quantdiff.quantization.rounding import in_groups, rounded
from quantdiff.quantization.scheme import Scheme
from quantdiff.quantization.seen import attended

__all__ = ["Cached", "kept_keys", "newest_of", "rounded_heads", "unknown_cache"]

# The dimensions of (B, G, M, D) that a range spans.
_OVER = {"head": (2, 3), "token": (3,), "channel": (2,)}


@dataclasses.dataclass(frozen=True, eq=False)
class Cached:
    """An attention call with its keys and values as a quantized cache holds them.

    Attributes:
        logits: with rounded keys.
        value: (B, G, M, w), rounded.
        newest_keys, newest_values: those that a query meets unrounded; None if there are none.
    """

    logits: Logits
    value: Tensor
    newest_keys: Newest | None = None
    newest_values: Newest | None = None

    def arranged(
        self, of_keys: Callable[[Tensor], Tensor], of_values: Callable[[Tensor], Tensor]
    ) -> "Cached":
        """The same call with its heads rearranged."""
        news = [
            None if newest is None else dataclasses.replace(newest, exact=arrange(newest.exact))
            for newest, arrange in ((self.newest_keys, of_keys), (self.newest_values, of_values))
        ]
        logits = dataclasses.replace(self.logits, key=of_keys(self.logits.key))
        return Cached(logits, of_values(self.value), *news)


def kept_keys(logits: Logits, batch: Batch, name: str) -> Tensor:
    """Which keys of a call are real tokens, (B, M) bool.

    Padding of another sequence, such as an encoder's, is known by the mask alone: no query may
    attend it.

    Raises:
        QuantizationError: a query may attend keys that the pass does not know of.
    """
    count = logits.key.shape[2]
    if logits.cross:
        return attended(logits.visible, count)
    kept = batch.kept[:, batch.key_offset(count) :]
    known = kept.shape[1]
    if known < count:  # a fixed-size cache has room after the tokens, which nothing sees
        start, stop = logits.visible.start, logits.visible.stop
        if bool(((stop > start) & (stop > known)).any()):
            raise unknown_cache(name, count, known)
    return pad(kept, (0, count - known))


def unknown_cache(name: str, keys: int, known: int) -> QuantizationError:
    """The error for keys that the current pass does not know of."""
    return QuantizationError(
        f"{name} attends to {keys} keys where this forward pass knows of {known} tokens; a cache "
        "is to reach the model's forward as a transformers Cache"
    )


def rounded_heads(
    x: Tensor,
    scheme: Scheme | None,
    kept: Tensor | None,
    name: str,
    numbers: Sequence[int] | None = None,
    ends: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """Round the keys or values of the heads that a scheme applies to; leave the others unchanged.

    Args:
        x: (B, G, M, D).
        scheme: for `keys` or `values`, or None.
        kept: (B, M) bool, the real tokens, which set ranges; None for all.
        name: of the attention module.
        numbers: of the heads in the order of the projection; None for that order, in which heads
            repeated for several query heads count once.
        ends: static ranges, (G, 1, 1) or (G, 1, D) each; None for dynamic ones.

    Raises:
        QuantizationError: NaN or infinity, nonzero values where a static range is zero, or a group
            that does not divide the channels.
        UsageError: a head that does not exist.
    """
    if scheme is None:
        return x
    heads = None
    if scheme.heads is not None:
        total = x.shape[1]
        if numbers is None:
            numbers, _ = distinct_heads(x.detach())
            total = max(numbers) + 1
        heads = chosen_heads(scheme, numbers, total, name, x.device)
    found = _heads(x, scheme, kept, name, ends, heads)
    return found if heads is None else torch.where(heads[:, None, None], found, x)


def newest_of(
    x: Tensor, scheme: Scheme | None, logits: Logits, batch: Batch, name: str
) -> Newest | None:
    """Keys or values, (B, G, M, D), with the places of those that a query meets unrounded.

    Raises:
        QuantizationError: the keys belong to another sequence, in which none is newest, or a query
            may attend tokens after its own.
    """
    if scheme is None or not scheme.newest:
        return None
    if logits.cross:
        raise QuantizationError(
            f"{name} attends to another sequence, whose tokens are all as old: leave newest at 0 "
            "for its layer"
        )
    start, stop = logits.visible.start, logits.visible.stop  # (B, N)
    own = batch.past - batch.key_offset(x.shape[2])  # the first query's key
    behind = torch.arange(own + 1, own + 1 + stop.shape[1], device=stop.device)
    if bool(((stop > start) & (stop > behind)).any()):
        raise QuantizationError(
            f"{name} lets a token attend those behind it, so that its own is not the newest: leave "
            "newest at 0 for its layer"
        )
    return Newest(x, first_exact(batch, x.shape[2], scheme.newest))


def _heads(
    x: Tensor,
    scheme: Scheme,
    kept: Tensor | None,
    name: str,
    ends: tuple[Tensor, Tensor] | None,
    heads: Tensor | None,
) -> Tensor:
    """x: (B, G, M, D); kept: (B, M) bool, the real tokens; heads: (G,) bool; None for all."""
    real = None if kept is None else kept.to(x.device)[:, None, :, None]
    if heads is not None:  # the results of the others are not used
        real = heads[:, None, None] if real is None else real & heads[:, None, None]
    if scheme.group is None:
        return rounded(x, _OVER[scheme.granularity], scheme, name, real, ends)
    parts = in_groups(x, scheme.group, name, scheme.site)
    real = None if real is None else real[..., None]
    return rounded(parts, (4,), scheme, name, real).flatten(-2)
