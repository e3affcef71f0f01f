"""Masks of flex attention, from their blocks alone: no n×n mask is built."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

__all__ = ["BLOCK", "block_mask", "causal_blocks"]

BLOCK = 128  # rows and keys of a block, as flex attention requires


def block_mask(
    some: Tensor, whole: Tensor, shape: tuple[int, int], mask_mod: Callable[..., Tensor]
) -> Any:
    """The mask of N queries and M keys, in R × C blocks.

    Args:
        some: (B, R, C) bool, True where a query of the block may see a key of it.
        whole: (B, R, C) bool, True where every query sees every key: `mask_mod` is not called.
        shape: N and M.
        mask_mod: as flex attention calls it: batch, head, query, key.

    Returns:
        A `BlockMask`.
    """
    from torch.nn.attention.flex_attention import BlockMask

    return BlockMask.from_kv_blocks(
        *_listed(some & ~whole), *_listed(whole), BLOCK_SIZE=BLOCK, mask_mod=mask_mod,
        seq_lengths=shape,
    )  # fmt: skip


def _listed(chosen: Tensor) -> tuple[Tensor, Tensor]:
    """Number of chosen blocks per row, (B, 1, R), and all blocks, chosen first, (B, 1, R, C)."""
    count = chosen.sum(-1, dtype=torch.int32)[:, None]
    order = torch.argsort((~chosen).to(torch.int8), dim=-1, stable=True).to(torch.int32)[:, None]
    return count.contiguous(), order.contiguous()


def causal_blocks(
    rows: int, keys: int, kept: Tensor | None, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Blocks of causal attention whose N queries are the last of M tokens.

    A block with padding counts as seen in part.

    Args:
        rows, keys: N and M.
        kept: (B, M), False at padding; or None.
        device: of the queries.

    Returns:
        `some` and `whole` of `block_mask`; B is 1 without padding.
    """
    past = keys - rows
    row = torch.arange(0, rows, BLOCK, device=device)[:, None]  # (R, 1)
    key = torch.arange(0, keys, BLOCK, device=device)  # (C,)
    some = key <= (row + BLOCK - 1).clamp(max=rows - 1) + past  # (R, C)
    whole = key + BLOCK - 1 <= row + past  # (R, C)
    whole = whole & (key + BLOCK <= keys) & (row + BLOCK <= rows)
    if kept is None:
        return some[None], whole[None]
    queries, seen = (_all(x) for x in (kept[:, past:], kept))  # (B, R), (B, C)
    whole = whole & queries[:, :, None] & seen[:, None]  # (B, R, C)
    return some.expand_as(whole), whole


def _all(kept: Tensor) -> Tensor:
    """Whether a block of tokens has no padding: (B, n) to (B, blocks)."""
    return F.pad(kept, (0, -kept.shape[1] % BLOCK), value=False).unflatten(1, (-1, BLOCK)).all(-1)
