"""The forward passes of a recording: where each begins and ends, and in which thread."""

import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from quantdiff.errors import RecordingError
from quantdiff.hooks.entrance import (
    arguments,
    cache_of,
    in_backward,
    padding_of,
    positions_of,
)
from quantdiff.hooks.passes import Pass
from quantdiff.hooks.sequences import Batch, Sequences

__all__ = ["Runs"]


class Runs:
    """Follows a model's forward passes.

    Attributes:
        lock: held while passes are counted.
        sequences: numbers and counts of the sequences that have run.
        interrupted: whether a pass ended in an exception, so that only some layers have seen it.
        open: number of passes in progress.
    """

    def __init__(
        self,
        layers: Sequence[str],
        *,
        within: Callable[[], AbstractContextManager[Any]],
        check: Callable[[Pass], None],
    ) -> None:
        """Each forward runs in `within()`; `check` may refuse a pass at its end."""
        self._layers = list(layers)
        self._within = within
        self._check = check
        self._local = threading.local()
        self.lock = threading.Lock()
        self.sequences = Sequences()
        self.interrupted = False
        self.open = 0

    def around(
        self,
        module: nn.Module,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Run a forward; the outermost one is a pass."""
        if in_backward():
            return forward(*args, **kwargs)
        given = arguments(forward, args, kwargs)
        now = self._now()
        if now is not None:
            self._learn(now, given)  # the decoder inside the model whose pass has begun
            return forward(*args, **kwargs)
        with self.lock:
            now = Pass(self._describe(given), self._layers)
            now.ready_mask = given.get("attention_mask") is not None and padding_of(given) is None
            now.positions = positions_of(given)
            self.open += 1
        self._local.now = now
        try:
            with self._within():
                output = forward(*args, **kwargs)
            self._check(now)
        except BaseException:
            self.interrupted = True
            raise
        finally:
            self._local.now = None
            with self.lock:
                self.open -= 1
        cache = cache_of(output) if isinstance(output, dict | tuple) else None
        with self.lock:
            self.sequences.end(now.batch, cache_of(given) if cache is None else cache)
        return output

    def current(self, name: str) -> Pass:
        """The current pass of this thread.

        Raises:
            RecordingError: there is none; `name` was called on its own.
        """
        now = self._now()
        if now is None:
            raise RecordingError(
                f"{name} was called outside of the recorded model's forward pass; quantdiff cannot "
                "tell which sequence this is"
            )
        return now

    def watch(self, modules: Iterable[tuple[str, nn.Module]]) -> list[RemovableHandle]:
        """Keep the pass informed which of these modules is running; earlier hooks run first."""
        handles = []
        for name, module in modules:
            handles.append(module.register_forward_pre_hook(self._entering(name)))
            leaving = self._leaving(name)
            handles.append(module.register_forward_hook(leaving, always_call=True))
        return handles

    def _entering(self, name: str) -> Callable[..., None]:

        def hook(module: nn.Module, args: Any) -> None:
            now = self._now()
            if now is not None and not in_backward():
                now.entered[name] += 1
                now.stack.append(name)

        return hook

    def _leaving(self, name: str) -> Callable[..., None]:

        def hook(module: nn.Module, args: Any, output: Any) -> None:
            now = self._now()
            if now is not None and not in_backward() and now.stack[-1:] == [name]:
                now.stack.pop()
                now.forget(name)

        return hook

    def _now(self) -> Pass | None:
        return getattr(self._local, "now", None)

    def _describe(self, given: dict[str, Any]) -> Batch:
        tokens = given.get("input_ids")
        tokens = given.get("inputs_embeds") if tokens is None else tokens
        if tokens is None:
            tokens = next((x for x in given.values() if isinstance(x, Tensor)), None)
        if tokens is None:
            raise RecordingError("a recorded model is called with input_ids or inputs_embeds")
        # An image's tokens are known only when its first layer runs.
        length = 0 if tokens.dim() > 3 else tokens.shape[1] if tokens.dim() > 1 else 1
        return self.sequences.begin(tokens.shape[0], length, padding_of(given), cache_of(given))

    def _learn(self, now: Pass, given: dict[str, Any]) -> None:
        """Take from an inner decoder's arguments what the outermost call did not provide."""
        mask, cache = padding_of(given), cache_of(given)
        if now.positions is None:
            now.positions = positions_of(given)
        if cache is not None and int(cache.get_seq_length()) and not now.batch.past:
            raise RecordingError(
                "a key-value cache reaches the decoder under a name that quantdiff does not know; "
                "record the transformers model itself"
            )
        if mask is None or now.batch.told or any(now.fired.values()):
            return
        with self.lock:
            first = now.batch.first
            now.batch = self.sequences.begin(*now.batch.shape, mask, cache, first=first)
