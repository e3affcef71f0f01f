"""Needles in a haystack: numbers of cities, hidden in a text and asked for at its end."""

import contextlib
import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from quantdiff.analysis.evaluation.base import Evaluation, Metric, Outcome, Text, quiet, unstopped
from quantdiff.analysis.evaluation.estimates import mean
from quantdiff.analysis.evaluation.forward import Forward, evaluating
from quantdiff.analysis.evaluation.haystack import CITIES, SEED, Haystack, haystack, words_there
from quantdiff.analysis.evaluation.pairs import Encoder, check_pairs
from quantdiff.analysis.evaluation.scoring import best, score_choices
from quantdiff.errors import UsageError
from quantdiff.models import context_length

__all__ = ["COSTS", "DEPTHS", "SAMPLES", "Needles", "build"]

COSTS = {"acc": -1, "exact": -1}
DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)
SAMPLES = 10

_LONGEST = 2048


@dataclass
class Needles(Evaluation):
    """`needles:N,R`, or `needles:N,R@LENGTH,LENGTH`: retrieval of R of N needles.

    The setup is that of arXiv 2410.05258, section 3.3: needles, each the magic number of a city, in
    a text of a given length; those that are asked for are at depths 0, ¼, ½, ¾ and 1, the others
    anywhere; `SAMPLES` texts per length, each with its needles at all depths. There the model
    writes the numbers; here, for models too small to do so, each question is about one city, and
    its choices are the N numbers in the text, in random order: chance is 1/N. A run scores
    lengths · 5 · `SAMPLES` · R · N choices.

    Metrics: `acc`, the share of questions whose number has the largest log-likelihood, and `exact`,
    the share where greedy decoding would write it. Standard errors are over texts: the R questions
    about one at five depths share its words, cities and numbers, and are not independent draws.

    Items, for each question: `length`, `depth`, `text` (its number, the same at all depths),
    `correct`, `exact` (Q,), `log_likelihoods` (Q, N), the right number's in column `gold` (Q,).

    Attributes:
        forward: the model.
        texts: all haystacks, length by length and depth by depth.
    """

    forward: Forward
    texts: list[Haystack]
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
        pairs = [each for text in self.texts for each in text.pairs]
        with evaluating(self.forward.model), context():
            scores, greedy = score_choices(
                self.forward, pairs, batch_size=batch_size, progress=progress, stop=stop
            )
        queries = len(self.texts[0].pairs)
        gold = np.concatenate([text.gold for text in self.texts])
        numbers: dict[tuple[int, int], int] = {}
        for text in self.texts:
            numbers.setdefault((text.length, text.sample), len(numbers))
        items = {
            "length": np.repeat([text.length for text in self.texts], queries),
            "depth": np.repeat([text.depth for text in self.texts], queries),
            "text": np.repeat([numbers[t.length, t.sample] for t in self.texts], queries),
            "gold": gold,
            "log_likelihoods": scores,
            "correct": best(scores) == gold,
            "exact": greedy[np.arange(len(gold)), gold],
        }
        asked = np.bincount(items["text"])  # questions about each text
        metrics = [
            Metric(name, *mean(np.bincount(items["text"], items[key]) / asked), len(gold))
            for name, key in (("acc", "correct"), ("exact", "exact"))
        ]
        return Outcome(tuple(metrics), items)


def _parsed(name: str, argument: str, model: Any) -> tuple[int, int, list[int]]:
    counts, _, rest = argument.partition("@")
    limit = context_length(model)
    longest = min(_LONGEST, limit or _LONGEST)
    try:
        needles, queries = map(int, counts.split(",")) if counts else (4, 2)
        lengths = [int(part) for part in rest.split(",")] if rest else [longest // 2, longest]
    except ValueError:
        raise UsageError(
            f"{name!r} is not of the form needles:N,R or needles:N,R@LENGTH,LENGTH: mend it"
        ) from None
    if not 2 <= needles <= len(CITIES) or not 1 <= queries <= needles:
        raise UsageError(
            f"{name!r} asks for {queries} of {needles} needles: hide 2 to {len(CITIES)}, and ask "
            "for 1 or more of them"
        )
    if min(lengths) < 1 or (limit is not None and max(lengths) > limit):
        raise UsageError(
            f"{name!r} has a length beyond the model's context of {limit} tokens, or below 1"
        )
    if max(lengths) >= words_there():
        raise UsageError(
            f"{name!r} has a length that the shipped text of {words_there():,} words may not fill: "
            "use a shorter one"
        )
    return needles, queries, lengths


def build(name: str, argument: str, model: Any, tokenizer: Any, text: Text) -> Needles:
    """Make `needles` for a model, by default with 4 needles and 2 questions.

    Raises:
        UsageError: the argument has another form, or its lengths do not fit model or needles.
    """
    needles, queries, lengths = _parsed(name, argument, model)
    encoder, digest = Encoder(tokenizer), hashlib.sha256()
    texts = [
        haystack(encoder, needles, queries, length, depth, sample)
        for length in lengths
        for depth in DEPTHS
        for sample in range(SAMPLES)
    ]
    for made in texts:
        check_pairs(model, [pair for each in made.pairs for pair in each], name)
        digest.update(f"{made.cities}{made.numbers}{made.text}\n".encode())
    return Needles(
        forward=Forward(model, tokenizer),
        texts=texts,
        name=name,
        data=digest.hexdigest(),
        settings={
            "version": 2,
            "needles": needles,
            "queries": queries,
            "lengths": lengths,
            "depths": list(DEPTHS),
            "samples": SAMPLES,
            "seed": SEED,
            "haystack": "corpus",
        },
        total=len(texts) * queries,
    )
