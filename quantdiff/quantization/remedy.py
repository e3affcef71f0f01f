"""Remedies by name: `smooth:0.5`, `rotate`, `gptq`, and sums of them, such as `rotate+gptq`."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

from torch import nn

from quantdiff.errors import UsageError
from quantdiff.quantization.gptq import gptq_rounded
from quantdiff.quantization.remedies import rotated, smoothed
from quantdiff.quantization.scheme import Scheme

__all__ = ["NONE", "STEPS", "Remedy", "remedy"]

Batches: TypeAlias = Sequence[Mapping[str, Any]]
_ALPHA = 0.5  # SmoothQuant's own choice
_ACT_ORDER = "act_order"


@dataclass(frozen=True)
class Step:
    """One step applied to a model before it is quantized.

    Attributes:
        spelt: maps what follows the name's colon, which may be nothing, to its standard spelling;
            raises UsageError.
        context: makes a context from a model, batches of text, the schemes for its weights, and
            the parameter in that spelling.
        reads: whether it needs text.
        rounds: whether it rounds the weights itself.
    """

    spelt: Callable[[str], str]
    context: Callable[[Any, Batches, Sequence[Scheme], str], AbstractContextManager[None]]
    reads: bool = False
    rounds: bool = False


def _no_parameter(given: str) -> str:
    if given:
        raise UsageError(f"rotate takes no parameter, as in 'rotate:{given}'")
    return ""


def _alpha(given: str) -> str:
    try:
        alpha = float(given or _ALPHA)
    except ValueError:
        alpha = -1.0
    if not 0 <= alpha <= 1:
        raise UsageError(f"smooth takes a number in [0, 1], as in smooth:0.5, not {given!r}")
    return f"{alpha:.12g}"


def _columns(given: str) -> str:
    if given not in ("", _ACT_ORDER):
        raise UsageError(
            f"gptq takes nothing or {_ACT_ORDER}, as in gptq:{_ACT_ORDER}, not {given!r}"
        )
    return given


# In the order in which they combine: a rotation folds the norms into the modules after them, which
# would undo a migration, and rounded weights must not be changed.
STEPS: dict[str, Step] = {
    "rotate": Step(
        _no_parameter, lambda model, work, *_: rotated(model, work[0] if work else None)
    ),
    "smooth": Step(
        _alpha, lambda model, work, _, alpha: smoothed(model, work, float(alpha)), reads=True
    ),
    "gptq": Step(
        _columns,
        lambda model, work, weights, columns: gptq_rounded(
            model, work, *weights, act_order=columns == _ACT_ORDER
        ),
        reads=True,
        rounds=True,
    ),
}


@dataclass(frozen=True)
class Remedy:
    """The steps applied to a model before it is quantized.

    Attributes:
        steps: names in `STEPS` and their parameters, in order; none for the unchanged model.
    """

    steps: tuple[tuple[str, str], ...] = ()

    @property
    def name(self) -> str:
        """The name, such as `rotate+smooth:0.5`; `none` for the unchanged model."""
        told = (f"{name}:{parameter}" if parameter else name for name, parameter in self.steps)
        return "+".join(told) or "none"

    @property
    def reads(self) -> bool:
        """Whether it needs text, to measure the inputs of linear modules."""
        return any(STEPS[name].reads for name, _ in self.steps)

    @property
    def rotates(self) -> bool:
        """Whether it changes the hidden states."""
        return "rotate" in dict(self.steps)

    def weights(self, schemes: Sequence[Scheme]) -> tuple[Scheme, ...]:
        """Those of `schemes` with which it rounds the weights itself."""
        if not any(STEPS[name].rounds for name, _ in self.steps):
            return ()
        return tuple(scheme for scheme in schemes if scheme.site == "weights" and scheme.quantizes)

    def left(self, schemes: Sequence[Scheme]) -> tuple[Scheme, ...]:
        """Those of `schemes` that remain for `fake_quantize` within the context."""
        own = self.weights(schemes)
        return tuple(scheme for scheme in schemes if scheme not in own)

    def check(self, schemes: Sequence[Scheme]) -> None:
        """Refuse schemes without one for weights if it rounds weights.

        Raises:
            UsageError: states this.
        """
        rounds = any(STEPS[name].rounds for name, _ in self.steps)
        if rounds and not self.weights(schemes):
            raise UsageError(f"{self.name} rounds weights, and there is no scheme for them")

    @contextmanager
    def applied(
        self, model: nn.Module, batches: Batches, schemes: Sequence[Scheme]
    ) -> Iterator[None]:
        """Apply the remedy to the model within a context.

        Args:
            model: as `smoothed`, `rotated` and `gptq_rounded` take it.
            batches: of text, on the model's device; may be empty unless it `reads`.
            schemes: what the model is then quantized with; pass those that are `left` to
                `fake_quantize`.

        Raises:
            UsageError: as `check` and the contexts of the steps.
            QuantizationError: as the contexts of the steps.
        """
        self.check(schemes)
        with ExitStack() as stack:
            for name, parameter in self.steps:
                context = STEPS[name].context(model, batches, self.weights(schemes), parameter)
                stack.enter_context(context)
            yield


NONE = Remedy()


def remedy(name: str) -> Remedy:
    """The remedy with a given name.

    Args:
        name: `none`; `rotate`; `smooth`, also with its α, `smooth:0.8`; `gptq`, also
            `gptq:act_order`; or sums in this order, such as `rotate+smooth:0.8`.

    Raises:
        UsageError: an unknown name or parameter, or another order.
    """
    if name == "none":
        return NONE
    steps = []
    for part in name.split("+"):
        known, colon, parameter = part.partition(":")
        if known not in STEPS or (colon and not parameter):
            raise UsageError(
                f"unknown remedy {part or name!r}; known: none, {', '.join(STEPS)}, and sums as in "
                "rotate+smooth:0.5"
            )
        steps.append((known, STEPS[known].spelt(parameter)))
    places = [list(STEPS).index(known) for known, _ in steps]
    if places != sorted(set(places)):
        raise UsageError(
            f"the remedies of {name!r} go together once each and in the order {', '.join(STEPS)}"
        )
    return Remedy(tuple(steps))
