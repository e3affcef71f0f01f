"""Evaluations of a model, quantized or not: one module and one registry line per evaluation."""

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
# UsageError. `argument` is what follows the colon, "" if there is none. The module's `COSTS` maps
# metrics to 1 where more is worse and -1 where more is better.
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
            `needles[:N,R[@LENGTHS]]`, `order:FILE[@N]`, `noise`; described by the class in each
            one's module.
        model: a causal language model.
        tokenizer: its tokenizer.
        text: for the evaluations that run on text.

    Raises:
        UsageError: the evaluation is unknown, or its data do not fit the model.
    """
    kind, _, argument = name.partition(":")
    if kind not in EVALUATIONS:
        raise UsageError(f"unknown evaluation {name!r}; known: {', '.join(EVALUATIONS)}")
    made: Evaluation = _module(kind).build(name, argument, model, tokenizer, text or Text())
    return made


def cost_sign(name: str, metric: str) -> int | None:
    """1 if more of a metric is worse, -1 if more is better, None if that is not known.

    Args:
        name: of the evaluation; may be one that this version does not know.
        metric: as in `results.jsonl`; lm-eval's may have a task in front and a filter at the end.
    """
    kind = name.partition(":")[0]
    costs: dict[str, int] = _module(kind).COSTS if kind in EVALUATIONS else {}
    return costs.get(metric.rpartition(":")[2].partition(",")[0])


def _module(kind: str) -> Any:
    return importlib.import_module(f"quantdiff.analysis.evaluation.{EVALUATIONS[kind]}")
