"""What an attention function's mask means: which logits may be attended, and what is added.

Implementations read their masks in different ways, and so do the functions here.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from quantdiff.errors import RecordingError
from quantdiff.hooks.biases import ROWS, Bias, refuse_fill
from quantdiff.hooks.dispatch import AttentionCall
from quantdiff.hooks.flash import FlashCall
from quantdiff.hooks.own import HeadsCall
from quantdiff.hooks.padding import PACKED
from quantdiff.hooks.sdpa import SdpaCall
from quantdiff.hooks.sequences import Batch
from quantdiff.statistics import Visible

__all__ = ["check_options", "read_flash", "read_heads", "read_mask", "read_sdpa"]

# Keywords that leave the logits as they are. Sliding windows are in the mask already, except for
# the flash functions, which read the keyword.
_HARMLESS = {
    "cache_position", "deterministic", "dropout", "is_causal", "kernel_options", "layer_idx",
    "logits_to_keep", "num_items_in_batch", "output_attentions", "output_hidden_states",
    "position_bias", "position_ids", "return_dict", "s_aux", "scaling", "sliding_window", "softcap",
    "training", "use_cache",
}  # fmt: skip


def check_options(call: AttentionCall) -> None:
    """Refuse keywords whose effect on the logits is not known.

    Raises:
        RecordingError: names the keyword and the module's class.
    """
    unknown = sorted(
        name
        for name, value in call.options.items()
        if name not in _HARMLESS and value is not None and value is not False
    )
    if unknown:
        raise RecordingError(
            f"{type(call.module).__name__} passes {', '.join(unknown)} to its attention function; "
            "quantdiff does not know what that does to the logits and refuses to guess"
        )


def read_mask(call: AttentionCall) -> tuple[Visible, Bias | None]:
    """Which logits of a call count, and what is added to them, or None.

    Raises:
        RecordingError: an unknown implementation or kind of mask, or what is added appears to be a
            mask itself; see `refuse_fill`.
    """
    reader = _READERS.get(call.implementation)
    if reader is None:
        raise RecordingError(
            f"the attention implementation {call.implementation!r} is not known; load the model "
            f"with one of {', '.join(_READERS)}"
        )
    return reader(call)


def read_sdpa(call: SdpaCall, name: str) -> tuple[Visible, Bias | None]:
    """Like `read_mask`, for a bare scaled_dot_product_attention call by the module `name`."""
    batch, _, rows, _ = call.query.shape
    keys, device = call.key.shape[2], call.query.device
    if call.is_causal:
        return _upper_left(batch, rows, keys, device), None
    if call.mask is None:
        return Visible.everything(batch, rows, keys, device), None
    name = f"scaled_dot_product_attention of {name}"
    return _from_tensor(call, call.mask[(None,) * (4 - call.mask.dim())], name)


def read_heads(call: HeadsCall) -> tuple[Visible, Bias | None]:
    """Like `read_mask`, for quantdiff's own attention: causal, without padding."""
    batch, rows, keys = _sizes(call)
    device = call.query.device
    if call.mask is None:
        return Visible.causal(batch, rows, keys, device), None
    kept = call.mask.bool()
    place = torch.arange(keys, device=device)

    def mask_rows(first: int, last: int) -> Tensor:
        queries = slice(keys - rows + first, keys - rows + last)
        causal = place <= place[queries, None]  # (n, M)
        return causal & kept[:, None, None, :] & kept[:, None, queries, None]

    return _from_rows(mask_rows, batch, rows, keys, device), None


def read_flash(call: FlashCall, batch: Batch) -> tuple[Visible, Bias | None]:
    """Like `read_mask`, for a direct call of flash-attn by the model."""
    b, rows, keys = _sizes(call)
    device = call.query.device
    left, right = call.window
    right = 0 if call.is_causal else right
    # Packed sequences hold no padding, so positions are counted without it.
    kept = batch.kept.to(device) if call.packed else torch.ones(b, keys, device=device).bool()
    return _from_rows(_among_kept(kept, rows, left, right), b, rows, keys, device), None


def _among_kept(kept: Tensor, rows: int, left: int, right: int) -> Bias:
    """The rows of a mask whose windows are counted among the kept keys only, as in flash-attn.

    Args:
        kept: (B, M) bool; the last query is at the last key.
        rows: number of queries.
        left, right: number of keys a query sees before and after its own position; −1 for all.
    """
    place = kept.long().cumsum(1) - 1  # (B, M)
    queries = place[:, -rows:]

    def mask_rows(first: int, last: int) -> Tensor:
        here = queries[:, None, first:last, None]  # (B, 1, n, 1)
        there = place[:, None, None, :]
        seen = kept[:, None, None, :].expand(-1, -1, last - first, -1)
        if left >= 0:
            seen = seen & (there >= here - left)
        if right >= 0:
            seen = seen & (there <= here + right)
        return seen

    return mask_rows


def _upper_left(batch: int, rows: int, keys: int, device: torch.device) -> Visible:
    """Causal, aligned to the upper left: the first query sees the first key only."""
    visible = Visible.causal(batch, rows, rows, device)
    visible.stop = visible.stop.clamp(max=keys)
    return visible


def _sizes(call: AttentionCall | FlashCall | HeadsCall | SdpaCall) -> tuple[int, int, int]:
    return call.query.shape[0], call.query.shape[2], call.key.shape[2]


def _is_causal(call: AttentionCall) -> bool:
    given = call.options.get("is_causal")
    return bool(getattr(call.module, "is_causal", True) if given is None else given)


def _eager(call: AttentionCall) -> tuple[Visible, Bias | None]:
    if call.mask is None:
        return Visible.everything(*_sizes(call), call.query.device), None
    _refuse_bool(call)
    return _from_tensor(call, call.mask, _named(call))


def _sdpa(call: AttentionCall) -> tuple[Visible, Bias | None]:
    batch, rows, keys = _sizes(call)
    if call.mask is not None:
        return _from_tensor(call, call.mask, _named(call))
    if rows > 1 and _is_causal(call):
        return _upper_left(batch, rows, keys, call.query.device), None
    return Visible.everything(batch, rows, keys, call.query.device), None


def _flex(call: AttentionCall) -> tuple[Visible, Bias | None]:
    from torch.nn.attention.flex_attention import BlockMask

    batch, rows, keys = _sizes(call)
    if call.mask is None:
        return Visible.everything(batch, rows, keys, call.query.device), None
    if not isinstance(call.mask, BlockMask):
        _refuse_bool(call)
        if call.mask.shape[1] != 1:
            raise RecordingError("flex_attention reads the first head of a mask of many only")
        return _from_tensor(call, call.mask, _named(call))
    function, device = call.mask.mask_mod, call.query.device
    heads = call.mask.shape[1]
    b = torch.arange(call.mask.shape[0], device=device)[:, None, None, None]
    h = torch.arange(heads, device=device)[None, :, None, None]
    m = torch.arange(keys, device=device)[None, None, None, :]

    def mask_rows(first: int, last: int) -> Tensor:
        n = torch.arange(first, last, device=device)[None, None, :, None]
        seen: Tensor = function(b, h, n, m)
        return seen.expand(len(b), heads, last - first, keys)

    return _from_rows(mask_rows, batch, rows, keys, device), None


def _named(call: AttentionCall) -> str:
    return f"{call.implementation} attention of {type(call.module).__name__}"


def _refuse_bool(call: AttentionCall) -> None:
    """Refuse a boolean mask, which masks nothing when it is added to the logits."""
    if isinstance(call.mask, Tensor) and call.mask.dtype == torch.bool:
        raise RecordingError(
            f"{call.implementation} attention adds its mask to the logits; a boolean one would "
            "mask nothing"
        )


def _restarts(positions: Any) -> bool:
    """Whether position_ids do not increase by one throughout."""
    return isinstance(positions, Tensor) and bool((positions.flatten().diff() != 1).any())


def _flash(call: AttentionCall) -> tuple[Visible, Bias | None]:
    batch, rows, keys = _sizes(call)
    device = call.query.device
    if call.mask is not None:
        if call.mask.dim() != 2:
            raise RecordingError(
                f"flash attention with a mask of {call.mask.dim()} dimensions is not known"
            )
        keys = min(keys, call.mask.shape[1])  # the rest of a static cache is cut off
    elif batch == 1 and rows > 1 and _restarts(call.options.get("position_ids")):
        raise RecordingError(PACKED)
    visible = Visible.everything(batch, rows, keys, device)
    # The last query is at the last key.
    here = torch.arange(keys - rows, keys, dtype=torch.int32, device=device)
    window = call.options.get("sliding_window")
    causal = _is_causal(call)
    if causal:
        visible.stop = torch.minimum(visible.stop, here + 1)
    if call.mask is not None:
        told = call.mask[:, -keys:].to(device).bool()  # (B, M)
        first = told.int().argmax(1, keepdim=True).int()
        stop = keys - told.flip(1).int().argmax(1, keepdim=True).int()
        if not bool((told.sum(1, keepdim=True) == stop - first).all()):
            left = -1 if window is None else window - 1
            seen = _among_kept(told, rows, left, 0 if causal else left)
            unused = call.key.shape[2] - keys
            visible.mask = lambda i, j: F.pad(seen(i, j), (0, unused))
            return visible, None
        visible.start = torch.maximum(visible.start, first)  # padding at the ends
        visible.stop = torch.minimum(visible.stop, stop)
    if window is not None:
        visible.start = torch.maximum(visible.start, here - window + 1)
        visible.stop = torch.minimum(visible.stop, here + window)
    return visible, None


_READERS: dict[str, Callable[[AttentionCall], tuple[Visible, Bias | None]]] = {
    "eager": _eager,
    "sdpa": _sdpa,
    "flex_attention": _flex,
    "flash_attention_2": _flash,
    "flash_attention_3": _flash,
    "flash_attention_4": _flash,
}


def _from_tensor(
    call: AttentionCall | SdpaCall, mask: Tensor, name: str
) -> tuple[Visible, Bias | None]:
    """Read a mask tensor: entries at or below half the dtype's minimum mask, others are a bias.

    The fill may be -inf or the dtype's minimum, or a sum of several of them. Any other constant
    that is effectively a mask is refused; see `refuse_fill`.
    """
    batch, rows, keys = _sizes(call)
    heads = call.query.shape[1]
    if (
        not isinstance(mask, Tensor)
        or mask.dim() != 4
        or mask.shape[0] not in (1, batch)
        or mask.shape[1] not in (1, heads)
        or mask.shape[2] not in (1, rows)
        or (mask.shape[3] < keys and mask.shape[3] != 1)
    ):
        shape = tuple(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__
        raise RecordingError(
            f"an attention mask of shape {shape} over {rows} queries and {keys} keys is not known"
        )
    width = -1 if mask.shape[3] > 1 else keys
    mask = mask[..., :keys].expand(-1, -1, rows, width)
    if mask.dtype == torch.bool:
        return _from_rows(lambda i, j: mask[:, :, i:j], batch, rows, keys, mask.device), None
    floor = torch.finfo(mask.dtype).min / 2
    visible = _from_rows(lambda i, j: mask[:, :, i:j] > floor, batch, rows, keys, mask.device)
    # A learned bias may still be zero.
    biased = mask.requires_grad or any(
        bool(((block := mask[:, :, i : i + ROWS]) > floor).logical_and(block != 0).any())
        for i in range(0, rows, ROWS)
    )
    if not biased:
        return visible, None
    refuse_fill(name, mask, floor)
    return visible, lambda i, j: mask[:, :, i:j]


def _from_rows(mask_rows: Bias, batch: int, rows: int, keys: int, device: torch.device) -> Visible:
    """Intervals if every row is one, else intervals and the mask itself."""
    start = torch.zeros(batch, rows, dtype=torch.int32, device=device)
    stop = torch.zeros_like(start)
    plain = True
    for first in range(0, rows, ROWS):
        last = min(first + ROWS, rows)
        seen = mask_rows(first, last)  # (B or 1, H or 1, n, M)
        plain = plain and seen.shape[1] == 1
        seen = seen.any(1).byte()
        total = seen.sum(-1, dtype=torch.int32)
        low = seen.argmax(-1).int()
        high = torch.where(total > 0, keys - seen.flip(-1).argmax(-1).int(), low)
        plain = plain and bool((high - low == total).all())
        start[:, first:last], stop[:, first:last] = low, high
    return Visible(start, stop, None if plain else mask_rows)
