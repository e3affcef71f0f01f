"""Remedies in a sweep: the text that they see, and a model that has one applied for some cells."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

from torch import nn

from quantdiff.analysis.evaluation.forward import evaluating
from quantdiff.analysis.sweep.entries import Entry
from quantdiff.analysis.sweep.grid import Together
from quantdiff.analysis.sweep.once import once
from quantdiff.calibration.running import forward_options, model_device
from quantdiff.calibration.text import TextWindows
from quantdiff.quantization.remedy import NONE
from quantdiff.quantization.scheme import Scheme

__all__ = ["Remedied", "in_turn"]


class Remedied:
    """A model with at most one remedy applied, which is kept for following cells that need it.

    Args:
        model: in memory; restored when the context ends.
        windows: the text that remedies see; None if no cell has a remedy that reads text.
        batch_size: windows per forward pass.
    """

    def __init__(self, model: nn.Module, windows: TextWindows | None, batch_size: int) -> None:
        self._model, self._windows, self._batch_size = model, windows, batch_size
        self._stack = ExitStack()
        self._on: tuple[Any, ...] = _kind(Entry(()))
        self._put_on: Callable[[], None] = lambda: None

    def __enter__(self) -> "Remedied":
        return self

    def __exit__(self, *exception: object) -> None:
        self._stack.close()

    def put_on(self, entry: Entry) -> Together:
        """Apply the remedy of an entry to the model, in place of the current one.

        Returns:
            The schemes to quantize the model with.

        Raises:
            QuantizationError: the model does not support it; raised again on each call.
        """
        if _kind(entry) != self._on:
            self._stack.close()
            self._on = _kind(entry)
            self._put_on = once(lambda: self._enter(entry))
        self._put_on()
        return entry.remedy.left(entry.schemes)

    def _enter(self, entry: Entry) -> None:
        if entry.remedy == NONE:
            return
        with evaluating(self._model):
            applied = entry.remedy.applied(self._model, self._batches(), entry.schemes)
            self._stack.enter_context(applied)

    def _batches(self) -> list[dict[str, Any]]:
        if self._windows is None:
            return []
        device, options = model_device(self._model), forward_options(self._model)
        # The logits of all tokens are compared before and after.
        options.pop("logits_to_keep", None)
        return [
            {name: tensor.to(device) for name, tensor in batch.items()} | options
            for batch in self._windows.batches(self._batch_size, pad_token_id=0)
        ]


def in_turn(entries: Sequence[Entry]) -> list[int]:
    """Indices of the entries, with those that need the same model state next to each other."""
    kinds: dict[Any, list[int]] = {}
    for place, entry in enumerate(entries):
        kinds.setdefault(_kind(entry), []).append(place)
    return [place for places in kinds.values() for place in places]


def _kind(entry: Entry) -> tuple[str, tuple[Scheme, ...]]:
    """What the state of the model depends on."""
    return entry.remedy.name, entry.remedy.weights(entry.schemes)
