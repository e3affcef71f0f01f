"""The common interface of evaluations: questions about a model, answered with numbers."""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from numpy.typing import NDArray

__all__ = ["CUT", "Evaluation", "Metric", "Outcome", "Stopped", "Text", "quiet", "unstopped"]

# A metric: the share of requests that were too long. It has no items; absent if none were.
CUT = "cut"


@dataclass(frozen=True)
class Metric:
    """One number of an evaluation.

    Attributes:
        name: for example `perplexity`.
        value: finite.
        stderr: standard error of the value; None where it is not known.
        count: how many tokens, questions, requests or layers the value stands for.
    """

    name: str
    value: float
    stderr: float | None
    count: int


@dataclass(frozen=True)
class Outcome:
    """All numbers of one evaluation of one model.

    Attributes:
        metrics: in the order in which they are shown; the first is the evaluation's main one.
        items: results per question, window or layer, so that models can be compared pairwise:
            arrays with these as the first dimension, in their order in the data or the model.
    """

    metrics: tuple[Metric, ...]
    items: dict[str, NDArray[Any]] = field(default_factory=dict)


@dataclass(frozen=True)
class Text:
    """The text for evaluations that bring none of their own.

    Attributes:
        source: a `--data` value.
        tokens: the largest number of tokens to use.
        seq_len: tokens per window; None for 2,048 or the model's context, whichever is less.
    """

    source: str = "corpus"
    tokens: int = 16384
    seq_len: int | None = None


class Stopped(Exception):  # noqa: N818  (no error: the user asked for it)
    """An evaluation was asked to stop before it was complete; it has no outcome."""


def quiet(done: int) -> None:
    """A progress function that reports nothing."""


def unstopped() -> bool:
    """A stop function that never stops."""
    return False


class Evaluation(Protocol):
    """One evaluation with its data, made for one model; `run` may be called for many schemes.

    Attributes:
        name: as the user wrote it, for example `choice:questions.jsonl`.
        data: fingerprint of the data, SHA-256 as hex; for text, that of its windows.
        settings: everything else that the result depends on, as JSON values: definitions, numbers,
            versions of the format.
        total: units of progress of one run.
        unit: what they are: `tokens`, `questions`.
    """

    name: str
    data: str
    settings: dict[str, Any]
    total: int
    unit: str

    def prepare(
        self,
        folder: Path,
        *,
        batch_size: int,
        progress: Callable[[int], None] = quiet,
        stop: Callable[[], bool] = unstopped,
    ) -> None:
        """Run the model as it is, once, if results are compared with that; otherwise do nothing.

        Args:
            folder: an existing folder, for what is too large for memory.
            batch_size: sequences in one forward pass; affects results only by rounding.
            progress: called with the units done since the last call.
            stop: called now and then; True stops the evaluation.

        Raises:
            Stopped: `stop` returned True.
        """
        return

    def run(
        self,
        context: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext,
        *,
        batch_size: int,
        progress: Callable[[int], None] = quiet,
        stop: Callable[[], bool] = unstopped,
    ) -> Outcome:
        """Evaluate the model as it computes within `context`.

        Args:
            context: returns a context manager, such as `quantdiff.fake_quantize`'s; entered once.
            batch_size, progress, stop: as in `prepare`.

        Raises:
            Stopped: `stop` returned True.
            QuantizationError: a value is not finite.
        """
