"""The hook for models that call flash-attn directly, as the official DIFF code does.

flash-attn 2 runs as two operators of torch's dispatcher, which a `TorchDispatchMode` sees; the
mode is active only within the recorded model's forward, and only if the package is loaded.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from quantdiff.errors import RecordingError
from quantdiff.hooks.sequences import Batch

__all__ = ["FlashCall", "FlashMode", "flash_is_there"]

_OPERATORS = ("_flash_attn_forward", "_flash_attn_varlen_forward")
_UNKNOWN = ("alibi_slopes", "block_table", "leftpad_k", "seqused_k")


def flash_is_there() -> bool:
    """Whether flash-attn has registered its operators."""
    return any(hasattr(torch.ops.flash_attn, name) for name in _OPERATORS)


class FlashCall:
    """The arguments of one call.

    Attributes:
        query: (B, H, N, D); key: (B, G, M, D); for a packed call, only after `unpack`.
        mask: None; padding is known from the pass.
        is_causal: whether the last query sees the last key, and each earlier query one key fewer.
        window: number of keys a query sees before and after its own position; −1 for all.
        scale, softcap: of the logits; softcap is None if there is no cap.
        value: (B, G', M, w); dropout: its probability.
        tensors: queries and keys as given.
        compute: the call itself; its first result is the output.
        again: whether the same queries and keys were seen before, with other values.
        packed: whether sequences are concatenated without padding.
    """

    __slots__ = (
        "_kept", "_lengths", "again", "compute", "dropout", "is_causal", "key", "mask", "packed",
        "query", "scale", "softcap", "tensors", "value", "window",
    )  # fmt: skip

    def __init__(self, given: dict[str, Any], compute: Callable[[], Any]) -> None:
        unknown = [name for name in _UNKNOWN if given.get(name) is not None]
        if unknown:
            raise RecordingError(
                f"flash-attn is called with {', '.join(unknown)}; quantdiff does not know what "
                "that does to the logits and refuses to guess"
            )
        self.tensors = given["q"], given["k"]
        self.packed = "cu_seqlens_q" in given
        self.compute, self.again = compute, False
        self.query, self.key, self.value = (
            x if self.packed else x.transpose(1, 2) for x in (*self.tensors, given["v"])
        )  # (B, H, N, D)
        self.dropout = float(given["dropout_p"])
        self._kept: Tensor | None = None
        self._lengths = (
            [given[name].diff().tolist() for name in ("cu_seqlens_q", "cu_seqlens_k")]
            if self.packed
            else []
        )
        self.mask = None
        self.is_causal = bool(given["causal"])
        self.window = given["window_size_left"], given["window_size_right"]
        self.scale = float(given["softmax_scale"])
        self.softcap: float | None = given["softcap"] or None

    def unpack(self, batch: Batch) -> None:
        """Put packed queries, keys and values at their tokens' places among the padding.

        Raises:
            RecordingError: they are not the real tokens of the pass, sequence by sequence.
        """
        real = batch.real, batch.kept
        if [x.sum(1).tolist() for x in real] != self._lengths:
            raise RecordingError(
                "flash-attn is called on packed sequences that are not the rows of the batch "
                "without their padding; quantdiff does not record packed sequences"
            )
        padded = []
        for x, kept in zip((*self.tensors, self.value), (*real, batch.kept), strict=True):
            out = x.new_zeros(*kept.shape, *x.shape[1:])  # (B, N, H, D)
            out[kept.to(x.device)] = x.detach()
            padded.append(out.transpose(1, 2))
        self.query, self.key, self.value = padded
        self._kept = batch.real

    def shaped(self, out: Tensor) -> Tensor:
        """An output (B, H, N, w) in the form that the call returns."""
        out = out.transpose(1, 2)
        return out.contiguous() if self._kept is None else out[self._kept.to(out.device)]

    def unshaped(self, out: Tensor) -> Tensor:
        """The call's own output as (B, H, N, w)."""
        if self._kept is None:
            return out.transpose(1, 2)
        whole = out.new_zeros(*self._kept.shape, *out.shape[1:])
        whole[self._kept.to(out.device)] = out
        return whole.transpose(1, 2)


class FlashMode(TorchDispatchMode):
    """Shows every call of flash-attn's operators to `observe`, which may compute its output."""

    def __init__(self, observe: Callable[[FlashCall], Tensor | None]) -> None:
        super().__init__()
        self._observe = observe

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        namespace, _, name = func._schema.name.partition("::")
        if namespace == "flash_attn" and name in _OPERATORS:
            # Arguments at their default value are not passed along.
            known = func._schema.arguments
            given = {a.name: a.default_value for a in known if a.has_default_value()}
            given |= dict(zip([a.name for a in known], args, strict=False))
            call = FlashCall({**given, **kwargs}, functools.partial(func, *args, **kwargs))
            computed = self._observe(call)
            if computed is not None:
                return (computed, *call.compute()[1:])
        return func(*args, **kwargs)
