"""`fake_quantize`: a model computes with quantized values within a `with` block."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, Protocol, Self

from torch import nn

from quantdiff.errors import QuantizationError, RecordingError, UsageError
from quantdiff.hooks.entrance import Entrance, arguments, is_entered
from quantdiff.hooks.found import Found, refuse
from quantdiff.hooks.passes import Pass
from quantdiff.hooks.runs import Runs
from quantdiff.quantization.attending import AttentionSites
from quantdiff.quantization.chosen import Schemes
from quantdiff.quantization.clipping import Clipping
from quantdiff.quantization.hidden_states import HiddenStates
from quantdiff.quantization.linear_inputs import LinearInputs
from quantdiff.quantization.scheme import Scheme
from quantdiff.quantization.static import check_table
from quantdiff.quantization.table import Table
from quantdiff.quantization.weights import Weights

__all__ = ["FakeQuantizer", "fake_quantize", "found_in", "is_quantized", "refuse_quantized"]

ATTENTION = ("keys", "attention_logits", "attention_maps", "values")  # of one attention call
# Sites with their own hooks, by name; each is made from (found, runs, schemes, table).
PARTS: dict[str, Any] = {
    "linear_inputs": LinearInputs,
    "hidden_states": HiddenStates,
    "weights": Weights,
}


class _Part(Protocol):
    """A site, or several that are quantized in one place."""

    def begin(self) -> None: ...
    def end(self) -> None: ...
    def check(self, now: Pass) -> None: ...


class _Runs(Runs):
    """The passes of a quantized model; recordings have their own."""

    gives_weights = True  # whether attention may return its weights

    def around(
        self,
        module: nn.Module,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Run a forward; refuse one that is asked to return what is not computed."""
        told = arguments(forward, args, kwargs).get("output_attentions")
        if told is None:
            told = getattr(getattr(module, "config", None), "output_attentions", False)
        if told and not self.gives_weights:
            raise QuantizationError(
                "output_attentions asks for attention weights, which quantized attention never "
                "holds; leave it off"
            )
        return super().around(module, forward, args, kwargs)


def is_quantized(model: nn.Module) -> bool:
    """Whether a context currently quantizes the model or a part of it."""
    return any(is_entered(module, _Runs) for module in model.modules())


def refuse_quantized(model: nn.Module) -> None:
    """Refuse to change a quantized model: changes to rounded weights would have no effect.

    Raises:
        QuantizationError: a context quantizes the model.
    """
    if is_quantized(model):
        raise QuantizationError(
            "a remedy changes what is quantized after it: enter its context before fake_quantize's"
        )


def found_in(model: nn.Module) -> Found:
    """The modules of a model that is to be quantized.

    Raises:
        QuantizationError: they are only found by name, which only recordings support.
    """
    try:
        return Found(model, None)
    except RecordingError as error:
        raise QuantizationError(
            f"{error}; that is for recording alone, quantization takes neither names of layers nor "
            "a layout"
        ) from error


class FakeQuantizer:
    """A context that quantizes a model. See `fake_quantize`.

    Attributes:
        schemes: those in use, without those that change nothing.
        table: the static ranges that were given, or None.
        clipping: attention site -> how many logits were clipped since the context was entered, if
            they are counted; where heads are one head repeated, every repetition counts.
    """

    def __init__(
        self,
        model: nn.Module,
        schemes: tuple[Scheme, ...],
        table: Table | None,
        *,
        count_clipped: bool = False,
    ) -> None:
        self.schemes = Schemes(schemes)
        self.table = table
        self.clipping: dict[str, Clipping] = {}
        self._model = model
        self._wrapped: list[Entrance] = []
        self._parts: list[_Part] = []
        self._attention: AttentionSites | None = None
        if not self.schemes:
            return
        for scheme in self.schemes.all:
            if scheme.static and table is None:
                raise UsageError(
                    f"the range {scheme.range} comes from a calibration: give table=…, as "
                    "quantdiff.calibrate makes it"
                )
        refuse(model)
        self._found = found_in(model)
        layers = [name for name, _ in self._found.layers]
        self.schemes.check_layers(len(layers))
        if table is not None:
            check_table(table, self.schemes, self._found)
        self._runs = _Runs(layers, within=self._within, check=self._check)
        attention = self.schemes.some(ATTENTION)
        if attention:
            others = [scheme for scheme in self.schemes.all if scheme.site in PARTS]
            self._attention = AttentionSites(
                model, self._found, self._runs, attention, table,
                self.clipping if count_clipped else None,
                {layer for scheme in others for layer in scheme.layers or ()},
            )  # fmt: skip
            self._parts.append(self._attention)
            self._runs.gives_weights = False
        for site, part in PARTS.items():
            if self.schemes.of(site) is not None:
                self._parts.append(part(self._found, self._runs, self.schemes, table))

    def __enter__(self) -> Self:
        if not self.schemes:
            return self
        if is_quantized(self._model):
            raise QuantizationError(
                "this model is quantized already; leave that context before another begins, or "
                "give all schemes to one"
            )
        self.clipping.clear()
        begun: list[_Part] = []
        try:
            for module in self._found.entrances:
                self._wrapped.append(Entrance(module, self._runs.around))
            for part in self._parts:
                begun.append(part)
                part.begin()
        except BaseException:
            self._remove(begun)
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        self._remove(self._parts)

    def _remove(self, parts: list[_Part]) -> None:
        for part in reversed(parts):
            part.end()
        for entrance in reversed(self._wrapped):
            entrance.remove()
        self._wrapped.clear()

    @contextlib.contextmanager
    def _within(self) -> Iterator[None]:
        with contextlib.nullcontext() if self._attention is None else self._attention.within():
            yield

    def _check(self, now: Pass) -> None:
        for part in self._parts:
            part.check(now)


def fake_quantize(
    model: nn.Module,
    *schemes: Scheme,
    table: Table | None = None,
    count_clipped: bool = False,
) -> FakeQuantizer:
    """Run a model with quantized values within a `with` block.

    Attention logits are rounded to their grid between q·kᵀ and softmax, for every backend; no n×n
    tensor is held. Gradients are straight-through.

    Args:
        model: a transformers model whose attention goes through the attention dispatch, one with
            modules of `quantdiff.attention`, or one that calls scaled_dot_product_attention or
            flash-attn.
        schemes: one per site, or several for different layers; none, or 16 bits, change nothing.
        table: static ranges, from `quantdiff.calibrate`.
        count_clipped: whether the context's `clipping` counts clipped logits.

    Returns:
        A context; once it is left, also by an exception, the model computes as before.

    Raises:
        UsageError: two schemes for one site, a static range without a table, or the table of
            another model.
        QuantizationError: the model cannot be quantized correctly, lacks the site, or is quantized
            already.
        RecordingError: in a forward pass, an unknown mask or keyword.
    """
    return FakeQuantizer(model, schemes, table, count_clipped=count_clipped)
