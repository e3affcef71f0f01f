"""Which sequences a forward pass holds, where its tokens stand in them, and which are padding."""

import weakref
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

__all__ = ["Batch", "Sequences"]


@dataclass(eq=False)
class Batch:
    """The tokens of one forward pass.

    Attributes:
        first: number of the first sequence; row b of the batch is sequence first + b.
        past: tokens already in the cache, padding included.
        real: (B, N) bool, False at padding.
        positions: (B, past + N), place of each token among its sequence's real tokens.
    """

    first: int
    past: int
    real: Tensor
    positions: NDArray[np.int64]

    @property
    def shape(self) -> tuple[int, int]:
        """B and N."""
        return self.real.shape[0], self.real.shape[1]

    def key_offset(self, keys: int) -> int:
        """Absolute place of the first of `keys` cached keys: a sliding cache has dropped some."""
        return max(0, self.past + self.shape[1] - keys)


class Sequences:
    """Numbers sequences over forward passes; a pass that goes on with a cache keeps its numbers."""

    def __init__(self) -> None:
        self.sequences = 0
        self.tokens = 0
        self.longest = 0
        self._of_cache: dict[int, tuple[weakref.ref[Any], int]] = {}

    def begin(self, batch: int, length: int, mask: Tensor | None, cache: Any) -> Batch:
        """Describe a pass over (batch, length) tokens.

        Args:
            batch, length: B and N.
            mask: (B, past + N), 0 at padding, or None.
            cache: the key-value cache that the pass was given, or None.
        """
        past = int(cache.get_seq_length()) if cache is not None else 0
        first = self._known(cache) if past else None
        if first is None:
            first = self.sequences
        device = mask.device if mask is not None else torch.device("cpu")
        kept = torch.ones(batch, past + length, dtype=torch.bool, device=device)
        if mask is not None:
            columns = min(mask.shape[1], past + length)
            kept[:, :columns] = mask[:, :columns].bool()
        positions = (kept.cumsum(1) - 1).clamp(min=0).cpu().numpy()
        return Batch(first, past, kept[:, past:], positions)

    def end(self, batch: Batch, cache: Any) -> None:
        """Count a pass that was recorded to its end; `cache` is the cache it returned, or None."""
        self.sequences = max(self.sequences, batch.first + batch.shape[0])
        self.tokens += int(batch.real.sum())
        self.longest = max(self.longest, int(batch.positions.max()) + 1)
        if cache is not None:
            self._of_cache[id(cache)] = (weakref.ref(cache), batch.first)

    def _known(self, cache: Any) -> int | None:
        reference, first = self._of_cache.get(id(cache), (None, None))
        return first if reference is not None and reference() is cache else None
