"""What is known about the current forward pass."""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from quantdiff.errors import RecordingError
from quantdiff.hooks.biases import Bias
from quantdiff.hooks.dispatch import AttentionCall
from quantdiff.hooks.flash import FlashCall
from quantdiff.hooks.logits import HeadsOf, Logits
from quantdiff.hooks.own import HeadsCall
from quantdiff.hooks.padding import check_apart, padding_in
from quantdiff.hooks.sdpa import SdpaCall
from quantdiff.hooks.sequences import Batch
from quantdiff.statistics import Visible

__all__ = ["Pass"]


class _Identity:
    """Recognizes the same view of the same memory, without holding the tensor."""

    def __init__(self, tensor: Tensor) -> None:
        self._storage = StorageWeakRef(tensor.untyped_storage())
        self._view = self._describe(tensor)

    def is_of(self, tensor: Tensor) -> bool:
        """Whether `tensor` is this view, unchanged since."""
        same = self._storage == StorageWeakRef(tensor.untyped_storage())
        return same and not self._storage.expired() and self._view == self._describe(tensor)

    @staticmethod
    def _describe(tensor: Tensor) -> tuple[Any, ...]:
        version = None if tensor.is_inference() else tensor._version
        return tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype, version


class _Content:
    """Recognizes a tensor that holds the same values, by two sums over all of them.

    For tensors that are copied for each call, such as flash-attn's packed sequences.
    """

    def __init__(self, tensor: Tensor) -> None:
        self._told = self._describe(tensor)

    def is_of(self, tensor: Tensor) -> bool:
        """Whether `tensor` holds the same values."""
        return self._told == self._describe(tensor)

    @staticmethod
    def _describe(tensor: Tensor) -> tuple[Any, ...]:
        x = tensor.detach().flatten().double()
        ramp = torch.linspace(1, 2, x.numel(), dtype=x.dtype, device=x.device)
        return tensor.shape, tensor.dtype, float(x @ ramp), float(x @ x)


class Pass:
    """What is known about the current forward pass of one thread."""

    def __init__(self, batch: Batch, layers: Sequence[str]) -> None:
        self.batch = batch
        self.layers = layers
        self.fired: Counter[str] = Counter()
        self.entered: Counter[str] = Counter()  # calls of each attention module
        self.dispatching = False  # an attention function of transformers is running
        self.stack: list[str] = []  # running modules, the innermost last
        self.lambdas: dict[str, Tensor] = {}  # of the running attention module, (B, h, N, 1)
        self.pending: dict[str, list[tuple[str, HeadsOf | None, Logits]]] = {}
        self.ready_mask = False  # a mask was given, but not the 2-D one that marks padding
        self.positions: Tensor | None = None  # position_ids as given
        self.counted = False  # something was counted before any mask showed which tokens are real
        # Logits of modules that are measured before they are quantized; see quantization/apart.py.
        self.measuring: set[str] = set()
        self.ends: dict[str, tuple[Tensor, Tensor]] = {}
        self.masks: dict[Any, tuple[Any, Visible, Bias | None]] = {}
        # Heads that the calls of a module have shown; see `show`.
        self.shown: dict[tuple[str, str], tuple[int, list[Tensor]]] = {}
        # Weak references: if held, queries and keys of all layers would outweigh the activations.
        self._seen: dict[str, tuple[int, list[tuple[Any, Any]]]] = {}

    def turn(self, module: str, query: Tensor, key: Tensor, *, copied: bool = False) -> int | None:
        """Number of other attentions that a module has computed in its current call.

        None if it has attended with the same queries and keys already: differential attention does,
        once for each half of V. If they are `copied` for each call, they are compared by value.
        """
        number, fresh = self.place(module, query, key, copied=copied)
        return number if fresh else None

    def place(
        self, module: str, query: Tensor, key: Tensor, *, copied: bool = False
    ) -> tuple[int, bool]:
        """The number of an attention in its module's current call, and whether it is a new one."""
        call = self.entered[module]
        number, pairs = self._seen.get(module, (call, []))
        if number != call:
            pairs = []
        self._seen[module] = (call, pairs)
        for number, (q, k) in enumerate(pairs):
            if q.is_of(query) and k.is_of(key):
                return number, False
        kind = _Content if copied else _Identity
        pairs.append((kind(query), kind(key)))
        return len(pairs) - 1, True

    def forget(self, module: str) -> None:
        """Forget a finished call of a module; even weak references to its tensors hold memory."""
        self._seen.pop(module, None)
        self.lambdas.pop(module, None)
        for kind in ("keys", "values"):
            self.shown.pop((module, kind), None)

    def visible(
        self,
        call: AttentionCall | FlashCall | HeadsCall | SdpaCall,
        read: Callable[[], tuple[Visible, Bias | None]],
        *,
        cross: bool = False,
    ) -> tuple[Visible, Bias | None]:
        """Which logits of a call count: its mask, read once for all layers that share it.

        Args:
            call: of an attention function.
            read: reads its mask.
            cross: whether it is cross-attention.

        Raises:
            RecordingError: the queries are not those of the pass's tokens, a row packs several
                sequences, or padding becomes known too late.
        """
        batch, rows = call.query.shape[0], call.query.shape[2]
        if self.batch.shape[1] == 0:  # an image, whose number of tokens is known now
            self.batch.keep(torch.ones(batch, rows, dtype=torch.bool))
        if (batch, rows) != self.batch.shape:
            raise RecordingError(
                f"queries of shape {tuple(call.query.shape)} do not fit a pass over "
                f"{self.batch.shape[0]} sequences of {self.batch.shape[1]} tokens; a model that "
                "leaves tokens out in some layers does not with logits_to_keep=0"
            )
        options = getattr(call, "options", {})
        # Unless each head has its own mask, calls with any number of heads see the same.
        mask: Any = call.mask
        per_head = getattr(mask, "ndim", 0) > 2 and mask.shape[-3] > 1
        heads = call.query.shape[1] if per_head else None
        # It may be refilled in place for the next layer; torch counts that only outside of
        # inference mode.
        uncounted = isinstance(mask, Tensor) and mask.is_inference()
        version = mask._version if isinstance(mask, Tensor) and not uncounted else None
        key = (
            type(call), id(mask), version, getattr(call, "implementation", None), heads,
            call.key.shape[2], options.get("sliding_window"), options.get("is_causal"),
            getattr(getattr(call, "module", call), "is_causal", None),
            getattr(call, "window", None), getattr(call, "packed", None), cross,
        )  # fmt: skip
        known = self.masks.get(key)
        if known is not None and uncounted and not torch.equal(known[0][1], mask):
            known = None
        if known is None:
            visible, bias = read()
            if not cross:
                self._look_at_tokens(visible, call.key.shape[2], masked=call.mask is not None)
            self.counted |= not self.batch.told
            visible = visible.only(self.batch.real.to(visible.stop.device))
            # Holding the mask keeps its id from being reused.
            content = mask.clone() if uncounted else None
            known = self.masks[key] = ((mask, content), visible, bias)
        return known[1], known[2]

    def _look_at_tokens(self, visible: Visible, keys: int, *, masked: bool) -> None:
        """Take padding from a ready mask if no 2-D one was given; refuse packed sequences."""
        past, rows = self.batch.past, self.batch.shape[1]
        if keys < rows or self.batch.key_offset(keys):
            return  # not the tokens' own mask, or one that has dropped some of them
        if masked and not self.batch.told:
            padding = padding_in(visible, past)
            self.batch.told = True
            if bool(padding.any()):
                if self.counted or any(self.fired[name] for name in self.layers):
                    raise RecordingError(
                        "only a ready attention mask was given, and what ran before the first "
                        "attention that reads it was counted; give the 2-D mask of the padding too"
                    )
                kept = self.batch.kept.to(padding.device).clone()
                kept[:, past:] &= ~padding
                self.batch.keep(kept)
        if self.positions is not None and not past:
            check_apart(visible, self.positions, self.batch.real, past)
