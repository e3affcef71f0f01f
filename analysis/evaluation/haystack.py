"""Texts with needles: numbers of cities, hidden at given depths."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from quantdiff.analysis.evaluation.pairs import Encoder, Pair
from quantdiff.calibration.text import read_documents
from quantdiff.errors import UsageError

__all__ = ["CITIES", "SEED", "Haystack", "haystack", "words_there"]

SEED = 0
CITIES = (
    "Amsterdam", "Athens", "Baghdad", "Bangkok", "Barcelona", "Beijing", "Berlin", "Bogota",
    "Boston", "Brussels", "Budapest", "Cairo", "Chicago", "Copenhagen", "Dakar", "Delhi", "Dublin",
    "Geneva", "Havana", "Helsinki", "Istanbul", "Jakarta", "Kyoto", "Lagos", "Lima", "Lisbon",
    "London", "Madrid", "Manila", "Melbourne", "Montreal", "Moscow", "Mumbai", "Nairobi", "Oslo",
    "Paris", "Prague", "Quito", "Rome", "Seoul", "Singapore", "Stockholm", "Sydney", "Tokyo",
    "Toronto", "Vienna", "Warsaw", "Zurich",
)  # fmt: skip

_FEWEST_WORDS = 16


@dataclass(frozen=True)
class Haystack:
    """One text with its needles.

    Attributes:
        length: largest number of tokens, with question and answer.
        depth: position of the needles that are asked for, 0 at the start and 1 at the end.
        sample: number of the text among those of its length; its words, cities, numbers and
            answers are the same at all depths.
        cities, numbers: the needles; the first R of them are asked for.
        text: the whole text, without a question.
        pairs: for each of the R questions, the N numbers that may answer it.
        gold: for each question, the index of the right number among its pairs.
    """

    length: int
    depth: float
    sample: int
    cities: tuple[str, ...]
    numbers: tuple[str, ...]
    text: str
    pairs: tuple[tuple[Pair, ...], ...]
    gold: tuple[int, ...]


def haystack(
    encoder: Encoder, needles: int, queries: int, length: int, depth: float, sample: int
) -> Haystack:
    """Make one text, the same for the same arguments.

    It has as many words of the shipped held-out text as fit, with the needles on lines of their
    own: those that are asked for at `depth`, the others anywhere.

    Args:
        encoder: makes tokens.
        needles: N, how many are hidden.
        queries: R, how many are asked for.
        length: largest number of tokens, with question and answer; below `words_there()`.
        depth: in [0, 1].
        sample: number of the text among those of its length.

    Raises:
        UsageError: `length` is too short for the needles and a few words.
    """
    # The depth is not part of the seed: samples of all depths differ in nothing else.
    draw = random.Random(f"{SEED}/{needles}/{queries}/{length}/{sample}")
    cities = tuple(draw.sample(CITIES, needles))
    numbers = tuple(map(str, draw.sample(range(1000, 10000), needles)))
    depths = [depth] * queries + [draw.random() for _ in range(needles - queries)]
    # In random order, or needles at the same place would be in the order of the questions.
    hidden = draw.sample(list(zip(depths, cities, numbers, strict=True)), needles)
    begin = draw.randrange(words_there() - length)
    words = _words()[begin : begin + length]  # a word has at least one token
    # The first of equal scores wins, so the right number must not have a fixed place.
    answers = [draw.sample(numbers, needles) for _ in range(queries)]
    gold = tuple(each.index(numbers[query]) for query, each in enumerate(answers))

    def made(count: int) -> Haystack:
        text = _text(words[:count], hidden)
        pairs = tuple(
            tuple(encoder.pair(f"{text}\n{_statement(c)}", f" {n}", "a haystack") for n in each)
            for c, each in zip(cities, answers, strict=False)
        )
        return Haystack(length, depth, sample, cities, numbers, text, pairs, gold)

    least, most = 0, len(words)
    while least < most:
        middle = (least + most + 1) // 2
        question = f"{_statement(cities[0])} {numbers[0]}"
        fits = encoder.length(f"{_text(words[:middle], hidden)}\n{question}") <= length
        least, most = (middle, most) if fits else (least, middle - 1)
    # Another question or number may be some tokens longer than the first.
    while least >= _FEWEST_WORDS:
        result = made(least)
        if _longest(result.pairs) <= length:
            return result
        least -= 1
    raise UsageError(
        f"{needles} needles and {_FEWEST_WORDS} words around them do not fit into {length} tokens: "
        "use fewer needles or a greater length"
    )


def words_there() -> int:
    """Number of words in the text that haystacks are made of."""
    return len(_words())


@lru_cache(maxsize=1)
def _words() -> list[str]:
    return " ".join(read_documents("corpus")).split()


def _statement(city: str) -> str:
    return f"The magic number for {city} is"


def _text(words: Sequence[str], hidden: Sequence[tuple[float, str, str]]) -> str:
    """Words with the needles among them, each given by its depth, city and number."""
    parts, done = [], 0
    for depth, city, number in sorted(hidden, key=lambda needle: round(needle[0] * len(words))):
        place = round(depth * len(words))
        parts += [" ".join(words[done:place]), f"{_statement(city)} {number}."]
        done = place
    parts.append(" ".join(words[done:]))
    return "\n".join(part for part in parts if part)


def _longest(pairs: Sequence[Sequence[Pair]]) -> int:
    return max(len(p.context) + len(p.continuation) for each in pairs for p in each)
