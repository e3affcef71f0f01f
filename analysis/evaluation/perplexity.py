"""Perplexity on fixed windows of text."""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from quantdiff.analysis.evaluation.base import Evaluation, Metric, Outcome, Text, quiet, unstopped
from quantdiff.analysis.evaluation.estimates import check_finite, ratio
from quantdiff.analysis.evaluation.forward import Forward, batched, evaluating, target_nll
from quantdiff.analysis.evaluation.windows import (
    evaluation_windows,
    no_argument,
    scored,
    targets,
    window_settings,
)
from quantdiff.calibration.text import TextWindows

__all__ = ["COSTS", "Perplexity", "build", "likelihood"]

COSTS = {"perplexity": 1, "nll": 1}


@dataclass
class Perplexity(Evaluation):
    """`perplexity`: exp(sum of negative log-likelihoods / scored tokens) over all windows.

    Metrics: `perplexity`, and `nll`, its logarithm in nats per token. The standard error of `nll`
    is that of a ratio over windows (`estimates.ratio`); that of `perplexity` follows from it by the
    delta method: perplexity · stderr(nll).

    Items, for each of the W windows: `nll`, the sum in nats, (W,) fp64; `tokens`, how many were
    scored, (W,) int64.

    Attributes:
        forward: the model.
        windows: the text.
    """

    forward: Forward
    windows: TextWindows
    name: str
    data: str
    settings: dict[str, Any]
    total: int
    unit: str = "tokens"

    def run(
        self,
        context: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext,
        *,
        batch_size: int,
        progress: Callable[[int], None] = quiet,
        stop: Callable[[], bool] = unstopped,
    ) -> Outcome:
        """See `Evaluation.run`."""
        windows, sums = self.windows.windows, []
        with evaluating(self.forward.model), context():
            for batch in batched(windows, batch_size, len, progress, stop):
                wanted = self.forward(batch, [scored(window) for window in batch])
                nll, _ = target_nll(wanted, targets(list(batch)))  # (R,)
                sums += [float(part.sum()) for part in nll.split([len(w) - 1 for w in batch])]
        return Outcome(*likelihood(sums, windows))


def likelihood(
    sums: list[float], windows: list[Tensor]
) -> tuple[tuple[Metric, ...], dict[str, NDArray[Any]]]:
    """The metrics `perplexity` and `nll`, and the items `nll` and `tokens`.

    Args:
        sums: negative log-likelihood of each window, nats.
        windows: the windows.

    Raises:
        QuantizationError: a value is not finite.
    """
    items = {"nll": np.array(sums), "tokens": np.array([len(w) - 1 for w in windows])}
    check_finite(items["nll"], "the negative log-likelihood", "window")
    value, error = ratio(items["nll"], items["tokens"])
    with np.errstate(over="ignore"):
        perplexity = float(np.exp(value))
    check_finite(np.array([perplexity]), f"exp({value:.0f}), the perplexity,", "text")
    count = int(items["tokens"].sum())
    delta = None if error is None else perplexity * error
    metrics = Metric("perplexity", perplexity, delta, count), Metric("nll", value, error, count)
    return metrics, items


def build(name: str, argument: str, model: Any, tokenizer: Any, text: Text) -> Perplexity:
    """Make `perplexity` for a model.

    Raises:
        UsageError: an argument is given, or the text does not fit the model.
    """
    no_argument(name, argument)
    windows = evaluation_windows(model, tokenizer, text)
    return Perplexity(
        forward=Forward(model, tokenizer),
        windows=windows,
        name=name,
        data=windows.fingerprint,
        settings={"version": 1} | window_settings(windows),
        total=windows.tokens,
    )
