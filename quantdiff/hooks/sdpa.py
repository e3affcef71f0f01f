"""The hook for models outside of transformers' dispatch: torch's scaled_dot_product_attention.

A function mode that is active only within the recorded model's forward sees every call of
`torch.nn.functional.scaled_dot_product_attention`; no code is copied or replaced.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack

from quantdiff.errors import RecordingError

__all__ = ["SdpaCall", "SdpaMode"]

# Functions that call attention kernels directly, past any function mode.
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
        key: (B, G, M, D), expanded if all sequences share one.
        mask: as given, broadcastable to (B, H, N, M), or None.
        value: (B, G', M, w) likewise, or (B, M, w) where it was given without heads.
        is_causal, scale, dropout: as given.
        tensors: queries and keys as given.
        compute: the call itself.
        again: whether the same queries and keys were seen before, with other values.
    """

    __slots__ = (
        "again",
        "compute",
        "dropout",
        "is_causal",
        "key",
        "mask",
        "query",
        "scale",
        "tensors",
        "value",
    )

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = {**dict(zip(_NAMES, args, strict=False)), **kwargs}
        self.again = False
        self.compute: Callable[[], Tensor] = functools.partial(
            F.scaled_dot_product_attention, *args, **kwargs
        )
        query, key = self.tensors = given["query"], given["key"]
        value: Tensor = given["value"]
        known = query.dim() in (3, 4) and query.dim() == key.dim() == value.dim()
        if not known or not {len(key), len(value)} <= {1, len(query)}:
            raise RecordingError(
                f"attention over queries of shape {tuple(query.shape)}, keys of shape "
                f"{tuple(key.shape)} and values of shape {tuple(value.shape)} is not known; "
                "(batch, heads, tokens, width) is, keys and values with the queries' batch or 1"
            )
        key, value = (x.expand(len(query), *x.shape[1:]) for x in (key, value))
        if query.dim() == 3:
            query, key = query[:, None], key[:, None]
        self.query, self.key = query, key
        self.mask: Tensor | None = given.get("attn_mask")
        self.value = value
        self.dropout = float(given.get("dropout_p", 0.0))
        self.is_causal = bool(given.get("is_causal", False))
        self.scale: float | None = given.get("scale")


class SdpaMode(TorchFunctionMode):
    """Shows every scaled_dot_product_attention call to `observe`, which may compute it."""

    def __init__(self, observe: Callable[[SdpaCall], Tensor | None]) -> None:
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
            computed = self._observe(SdpaCall(args, kwargs))
            if computed is not None:
                if any(type(mode) is SdpaMode for mode in _get_current_function_mode_stack()):
                    func(*args, **kwargs)  # so that outer modes see the call
                return computed
        return func(*args, **kwargs)
