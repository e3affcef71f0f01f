"""Evaluations of a model, quantized or not: one file an evaluation, one line in the registry."""

import importlib
from typing import Any

from quantdiff.analysis.evaluation.base import Evaluation, Metric, Outcome, Stopped, Text
from quantdiff.errors import UsageError

__all__ = [
    "EVALUATIONS",
    "Evaluation",
    "Metric",
    "Outcome",
    "Stopped",
    "Text",
    "cost_sign",
    "evaluation",
]

# Name -> module with `build(name, argument, model, tokenizer, text) -> Evaluation`, which raises
# UsageError. `argument` is what stands behind the colon, "" if there is none. Its `COSTS` tell of
# which metrics more is worse, 1, or better, -1.
EVALUATIONS = {
    "perplexity": "perplexity",
    "divergence": "divergence",
    "choice": "choice",
    "lm-eval": "harness",
    "needles": "needles",
    "order": "order",
    "noise": "noise",
}


def evaluation(name: str, model: Any, tokenizer: Any, text: Text | None = None) -> Evaluation:
    """Make an evaluation of a model.

    Args:
        name: `perplexity`, `divergence`, `choice:FILE[@N]`, `lm-eval:TASK[@N]`,
            `needles[:N,R[@LENGTHS]]`, `order:FILE[@N]`, `noise`; the class in each one's module
            says more.
        model: a causal language model.
        tokenizer: its tokenizer.
        text: for the evaluations that run on text.

    Raises:
        UsageError: an evaluation that is not known, or data that do not fit the model.
    """
    kind, _, argument = name.partition(":")
    if kind not in EVALUATIONS:
        raise UsageError(f"unknown evaluation {name!r}; known: {', '.join(EVALUATIONS)}")
    made: Evaluation = _module(kind).build(name, argument, model, tokenizer, text or Text())
    return made


def cost_sign(name: str, metric: str) -> int | None:
    """Whether more of a metric is worse, 1, or better, -1; None where that is not known.

    Args:
        name: of the evaluation, also one that this version does not know.
        metric: as in `results.jsonl`: lm-eval's may have a task before it and a filter behind.
    """
    kind = name.partition(":")[0]
    costs: dict[str, int] = _module(kind).COSTS if kind in EVALUATIONS else {}
    return costs.get(metric.rpartition(":")[2].partition(",")[0])


def _module(kind: str) -> Any:
    return importlib.import_module(f"quantdiff.analysis.evaluation.{EVALUATIONS[kind]}")
