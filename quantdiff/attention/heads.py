"""The softmax maps of all heads of a layer, applied to their values; where hooks record them."""

from itertools import pairwise

import torch
from torch import Tensor, nn

from quantdiff.attention.backends import BACKENDS, attend
from quantdiff.attention.layouts import Layout
from quantdiff.errors import UsageError

__all__ = ["Heads"]


class Heads(nn.Module):
    """Attention of every query head, in the calls that the layout requires; has no parameters.

    A module of its own, so that hooks see the queries and keys of all heads in one call, whatever
    the backend.

    Args:
        layout: how the heads pair up.
        scale: of the logits.
        backend: `eager`, `sdpa`, `flex`, `flash`, or `auto`.

    Raises:
        UsageError: an unknown backend.
    """

    def __init__(self, layout: Layout, scale: float, backend: str = "auto") -> None:
        super().__init__()
        if backend not in (*BACKENDS, "auto"):
            known = ", ".join([*BACKENDS, "auto"])
            raise UsageError(f"unknown attention backend {backend!r}; known: {known}")
        self.layout = layout
        self.scale = scale
        self.backend = backend

    def extra_repr(self) -> str:
        """What printing the module shows."""
        return f"layout={self.layout}, backend={self.backend}"

    def forward(self, query: Tensor, key: Tensor, value: Tensor, kept: Tensor | None) -> Tensor:
        """All maps times their values.

        Args:
            query: (B, H, N, d).
            key, value: (B, G, M, d), the N tokens being the last of M.
            kept: (B, M), 0 or False at padding, the very tensor given to the model, since the
                recorder reads a mask once for all layers that share it; or None.

        Returns:
            (B, H, N, w), where w is d or 2d, depending on the layout.
        """
        heads, kv_heads = query.shape[1], key.shape[1]
        calls = self.layout.calls(heads, kv_heads)
        kept = None if kept is None else kept.bool()
        outs = []
        for call in calls:
            values = [_take(value, part) for part in zip(*call.values, strict=True)]
            outs.append(
                attend(
                    _take(query, call.queries),
                    _take(key, call.keys),
                    values[0] if len(values) == 1 else torch.cat(values, -1),  # (B, G', M, w)
                    scale=self.scale,
                    kept=kept,
                    backend=self.backend,
                )
            )
        if len(outs) == 1:
            return outs[0]
        order = [head for call in calls for head in call.queries]
        back = sorted(range(heads), key=order.__getitem__)
        return torch.cat(outs, 1)[:, back]


def _take(x: Tensor, heads: tuple[int, ...]) -> Tensor:
    """Some heads of (B, H, N, d): a view where they are evenly spaced."""
    steps = {b - a for a, b in pairwise(heads)} or {1}
    if len(steps) == 1 and (step := steps.pop()) > 0:
        return x[:, heads[0] : heads[-1] + 1 : step]
    return x[:, list(heads)]
