"""Passages with a marked answer: one window each, and the position of the answer's tokens."""

import json
from pathlib import Path
from typing import Any

import torch

from quantdiff.calibration.text import TextWindows, added_bos
from quantdiff.errors import UsageError
from quantdiff.models.tokenizing import untouched

__all__ = ["read_passages"]


def read_passages(
    source: str | Path, tokenizer: Any, *, seq_len: int
) -> tuple[TextWindows, list[tuple[int, int]]]:
    """Read passages whose answers are marked, for the attention mass on them.

    Args:
        source: a `.jsonl` file, one object per line: `text`, and `answer`, which is either a part
            of the text that occurs in it once, or [first character, last character + 1].
        tokenizer: a fast tokenizer of transformers.
        seq_len: the longest passage allowed, in tokens, BOS included.

    Returns:
        One window per passage, BOS first if the tokenizer adds one, and for each the span of its
        answer: the first token that holds a character of it, and the one after the last.

    Raises:
        UsageError: the file cannot be read; a line lacks a field; an answer does not occur in its
            text, or more than once; a passage is too short or too long; the tokenizer gives no
            offsets, or prepends several different tokens.
    """
    if not getattr(tokenizer, "is_fast", False):
        raise UsageError("passages need a fast tokenizer, which tells where its tokens stand")
    try:
        lines = Path(source).read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{source} cannot be read: {error}") from None
    bos = added_bos(tokenizer)
    windows, spans = [], []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        place = f"{source}, line {number}"
        text, (first, last) = _passage(line, place)
        with untouched(tokenizer):
            encoded = tokenizer(
                text, add_special_tokens=False, return_offsets_mapping=True, verbose=False
            )
        ids = [*([] if bos is None else [bos]), *encoded["input_ids"]]
        if len(ids) > seq_len or len(ids) < 2:
            raise UsageError(f"{place}: a passage of {len(ids)} tokens; it has 2 to {seq_len}")
        shift = len(ids) - len(encoded["input_ids"])
        inside = [
            i
            for i, (start, stop) in enumerate(encoded["offset_mapping"])
            if start < last and stop > first
        ]
        if not inside:
            raise UsageError(f"{place}: no token holds the answer")
        windows.append(torch.tensor(ids))
        spans.append((inside[0] + shift, inside[-1] + 1 + shift))
    if not windows:
        raise UsageError(f"{source} holds no passage")
    found = TextWindows(
        source=str(source),
        windows=windows,
        seq_len=seq_len,
        requested=sum(map(len, windows)),
        has_bos=bos is not None,
    )
    return found, spans


def _passage(line: str, place: str) -> tuple[str, tuple[int, int]]:
    try:
        row = json.loads(line)
        text, answer = row["text"], row["answer"]
    except (ValueError, KeyError, TypeError):
        raise UsageError(
            f'{place} is no object with text and answer, for example {{"text": "…", "answer": "…"}}'
        ) from None
    if not isinstance(text, str):
        raise UsageError(f"{place}: text is a string")
    if isinstance(answer, str) and answer:
        if text.count(answer) != 1:
            raise UsageError(
                f"{place}: the answer stands {text.count(answer)} times in the text; give "
                "[first character, last character + 1]"
            )
        first = text.index(answer)
        return text, (first, first + len(answer))
    if (
        isinstance(answer, list)
        and len(answer) == 2
        and all(type(x) is int for x in answer)
        and 0 <= answer[0] < answer[1] <= len(text)
    ):
        return text, (answer[0], answer[1])
    raise UsageError(
        f"{place}: answer is a part of the text or [first character, last character + 1]"
    )
