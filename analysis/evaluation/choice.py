"""Multiple choice by log-likelihood, with lm-eval's numbers."""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from quantdiff.analysis.evaluation.base import Evaluation, Metric, Outcome, Text, quiet, unstopped
from quantdiff.analysis.evaluation.estimates import mean
from quantdiff.analysis.evaluation.forward import Forward, evaluating
from quantdiff.analysis.evaluation.pairs import Pair, question_pairs
from quantdiff.analysis.evaluation.reading import Question, fingerprint, read_questions
from quantdiff.analysis.evaluation.scoring import best, score_choices

__all__ = ["COSTS", "Choice", "build"]

COSTS = {"acc": -1, "acc_norm": -1}


@dataclass
class Choice(Evaluation):
    """`choice:FILE`, or `choice:FILE@N` for its first N questions; see `read_questions`.

    Metrics: `acc`, the share of questions whose right choice has the largest summed
    log-likelihood; `acc_norm`, the same by log-likelihood per character of the choice. Standard
    errors are lm-eval's, sample standard deviation over √n.

    Items, for Q questions of at most C choices: `log_likelihoods` (Q, C) fp64, NaN where there is
    no such choice; `lengths` in characters (Q, C), 0 there; `gold`, `correct`, `correct_norm` (Q,).

    Attributes:
        forward: the model.
        questions: in the order of the file.
        pairs: their choices as tokens.
    """

    forward: Forward
    questions: list[Question]
    pairs: list[list[Pair]]
    name: str
    data: str
    settings: dict[str, Any]
    total: int
    unit: str = "questions"

    def run(
        self,
        context: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext,
        *,
        batch_size: int,
        progress: Callable[[int], None] = quiet,
        stop: Callable[[], bool] = unstopped,
    ) -> Outcome:
        """See `Evaluation.run`."""
        with evaluating(self.forward.model), context():
            scores, _ = score_choices(
                self.forward, self.pairs, batch_size=batch_size, progress=progress, stop=stop
            )
        gold = np.array([question.gold for question in self.questions])
        lengths = np.zeros(scores.shape, dtype=np.int64)
        for row, question in zip(lengths, self.questions, strict=True):
            row[: len(question.choices)] = list(map(len, question.choices))
        items = {
            "log_likelihoods": scores,
            "lengths": lengths,
            "gold": gold,
            "correct": best(scores) == gold,
            "correct_norm": best(scores / np.maximum(lengths, 1)) == gold,
        }
        metrics = (
            Metric("acc", *mean(items["correct"]), len(gold)),
            Metric("acc_norm", *mean(items["correct_norm"]), len(gold)),
        )
        return Outcome(metrics, items)


def build(name: str, argument: str, model: Any, tokenizer: Any, text: Text) -> Choice:
    """Make `choice:FILE` for a model.

    Raises:
        UsageError: the file or one of its questions cannot be used; names the line.
    """
    questions = read_questions(argument)
    return Choice(
        forward=Forward(model, tokenizer),
        questions=questions,
        pairs=question_pairs(model, tokenizer, questions),
        name=name,
        data=fingerprint(questions),
        settings={
            "version": 1,
            "questions": len(questions),
            "acc": "largest summed log-likelihood",
            "acc_norm": "largest log-likelihood per character of the choice",
        },
        total=len(questions),
    )
