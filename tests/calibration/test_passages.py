"""Passages with a marked answer."""

import json

import pytest

from quantdiff.calibration.passages import read_passages
from quantdiff.errors import UsageError
from tests.tiny import tiny_tokenizer


def write(path, *rows):
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


@pytest.mark.parametrize("bos", [True, False])
def test_spans_are_the_tokens_of_the_answer(tmp_path, bos):
    tokenizer = tiny_tokenizer(bos=bos)
    text = "The key is 4711, said the λ-man in the inn."
    first = text.index("λ")
    path = write(
        tmp_path / "p.jsonl",
        {"text": text, "answer": "4711"},
        {"text": text, "answer": [first, first + 5]},
        json.dumps({"text": f"{text}\u2028", "answer": "e λ-man"}, ensure_ascii=False),
    )
    windows, spans = read_passages(path, tokenizer, seq_len=64)
    assert windows.has_bos is bos
    assert windows.sequences == len(spans) == 3
    for window, (start, stop), answer in zip(
        windows.windows, spans, ("4711", "λ-man", "e λ-man"), strict=True
    ):
        assert tokenizer.decode(window[start:stop]).endswith(answer)
        # No token too many: without the first or the last of them the answer is cut.
        assert answer not in tokenizer.decode(window[start + 1 : stop])
        assert answer not in tokenizer.decode(window[start : stop - 1])
        assert (int(window[0]) == tokenizer.bos_token_id) is bos


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ("no json", "line 2 is no object with text and answer"),
        ({"text": "a b"}, "line 2 is no object with text and answer"),
        ({"text": 3, "answer": "a"}, "text is a string"),
        ({"text": "a b a", "answer": "a"}, "stands 2 times"),
        ({"text": "a b", "answer": "c"}, "stands 0 times"),
        ({"text": "a b", "answer": [2, 9]}, "answer is a part of the text or"),
        ({"text": "a b", "answer": ""}, "answer is a part of the text or"),
        ({"text": "a " * 90, "answer": [0, 1]}, "it has 2 to 64"),
    ],
)
def test_what_cannot_be_read_is_named(tmp_path, row, words):
    path = write(tmp_path / "p.jsonl", {"text": "x y", "answer": "y"}, row)
    with pytest.raises(UsageError, match=words):
        read_passages(path, tiny_tokenizer(), seq_len=64)


def test_no_passages(tmp_path):
    with pytest.raises(UsageError, match="holds no passage"):
        read_passages(write(tmp_path / "p.jsonl", ""), tiny_tokenizer(), seq_len=64)
    with pytest.raises(UsageError, match="cannot be read"):
        read_passages(tmp_path / "none.jsonl", tiny_tokenizer(), seq_len=64)
