"""The hook for models outside of transformers' dispatch: torch's scaled_dot_product_attention.

A function mode that is active within the recorded model's forward alone sees every call of
`torch.nn.functional.scaled_dot_product_attention`; no code is copied or replaced.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from quantdiff.errors import RecordingError

__all__ = ["SdpaCall", "SdpaMode"]

# What calls attention kernels by itself, past any function mode.
_HIDDEN = (
    F.multi_head_attention_forward,
    torch._native_multi_head_attention,
    torch._transformer_encoder_layer_fwd,
)
_NAMES = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")


class SdpaCall:
    """The arguments of one call.

    Attributes:
        query: (B, H, N, D).
        key: (B, G, M, D).
        mask: broadcastable to (B, H, N, M), or None.
        is_causal, scale: as given.
        tensors: queries and keys as given.
    """

    __slots__ = ("is_causal", "key", "mask", "query", "scale", "tensors")

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = {**dict(zip(_NAMES, args, strict=False)), **kwargs}
        query, key = self.tensors = given["query"], given["key"]
        if query.dim() == 3:
            query, key = query[:, None], key[:, None]
        if query.dim() != 4:
            raise RecordingError(
                f"attention over queries of shape {tuple(query.shape)} is not known; "
                "(batch, heads, tokens, width) is"
            )
        mask: Tensor | None = given.get("attn_mask")
        if mask is not None:
            mask = mask[(None,) * (4 - mask.dim())]
        self.query, self.key, self.mask = query, key, mask
        self.is_causal = bool(given.get("is_causal", False))
        self.scale: float | None = given.get("scale")


class SdpaMode(TorchFunctionMode):
    """Shows every scaled_dot_product_attention call to `observe` before it is computed."""

    def __init__(self, observe: Callable[[SdpaCall], None]) -> None:
        super().__init__()
        self._observe = observe

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _HIDDEN:
            raise RecordingError(
                "torch.nn.MultiheadAttention and TransformerEncoderLayer compute their logits "
                "where no hook reaches; scaled_dot_product_attention can be recorded"
            )
        if func is F.scaled_dot_product_attention:
            self._observe(SdpaCall(args, kwargs))
        return func(*args, **kwargs)
