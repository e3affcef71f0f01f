"""A context and its continuation as tokens, cut where lm-eval cuts them."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from quantdiff.analysis.evaluation.reading import Question
from quantdiff.errors import UsageError
from quantdiff.models import context_length, vocabulary_size
from quantdiff.models.tokenizing import untouched

__all__ = ["Encoder", "Pair", "check_pairs", "question_pairs"]


@dataclass(frozen=True)
class Pair:
    """Tokens that are given, and tokens whose log-likelihood is wanted; neither is empty."""

    context: tuple[int, ...]
    continuation: tuple[int, ...]

    @property
    def inputs(self) -> tuple[int, ...]:
        """What the model sees: all but the last token, which is only predicted."""
        return self.context + self.continuation[:-1]


class Encoder:
    """Turns text into pairs as lm-eval's `HFLM` does.

    Context and continuation are tokenized as one text, with whatever special tokens the tokenizer
    adds by default, and split after as many tokens as the context has alone; spaces at the end of
    the context go to the continuation. A text that starts with a written-out BOS gets no second
    one. A BOS replaces an empty context, or an EOS if the tokenizer has no BOS.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        bos = getattr(tokenizer, "bos_token_id", None)
        self._prefix: int | None = tokenizer.eos_token_id if bos is None else bos
        self._mark = "" if self._prefix is None else tokenizer.decode(self._prefix)

    def pair(self, context: str, continuation: str, place: str) -> Pair:
        """Tokens of one pair.

        Args:
            context: what is given; may be empty.
            continuation: what follows, with the space before it.
            place: where the pair comes from, for the message.

        Raises:
            UsageError: the continuation adds no token to the context, or nothing can stand for an
                empty context.
        """
        kept = context.rstrip()
        continuation = context[len(kept) :] + continuation
        if kept:
            start = self._ids(kept)
            whole = self._ids(kept + continuation)
            pair = Pair(tuple(start), tuple(whole[len(start) :]))
        else:
            if self._prefix is None:
                raise UsageError(
                    f"{place} has an empty query, for which the tokenizer has neither BOS nor EOS"
                )
            ids = self._ids(continuation, plain=True)
            rest = ids[1:] if ids[:1] == [self._prefix] else ids
            pair = Pair((self._prefix,), tuple(rest))
        if not pair.continuation:
            raise UsageError(
                f"{place} has a choice that adds no token to its query: {continuation.strip()!r}"
            )
        return pair

    def length(self, text: str) -> int:
        """Number of tokens of a text, special ones included."""
        return len(self._ids(text))

    def _ids(self, text: str, plain: bool = False) -> list[int]:
        options: dict[str, Any] = {"truncation": False, "padding": False, "verbose": False}
        if plain or (self._mark and text.startswith(self._mark)):
            options["add_special_tokens"] = False
        with untouched(self._tokenizer):
            return list(self._tokenizer(text, **options)["input_ids"])


def check_pairs(model: Any, pairs: Iterable[Pair], place: str) -> None:
    """Refuse pairs that the model cannot take.

    Raises:
        UsageError: one is longer than the model's context, or has a token without an embedding.
    """
    limit, known = context_length(model), vocabulary_size(model)
    for pair in pairs:
        if limit is not None and len(pair.inputs) > limit:
            raise UsageError(
                f"{place} has a query and choice of {len(pair.context)} + "
                f"{len(pair.continuation)} tokens, beyond the model's context of {limit}"
            )
        largest = max(pair.context + pair.continuation)
        if largest >= known:
            raise UsageError(
                f"{place} has token id {largest}, outside the model's vocabulary of {known}: use "
                "the model's own tokenizer"
            )


def question_pairs(
    model: Any, tokenizer: Any, questions: Sequence[Question], before: str = ""
) -> list[list[Pair]]:
    """Pairs of every question's choices, in order.

    Args:
        model: its context and vocabulary bound the pairs.
        tokenizer: its tokenizer.
        questions: all of them.
        before: text in front of each query, such as examples.

    Raises:
        UsageError: a question cannot be asked; names its place.
    """
    encoder = Encoder(tokenizer)
    pairs = []
    for question in questions:
        query = before + question.query
        made = [encoder.pair(query, f" {choice}", question.place) for choice in question.choices]
        check_pairs(model, made, question.place)
        pairs.append(made)
    return pairs
