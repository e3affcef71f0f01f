"""What every evaluation is: a question about a model that is answered with numbers."""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from numpy.typing import NDArray

__all__ = ["CUT", "Evaluation", "Metric", "Outcome", "Stopped", "Text", "quiet", "unstopped"]

# A metric: the share of requests that were too long; without items, and where some were alone.
CUT = "cut"


@dataclass(frozen=True)
class Metric:
    """One number of an evaluation.

    Attributes:
        name: for example `perplexity`.
        value: finite.
        stderr: standard error over the `count` things, where it is known.
        count: how many tokens, questions or windows the value stands for.
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
        items: results of each question or window, so that models can be compared pairwise: arrays
            whose first dimension is that of the questions, in their order in the data.
    """

    metrics: tuple[Metric, ...]
    items: dict[str, NDArray[Any]] = field(default_factory=dict)


@dataclass(frozen=True)
class Text:
    """The text that evaluations run on which bring none of their own.

    Attributes:
        source: a `--data` value.
        tokens: at most so many tokens.
        seq_len: tokens a window; None for 2,048 or the model's context, whichever is less.
    """

    source: str = "corpus"
    tokens: int = 16384
    seq_len: int | None = None


class Stopped(Exception):  # noqa: N818  (no error: the user asked for it)
    """An evaluation was asked to stop before it was done; it has no outcome."""


def quiet(done: int) -> None:
    """A progress function that tells nobody."""


def unstopped() -> bool:
    """A stop function that never stops."""
    return False


class Evaluation(Protocol):
    """One evaluation with its data, made for one model; `run` may be called for many schemes.

    Attributes:
        name: as the user wrote it, for example `choice:questions.jsonl`.
        data: fingerprint of the data, SHA-256 as hex; of text that of its windows.
        settings: all else that the result depends on, JSON values: definitions, numbers, versions
            of the format.
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
        """Run the model as it is, once, where results are compared with that; else do nothing.

        Args:
            folder: exists, for what is too large for memory.
            batch_size: sequences in one forward pass; moves results by rounding alone.
            progress: told the units done since the last call.
            stop: asked now and then.

        Raises:
            Stopped: `stop` said so.
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
            context: gives a context, such as that of `quantdiff.fake_quantize`; entered once.
            batch_size, progress, stop: as in `prepare`.

        Raises:
            Stopped: `stop` said so.
            QuantizationError: a value is not finite.
        """
