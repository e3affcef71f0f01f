"""Which sequences a forward pass holds, where its tokens are in them, and which are padding."""

import weakref
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quantdiff.errors import RecordingError

__all__ = ["Batch", "Sequences"]


class Batch:
    """The tokens of one forward pass.

    Attributes:
        first: number of the first sequence; row b of the batch is sequence first + b.
        past: tokens already in the cache, padding included.
        kept: (B, past + N) bool, False at padding.
        told: whether a mask has shown which tokens are padding: a 2-D one or a ready one.
        positions: (B, past + N), place of each token among its sequence's real tokens.
    """

    def __init__(self, first: int, past: int, kept: Tensor, told: bool) -> None:
        self.first = first
        self.past = past
        self.told = told
        self.keep(kept)

    def keep(self, kept: Tensor) -> None:
        """Set which tokens are real."""
        self.kept = kept
        self.positions: NDArray[np.int64] = (kept.long().cumsum(1) - 1).clamp(min=0).cpu().numpy()

    @property
    def real(self) -> Tensor:
        """(B, N) bool, False at padding."""
        return self.kept[:, self.past :]

    @property
    def shape(self) -> tuple[int, int]:
        """B and N."""
        return self.kept.shape[0], self.kept.shape[1] - self.past

    def key_offset(self, keys: int) -> int:
        """Absolute position of the first of `keys` cached keys; a sliding cache drops some."""
        return max(0, self.kept.shape[1] - keys)


class Sequences:
    """Numbers sequences across forward passes; a pass that continues a cache keeps its numbers."""

    def __init__(self) -> None:
        self.sequences = 0
        self.tokens = 0
        self.longest = 0
        self._of_cache: dict[int, tuple[weakref.ref[Any], int, Tensor]] = {}

    def begin(
        self,
        batch: int,
        length: int,
        mask: Tensor | None,
        cache: Any,
        *,
        first: int | None = None,
    ) -> Batch:
        """Describe a pass over (batch, length) tokens, and reserve its numbers.

        Args:
            batch, length: B and N.
            mask: (B, past + N), 0 at padding, or None.
            cache: the key-value cache that the pass was given, or None.
            first: the number of the first sequence, if it is known already.
        """
        past = int(cache.get_seq_length()) if cache is not None else 0
        known, before = self._known(cache) if past else (None, None)
        first = known if first is None else first
        device = mask.device if mask is not None else torch.device("cpu")
        kept = torch.ones(batch, past + length, dtype=torch.bool, device=device)
        if mask is not None:
            if mask.shape[0] != batch or not bool(((mask == 0) | (mask == 1)).all()):
                raise RecordingError(
                    f"a 2-D attention mask holds 1 for tokens and 0 for padding, one row per "
                    f"sequence; this one is {tuple(mask.shape)} over {batch} sequences, or holds "
                    "other values"
                )
            columns = min(mask.shape[1], past + length)
            kept[:, :columns] = mask[:, :columns].bool()
        elif before is not None and before.shape == (batch, past):
            kept[:, :past] = before
        if first is None:
            first = self.sequences
        # Reserved now, so that passes in other threads get other numbers.
        self.sequences = max(self.sequences, first + batch)
        return Batch(first, past, kept, mask is not None)

    def end(self, batch: Batch, cache: Any) -> None:
        """Count a pass that was recorded to its end; `cache` is the cache it returned, or None."""
        self.tokens += int(batch.real.sum())
        self.longest = max(self.longest, int(batch.positions.max()) + 1)
        if cache is not None:
            self._of_cache[id(cache)] = (weakref.ref(cache), batch.first, batch.kept)

    def _known(self, cache: Any) -> tuple[int | None, Tensor | None]:
        reference, first, kept = self._of_cache.get(id(cache), (None, None, None))
        known = reference is not None and reference() is cache
        return (first, kept) if known else (None, None)
