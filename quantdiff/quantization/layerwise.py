"""A model run one layer at a time, so that a layer can be changed before the next one sees it."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from quantdiff.errors import QuantizationError, UsageError
from quantdiff.hooks.entrance import padding_of

__all__ = ["Layerwise", "real_of"]


def real_of(batch: Mapping[str, Any]) -> Tensor | None:
    """Which tokens of a batch are real, (B, N) bool; None for all.

    Raises:
        QuantizationError: a mask from which padding cannot be determined.
    """
    mask = padding_of(dict(batch))
    if mask is None and batch.get("attention_mask") is not None:
        raise QuantizationError(
            "the attention_mask of a batch is not (sequences, tokens), so that its padding cannot "
            "be told; give the 2-D mask, or none where there is no padding"
        )
    return None if mask is None else mask.bool()


class _Reached(Exception):  # noqa: N818  (no error: the rest of the pass is not wanted)
    """The wanted layer has run."""

    def __init__(self, output: Any) -> None:
        self.output = output


class Layerwise:
    """Runs one layer after the other over some batches.

    The model's own forward prepares each layer's call, including masks and rotary embeddings. All
    layers before the current one return what the last of them gave in its turn, and the pass ends
    after the current one.

    Attributes:
        real: which tokens of the current batch are real, (B, N) bool; None for all.
    """

    def __init__(
        self, model: nn.Module, layers: Sequence[nn.Module], work: Sequence[Mapping[str, Any]]
    ) -> None:
        self._model, self._layers, self._work = model, layers, work
        self._at = 0
        self._outputs: list[Any] = [None] * len(work)  # of the previous layer, one per batch
        self.real: Tensor | None = None

    def look(self) -> None:
        """Run the current layer, at first layer 0, over all batches.

        Raises:
            QuantizationError: it does not run in a pass of the model, or fails without the layers
                before it.
        """
        for batch, before in zip(self._work, self._outputs, strict=True):
            self._output(batch, before)

    def advance(self) -> None:
        """Run the current layer as it is now and go on to the next; raises what `look` does."""
        pairs = zip(self._work, self._outputs, strict=True)
        self._outputs = [self._output(batch, before) for batch, before in pairs]
        self._at += 1

    def _output(self, batch: Mapping[str, Any], before: Any) -> Any:
        self.real = real_of(batch)
        with self._standing_in(before):
            try:
                self._model(**batch)
            except _Reached as reached:
                return reached.output
        raise QuantizationError(
            f"layer {self._at} of {type(self._model).__name__} did not run when the model was run "
            "layer by layer"
        )

    @contextmanager
    def _standing_in(self, before: Any) -> Iterator[None]:
        """Make all earlier layers return `before`, and the current one end the pass."""
        wanted = self._layers[self._at]
        real = wanted.forward

        def last(*args: Any, **kwargs: Any) -> Any:
            try:
                output = real(*args, **kwargs)
            except (UsageError, MemoryError, torch.OutOfMemoryError):
                raise
            except Exception as error:
                if not self._at:  # no layer is replaced, so the model itself fails
                    raise
                raise QuantizationError(
                    f"layer {self._at} of {type(self._model).__name__} fails when the model is run "
                    f"layer by layer ({type(error).__name__}), as where it needs keys that an "
                    "earlier layer hands on; round the weights to nearest"
                ) from error
            raise _Reached(output)

        changed = [*self._layers[: self._at], wanted]
        own = [vars(layer).get("forward") for layer in changed]
        try:
            for layer in changed[:-1]:
                layer.forward = lambda *_, **__: before
            wanted.forward = last
            yield
        finally:
            for layer, forward in zip(changed, own, strict=True):
                if forward is None:
                    vars(layer).pop("forward", None)
                else:
                    layer.forward = forward
