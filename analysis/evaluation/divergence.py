"""How far the next-token distributions move from those of the unquantized model."""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from quantdiff.analysis.evaluation.base import Evaluation, Metric, Outcome, Text, quiet, unstopped
from quantdiff.analysis.evaluation.estimates import check_finite, ratio
from quantdiff.analysis.evaluation.forward import Forward, batched, evaluating, target_nll
from quantdiff.analysis.evaluation.perplexity import likelihood
from quantdiff.analysis.evaluation.reference import Reference
from quantdiff.analysis.evaluation.windows import (
    evaluation_windows,
    no_argument,
    scored,
    targets,
    window_settings,
)
from quantdiff.calibration.text import TextWindows

__all__ = ["COSTS", "QUANTILES", "Divergence", "build", "divergence"]

COSTS = {"kl": 1, "agreement": -1, "perplexity": 1, "nll": 1}

QUANTILES = (0.5, 0.9, 0.99)


def divergence(reference: Tensor, logits: Tensor) -> Tensor:
    """Kullback-Leibler divergence of softmax(logits) from softmax(reference), row by row.

    Computed in fp64: it is about 1e-5 nats at 8 bits, and an fp32 log-softmax may be off by 1e-6.

    Args:
        reference, logits: (r, V).

    Returns:
        KL(reference || logits) in nats, (r,) fp64, at least 0.
    """
    p = reference.double().log_softmax(-1)
    q = logits.double().log_softmax(-1)
    terms = (p.exp() * (p - q)).masked_fill_(p == -torch.inf, 0)  # (r, V)
    return terms.sum(-1).clamp(min=0)  # rounding may leave -1e-17


@dataclass
class Divergence(Evaluation):
    """`divergence`: the model compared with itself without quantization, token by token.

    Computed over the same positions as `perplexity`. Metrics: `kl`, mean of KL(unquantized ||
    quantized) in nats per token, and `agreement`, the share of positions where both give the
    largest logit to the same token; then `perplexity` and `nll` of the same pass. Standard errors
    are those of a ratio over windows (`estimates.ratio`).

    Items, for each of the W windows: `kl`, sum in nats, (W,); `kl_max` (W,); `kl_quantiles`,
    (W, 3), those of `QUANTILES`; `agreement`, how many agree, (W,); `nll`, sum in nats, (W,);
    `tokens`, how many were scored, (W,).

    Attributes:
        forward: the model.
        windows: the text.
        reference: the unquantized model's logits, after `prepare`.
    """

    forward: Forward
    windows: TextWindows
    name: str
    data: str
    settings: dict[str, Any]
    total: int
    unit: str = "tokens"
    reference: Reference | None = None

    def prepare(
        self,
        folder: Path,
        *,
        batch_size: int,
        progress: Callable[[int], None] = quiet,
        stop: Callable[[], bool] = unstopped,
    ) -> None:
        """See `Evaluation.prepare`."""
        reference = Reference(self.forward.model, folder)
        with evaluating(self.forward.model), reference.watching():
            for batch in batched(self.windows.windows, batch_size, len, progress, stop):
                reference.add(self.forward(batch, [scored(window) for window in batch]))
        self.reference = reference

    def run(
        self,
        context: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext,
        *,
        batch_size: int,
        progress: Callable[[int], None] = quiet,
        stop: Callable[[], bool] = unstopped,
    ) -> Outcome:
        """See `Evaluation.run`.

        Raises:
            RuntimeError: `prepare` was not called before.
        """
        if self.reference is None:
            raise RuntimeError("a divergence needs prepare() before run()")
        windows = self.windows.windows
        # Allocated first: small tensors kept between freed large ones would fragment the heap.
        positions = sum(len(window) - 1 for window in windows)
        kl = torch.empty(positions, dtype=torch.float64)
        same = torch.empty(positions, dtype=torch.bool)
        sums, start = [], 0
        with evaluating(self.forward.model), context():
            for batch in batched(windows, batch_size, len, progress, stop):
                wanted = self.forward(batch, [scored(window) for window in batch])
                nll, _ = target_nll(wanted, targets(list(batch)))  # (R,)
                sums += [float(part.sum()) for part in nll.split([len(w) - 1 for w in batch])]
                for part, before, now in self.reference.blocks(start, wanted):
                    place = slice(start + part.start, start + part.start + len(now))
                    kl[place] = divergence(before, now)
                    same[place] = before.argmax(-1) == now.argmax(-1)
                start += len(wanted.rows)
        counts = [len(window) - 1 for window in windows]
        compared = _compared(kl, same, counts)
        metrics, items = likelihood(sums, windows)
        return Outcome((*compared.metrics, *metrics), compared.items | items)


def _compared(kl: Tensor, same: Tensor, counts: list[int]) -> Outcome:
    by_window = [part.numpy() for part in kl.split(counts)]
    items = {
        "kl": np.array([part.sum() for part in by_window]),
        "kl_max": np.array([part.max() for part in by_window]),
        "kl_quantiles": np.array([np.quantile(part, QUANTILES) for part in by_window]),
        "agreement": np.array([int(part.sum()) for part in same.split(counts)]),
        "tokens": np.array(counts),
    }
    check_finite(items["kl"], "the divergence from the unquantized model", "window")
    metrics = [
        Metric(name, *ratio(items[name], items["tokens"]), sum(counts))
        for name in ("kl", "agreement")
    ]
    return Outcome(tuple(metrics), items)


def build(name: str, argument: str, model: Any, tokenizer: Any, text: Text) -> Divergence:
    """Make `divergence` for a model.

    Raises:
        UsageError: an argument is given, or the text does not fit the model.
    """
    no_argument(name, argument)
    windows = evaluation_windows(model, tokenizer, text)
    # Part of what identifies a cell: with other words, no sweep would resume.
    definition = {"version": 1, "kl": "KL(unquantized || quantized), nats a token"}
    return Divergence(
        forward=Forward(model, tokenizer),
        windows=windows,
        name=name,
        data=windows.fingerprint,
        settings=definition | {"quantiles": list(QUANTILES)} | window_settings(windows),
        total=windows.tokens,
    )
