"""Attention calls outside of transformers' dispatch, attributed to the module that is running.

Such a model calls torch's scaled_dot_product_attention, or flash-attn, directly.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch import Tensor, nn

from quantdiff.errors import RecordingError
from quantdiff.hooks.complete import check_once
from quantdiff.hooks.entrance import in_backward
from quantdiff.hooks.flash import FlashCall, FlashMode, flash_is_there
from quantdiff.hooks.found import Found
from quantdiff.hooks.layers import is_cross, layer_of
from quantdiff.hooks.logits import HeadsOf, Logits
from quantdiff.hooks.masks import read_flash, read_sdpa
from quantdiff.hooks.passes import Pass
from quantdiff.hooks.runs import Runs
from quantdiff.hooks.sdpa import SdpaCall, SdpaMode

__all__ = ["BareCalls", "Call"]

Call = SdpaCall | FlashCall
# Takes a call and may return its output: (pass, site, heads, logits, call).
Take = Callable[[Pass, str, HeadsOf | None, Logits, Call], Tensor | None]


class BareCalls:
    """Sees the attention calls of a model and hands them to `take`.

    Args:
        model, found, runs: the model, its modules and its forward passes.
        take: called with each attention call.
        again: whether `take` also gets calls whose queries and keys it has seen, which
            differential attention makes for each half of V.
    """

    def __init__(
        self, model: nn.Module, found: Found, runs: Runs, take: Take, *, again: bool = False
    ) -> None:
        self._model = type(model).__name__
        self._found = found
        self._runs = runs
        self._take = take
        self._again = again
        self._cross: set[str] = set()

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch the attention calls made within."""
        with SdpaMode(self._sdpa):
            if flash_is_there():
                with FlashMode(self._flash):
                    yield
            else:
                yield

    def _sdpa(self, call: SdpaCall) -> Tensor | None:
        place = self._place(call)
        if place is None:
            return None
        now, module, turn = place
        queries, keys = call.query.shape[2], call.key.shape[2]
        part = self._found.part(module, turn, call.query)
        # A further attention in one call of the module.
        name = f"{module} #{turn}" if turn and part is None else module
        if is_cross(module) or keys < queries:
            self._cross.add(name)
        elif keys > queries and not call.is_causal and name not in self._cross:
            raise RecordingError(
                f"{module} attends from {queries} queries to {keys} keys: a cache of its own, or "
                "cross-attention, which a module says by 'cross' in its name; neither can be told"
            )
        cross = name in self._cross
        visible, bias = now.visible(call, lambda: read_sdpa(call, module), cross=cross)
        scale = call.query.shape[-1] ** -0.5 if call.scale is None else call.scale
        return self._take(
            now, f"{name} (cross-attention)" if cross else name, part,
            Logits(call.query, call.key, float(scale), visible, bias=bias, cross=cross), call,
        )  # fmt: skip

    def _flash(self, call: FlashCall) -> Tensor | None:
        place = self._place(call)
        if place is None:
            return None
        now, module, turn = place
        if call.packed:
            call.unpack(now.batch)
        keys, known = call.key.shape[2], now.batch.kept.shape[1]
        if keys != known:
            raise RecordingError(
                f"{module} attends to {keys} keys where this forward pass knows of {known} tokens; "
                "a cache is to reach the model's forward as a transformers Cache"
            )
        part = self._found.part(module, turn, call.query)
        name = f"{module} #{turn}" if turn and part is None else module
        visible, bias = now.visible(call, lambda: read_flash(call, now.batch))
        return self._take(
            now, name, part,
            Logits(call.query, call.key, call.scale, visible, softcap=call.softcap, bias=bias),
            call,
        )  # fmt: skip

    def _place(self, call: Call) -> tuple[Pass, str, int] | None:
        """The pass, the module, and this attention's number within the module's current call.

        None for calls that were seen already or are seen elsewhere.
        """
        if in_backward():
            return None
        now = self._runs.current("attention")
        if now.dispatching or (now.stack and now.stack[-1] in self._found.inside):
            return None  # from transformers or a backend of our own, seen as a whole
        module = now.stack[-1] if now.stack else self._model
        if layer_of(module, self._found.layers) is None:
            if self._found.attention:
                return None  # in a tower beside the decoder
            raise RecordingError(
                f"{module} attends outside of the layers {self._found.layers[0][0]} … "
                f"{self._found.layers[-1][0]}; name the layers: record(model, layers=['…', …])"
            )
        module = self._found.owner(module)
        check_once(module, now.entered[module])
        copied = isinstance(call, FlashCall)
        turn, fresh = now.place(module, *call.tensors, copied=copied)
        call.again = not fresh
        return (now, module, turn) if fresh or self._again else None
