"""In-context learning: how much the order of the examples matters."""

import contextlib
import hashlib
import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from quantdiff.analysis.evaluation.base import Evaluation, Metric, Outcome, Text, quiet, unstopped
from quantdiff.analysis.evaluation.estimates import mean
from quantdiff.analysis.evaluation.forward import Forward, evaluating
from quantdiff.analysis.evaluation.pairs import Pair, question_pairs
from quantdiff.analysis.evaluation.reading import (
    Question,
    fingerprint,
    read_questions,
    split_limit,
)
from quantdiff.analysis.evaluation.scoring import best, score_choices
from quantdiff.errors import UsageError

__all__ = ["COSTS", "EXAMPLES", "ORDERS", "Order", "build"]

COSTS = {"acc": -1}
EXAMPLES = 4
ORDERS = 8
_SEED = 0


@dataclass
class Order(Evaluation):
    """`order:FILE`, or `order:FILE@N`: the same examples in several orders before each question.

    The first `EXAMPLES` questions of the file, with their right choices, are the examples; the N
    after them are asked. A blank line separates questions, as in lm-eval. Every question sees the
    same `ORDERS` orders, drawn without repetition.

    Metrics: `acc`, by summed log-likelihood, mean over orders and questions, its standard error
    over questions; `spread`, largest minus smallest accuracy of an order; `std`, the sample
    standard deviation of the accuracy over orders. The latter two have no standard error.

    Items, for Q questions, P orders and at most C choices: `correct` (Q, P), `log_likelihoods`
    (Q, P, C), `gold` (Q,).

    Attributes:
        forward: the model.
        questions: those that are asked.
        pairs: choices of every question for every order, Q × P.
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
        count = len(self.questions)
        gold = np.array([question.gold for question in self.questions])
        correct = best(scores).reshape(count, ORDERS) == gold[:, None]  # (Q, P)
        by_order = correct.mean(0)  # (P,)
        metrics = (
            Metric("acc", *mean(correct.mean(1)), count),
            Metric("spread", float(by_order.max() - by_order.min()), None, count),
            Metric("std", float(by_order.std(ddof=1)), None, count),
        )
        items = {
            "correct": correct,
            "log_likelihoods": scores.reshape(count, ORDERS, -1),
            "gold": gold,
        }
        return Outcome(metrics, items)


def _orders() -> list[list[int]]:
    every = list(itertools.permutations(range(EXAMPLES)))
    return list(map(list, random.Random(_SEED).sample(every, ORDERS)))


def _examples(questions: Sequence[Question], order: Sequence[int]) -> str:
    parts = (questions[i] for i in order)
    return "".join(f"{part.query} {part.choices[part.gold]}\n\n" for part in parts)


def build(name: str, argument: str, model: Any, tokenizer: Any, text: Text) -> Order:
    """Make `order:FILE` for a model.

    Raises:
        UsageError: the file or one of its questions cannot be used, or there are too few questions.
    """
    file, limit = split_limit(argument)
    rows = read_questions(file if limit is None else f"{file}@{limit + EXAMPLES}")
    examples, questions = rows[:EXAMPLES], rows[EXAMPLES:]
    if not questions:
        raise UsageError(
            f"{file} holds {len(rows)} questions: {EXAMPLES} are examples, and none is left to ask"
        )
    orders = _orders()
    by_order = [
        question_pairs(model, tokenizer, questions, before=_examples(examples, order))
        for order in orders
    ]
    data = f"{fingerprint(examples)}{fingerprint(questions)}"
    return Order(
        forward=Forward(model, tokenizer),
        questions=questions,
        pairs=[pairs for each in zip(*by_order, strict=True) for pairs in each],
        name=name,
        data=hashlib.sha256(data.encode()).hexdigest(),
        settings={
            "version": 1,
            "questions": len(questions),
            "examples": EXAMPLES,
            "orders": orders,
            "seed": _SEED,
        },
        total=len(questions) * ORDERS,
    )
