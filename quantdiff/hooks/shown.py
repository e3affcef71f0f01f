"""Keys and values as attention calls show them: which are new, and which head each belongs to."""

from dataclasses import dataclass

import torch
from torch import Tensor

from quantdiff.errors import RecordingError
from quantdiff.hooks.passes import Pass
from quantdiff.hooks.sequences import Batch

__all__ = ["Shown", "distinct_heads", "show"]


@dataclass(frozen=True, eq=False)
class Shown:
    """The heads of a call's keys or values among those of their module.

    A module's heads are numbered in the order its calls show them in a forward pass, each once: one
    that is repeated for several query heads, or shown again to a second map, has one number.

    Attributes:
        numbers: numbers of the call's heads.
        fresh: (B, g, N, D), the pass's own tokens in the heads that no earlier call of the module
            has shown, numbered from `first`; None if there are none.
        first: see `fresh`.
    """

    numbers: list[int]
    fresh: Tensor | None
    first: int


def show(now: Pass, module: str, kind: str, x: Tensor) -> Shown:
    """Find the heads of a call's keys or values among those of their module.

    Args:
        now: the current pass, which `Runs.watch` informs when the module is done.
        module: name of the attention module.
        kind: `keys` or `values`.
        x: (B, G, M, D), including those of earlier passes.

    Raises:
        RecordingError: there are fewer than the pass has tokens.
    """
    own = _own_tokens(x.detach(), now.batch, module)  # (B, G, N, D)
    pattern, firsts = distinct_heads(own)
    heads = own[:, firsts]
    known = now.shown.setdefault((module, kind), (now.entered[module], []))
    if known[0] != now.entered[module]:
        known = now.shown[module, kind] = (now.entered[module], [])
    first = 0
    for other in known[1]:
        if other.shape == heads.shape and torch.equal(other, heads):
            return Shown([first + i for i in pattern], None, first)
        first += other.shape[1]
    known[1].append(heads)
    return Shown([first + i for i in pattern], heads, first)


def _own_tokens(x: Tensor, batch: Batch, module: str) -> Tensor:
    rows = batch.shape[1]
    # A cache of fixed size has room after the tokens; a sliding one has dropped some.
    start = batch.past - batch.key_offset(x.shape[2])
    if start < 0 or start + rows > x.shape[2]:
        raise RecordingError(
            f"{module} attends to {x.shape[2]} keys in a pass over {rows} tokens; which of them "
            "are new cannot be told"
        )
    return x[:, :, start : start + rows]


def distinct_heads(x: Tensor) -> tuple[list[int], slice]:
    """Which of the distinct heads each head of x (B, G, N, D) is, and where these first occur.

    Heads count as repeated only if all are, equally often, one by one or as a whole; two that
    merely happen to be equal are distinct.
    """
    heads = x.shape[1]
    sample = x[:1, :, :1].cpu()
    for repeat in range(heads, 1, -1):
        if heads % repeat:
            continue
        count = heads // repeat
        for one_by_one, shape in ((True, (count, repeat)), (False, (repeat, count))):
            if all(_repeats(y.unflatten(1, shape), one_by_one) for y in (sample, x)):
                if one_by_one:
                    return [head // repeat for head in range(heads)], slice(0, heads, repeat)
                return [head % count for head in range(heads)], slice(0, count)
    return list(range(heads)), slice(0, heads)


def _repeats(x: Tensor, one_by_one: bool) -> bool:
    """Whether x (B, g, r, N, D), or (B, r, g, N, D), is the same for all r."""
    return bool((x == (x[:, :, :1] if one_by_one else x[:, :1])).all())
