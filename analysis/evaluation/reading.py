"""Multiple-choice questions from a JSON Lines file."""

import hashlib
import json
import lzma
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quantdiff.errors import UsageError

__all__ = ["SHIPPED", "Question", "fingerprint", "read_questions", "split_limit"]

# Files in the folder `questions`, opened by these names.
SHIPPED = {"goal_inference": "goal_inference.jsonl.xz"}

_FOLDER = Path(__file__).with_name("questions")


@dataclass(frozen=True)
class Question:
    """One question with several choices.

    Attributes:
        query: what the model is given; a choice continues it after one space.
        choices: at least two, none empty.
        gold: index of the right one, from 0.
        place: file and line, for messages.
    """

    query: str
    choices: tuple[str, ...]
    gold: int
    place: str


def split_limit(argument: str) -> tuple[str, int | None]:
    """Split an argument into what precedes `@N`, and N; None if there is no `@N`.

    Raises:
        UsageError: N is 0.
    """
    found = re.fullmatch(r"(.*)@(\d+)", argument, re.DOTALL)
    if not found:
        return argument, None
    if int(found[2]) == 0:
        raise UsageError(f"{argument!r} asks for no questions: use @1 or more, or leave @ out")
    return found[1], int(found[2])


def fingerprint(questions: Sequence[Question]) -> str:
    """SHA-256 over all queries, choices and right answers, as hex."""
    digest = hashlib.sha256()
    for question in questions:
        row = [question.query, question.choices, question.gold]
        digest.update(json.dumps(row).encode() + b"\n")
    return digest.hexdigest()


def read_questions(argument: str) -> list[Question]:
    """Read the questions of `FILE`, or at most the first N of them for `FILE@N`.

    Args:
        argument: a name of `SHIPPED`, or a `.jsonl` or `.jsonl.xz` file. A line holds lm-eval's
            `query`, `choices` and `gold`, or the `ctx` (or `ctx_a` and `ctx_b`), `endings`,
            `label` and optionally `activity_label` of HellaSwag, cleaned as in lm-eval.

    Raises:
        UsageError: the file is missing, broken, empty or of another kind; or a line is not JSON,
            lacks a key, has fewer than two choices or an answer that is not among them.
    """
    name, limit = split_limit(argument)
    path = _FOLDER / SHIPPED[name] if name in SHIPPED else Path(name)
    if not name or (name not in SHIPPED and not name.lower().endswith((".jsonl", ".jsonl.xz"))):
        raise UsageError(
            f"{name!r} is no file of questions: name a .jsonl or .jsonl.xz file, or one that is "
            f"shipped ({', '.join(SHIPPED)})"
        )
    if not path.is_file():
        raise UsageError(f"there is no file {name}: check the path")
    questions = []
    for place, row in _rows(path, name):
        questions.append(_question(row, place))
        if limit is not None and len(questions) == limit:
            break
    if not questions:
        raise UsageError(f"{name} holds no question: write one JSON object a line")
    return questions


def _rows(path: Path, name: str) -> Iterator[tuple[str, dict[str, Any]]]:
    try:
        with lzma.open(path) if path.suffix.lower() == ".xz" else path.open("rb") as stream:
            for number, raw in enumerate(stream, start=1):
                place = f"{name}, line {number},"
                try:
                    line = raw.decode("utf-8-sig" if number == 1 else "utf-8")
                except UnicodeDecodeError as error:
                    raise UsageError(f"{place} is not UTF-8: save the file as UTF-8") from error
                if line.strip():
                    yield place, _object(line, place)
    except (lzma.LZMAError, EOFError) as error:
        raise UsageError(f"{name} is broken or no xz file ({error}): compress it again") from error
    except OSError as error:
        raise UsageError(f"{name} cannot be read: {error.strerror or error}") from error


def _object(line: str, place: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{place} is not JSON ({error}): mend or drop the line") from error
    if not isinstance(row, dict):
        raise UsageError(f"{place} is not an object with a query, choices and gold")
    return row


def _question(row: dict[str, Any], place: str) -> Question:
    hellaswag = "endings" in row
    choices_key, gold_key = ("endings", "label") if hellaswag else ("choices", "gold")
    query_key = "query"
    if hellaswag:
        query_key = "ctx_a" if "ctx_a" in row else "ctx"
    for key in (query_key, choices_key, gold_key):
        if key not in row:
            raise UsageError(
                f"{place} has no {key!r}: a line needs query, choices and gold, or HellaSwag's "
                "ctx, endings and label"
            )
    query = _hellaswag_query(row, place) if hellaswag else _string(row["query"], "query", place)
    if not isinstance(row[choices_key], list) or len(row[choices_key]) < 2:
        raise UsageError(f"{place} has fewer than two {choices_key}: give a list of at least two")
    choices = [_string(choice, choices_key, place) for choice in row[choices_key]]
    if hellaswag:
        choices = [_cleaned(choice) for choice in choices]
    if not all(choices):
        raise UsageError(f"{place} has an empty text among its {choices_key}")
    return Question(query, tuple(choices), _gold(row[gold_key], gold_key, choices, place), place)


def _gold(value: Any, key: str, choices: list[str], place: str) -> int:
    if isinstance(value, str) and key == "label" and value.isdecimal():
        value = int(value)  # the published files have strings
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < len(choices):
        raise UsageError(
            f"{place} has {key} {value!r}, which is none of its {len(choices)} choices: count "
            f"them from 0 to {len(choices) - 1}"
        )
    return value


def _string(value: Any, key: str, place: str) -> str:
    if not isinstance(value, str):
        raise UsageError(f"{place} has a {type(value).__name__} in {key!r} where a text belongs")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise UsageError(f"{place} holds half a surrogate pair in {key!r}: mend it") from error
    return value


def _hellaswag_query(row: dict[str, Any], place: str) -> str:
    """The context as lm-eval's task `hellaswag` makes it, with the topic in front."""
    if "ctx_a" in row:
        second = _string(row.get("ctx_b", ""), "ctx_b", place)
        context = f"{_string(row['ctx_a'], 'ctx_a', place)} {second.capitalize()}"
    else:
        context = _string(row["ctx"], "ctx", place)
    if "activity_label" in row:
        context = f"{_string(row['activity_label'], 'activity_label', place)}: {context}"
    return _cleaned(context)


def _cleaned(text: str) -> str:
    """The text without the bracketed marks of HellaSwag's WikiHow part."""
    text = re.sub(r"\[.*?\]", "", text.strip().replace(" [title]", ". "))
    return text.replace("  ", " ")
