"""What reads text leaves a user's tokenizer as it was."""

import json

import pytest

from quantdiff.analysis.evaluation.pairs import Encoder
from quantdiff.calibration import text_windows
from quantdiff.calibration.passages import read_passages
from quantdiff.models.tokenizing import untouched
from tests.tiny import tiny_tokenizer


def padding_tokenizer():
    """One that cuts and pads by itself, as many that are on the hub do."""
    tokenizer = tiny_tokenizer()
    tokenizer.backend_tokenizer.enable_truncation(32, strategy="only_first")
    tokenizer.backend_tokenizer.enable_padding(pad_id=2, pad_token="<pad>", direction="left")
    return tokenizer


def windows(tokenizer, folder):
    (folder / "text.txt").write_text("the in an and " * 40)
    text_windows(str(folder / "text.txt"), tokenizer, tokens=64, seq_len=32)


def passages(tokenizer, folder):
    (folder / "p.jsonl").write_text(json.dumps({"text": "x y", "answer": "y"}))
    read_passages(folder / "p.jsonl", tokenizer, seq_len=64)


def pairs(tokenizer, _):
    Encoder(tokenizer).pair("the in", " an", "here")


def cut(tokenizer, _):
    with untouched(tokenizer):
        tokenizer("the in an and", truncation=True, max_length=3, padding="max_length")


@pytest.mark.parametrize("make", [tiny_tokenizer, padding_tokenizer])
@pytest.mark.parametrize("read", [windows, passages, pairs, cut])
def test_no_trace_is_left(tmp_path, make, read):
    tokenizer = make()
    before = tokenizer.backend_tokenizer.to_str()
    read(tokenizer, tmp_path)
    assert tokenizer.backend_tokenizer.to_str() == before


def test_one_that_has_no_settings_to_keep():
    with untouched(lambda text: text):
        pass
