"""What the hooks pass on from one attention call."""

from dataclasses import dataclass

import torch
from torch import Tensor

from quantdiff.hooks.biases import Bias
from quantdiff.statistics import Visible

__all__ = ["HeadsOf", "Logits", "as_multiplied"]


@dataclass(frozen=True, eq=False)
class Logits:
    """The logits softcap(q·kᵀ·scale) + bias, where they are visible.

    Attributes:
        query: (B, H, N, D).
        key: (B, G, M, D).
        scale, visible, softcap, bias: as in `measure_logits`.
        cross: whether it is cross-attention, whose keys have their own numbering.
        sinks: learned logits without a key that take a share of each row, (H,), or None.
    """

    query: Tensor
    key: Tensor
    scale: float
    visible: Visible
    softcap: float | None = None
    bias: Bias | None = None
    cross: bool = False
    sinks: Tensor | None = None

    def distinct(self, step: int) -> tuple[Tensor, Tensor]:
        """Queries and keys of every `step`-th head, if each `step` query heads are one repeated."""
        if step == 1:
            return self.query, self.key
        heads, kv_heads = self.query.shape[1], self.key.shape[1]
        sources = [head * kv_heads // heads for head in range(0, heads, step)]
        return self.query[:, ::step], self.key[:, sources]


@dataclass(frozen=True)
class HeadsOf:
    """Which heads of an attention module one call computes, if each map has its own call.

    Attributes:
        branch: 1 or 2.
        heads: their indices in the order of the projection.
        total: number of query heads H of the module.
        step: each run of this many query heads of the call is one head repeated.
    """

    branch: int
    heads: tuple[int, ...]
    total: int
    step: int = 1


def as_multiplied(query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
    """q and k in the dtype in which they are multiplied: autocast may round them first."""
    device = query.device.type
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        query, key = (x if x.dtype == torch.float64 else x.to(dtype) for x in (query, key))
    return query, key
