import hashlib
import json
import logging
import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quantdiff.calibration import TextWindows, check_vocabulary, text_windows
from quantdiff.calibration import text as text_module
from quantdiff.errors import UsageError

from .conftest import SAMPLE, build_tokenizer

TOKENIZERS = {True: build_tokenizer(adds_bos=True), False: build_tokenizer(adds_bos=False)}
WORDS = " ".join(f"word{n}, and{' λ' * (n % 3)}\n" for n in range(12_000))


@pytest.fixture(scope="module")
def book(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "book.txt"
    path.write_text(SAMPLE[0] * 20, encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def long_book(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "long.txt"
    path.write_text(WORDS, encoding="utf-8")
    return path


def reference(documents, tokenizer, has_bos, tokens, seq_len):
    """The definition, word by word: a token at a time into the open window."""
    bos = tokenizer.bos_token_id
    windows, total = [], 0
    for token in tokenizer("\n\n".join(documents), add_special_tokens=False)["input_ids"]:
        if has_bos and token == bos:
            continue
        if not windows or len(windows[-1]) == seq_len:
            if tokens - total < 2:
                break
            windows.append([bos] if has_bos else [])
            total += has_bos
        if total == tokens:
            break
        windows[-1].append(token)
        total += 1
    return [window for window in windows if len(window) > 1]


# A document that ends in white space would melt with what joins it to the next, in both.
document = st.one_of(
    st.text(st.sampled_from("ab é\n<>λ"), min_size=1, max_size=60).filter(str.strip),
    st.sampled_from([*SAMPLE, "x<bos>y", "<eos>"]),
)


@settings(max_examples=100, deadline=None)
@given(
    documents=st.lists(document, min_size=1, max_size=5),
    has_bos=st.booleans(),
    tokens=st.integers(2, 120),
    seq_len=st.integers(2, 40),
)
def test_windows_are_those_of_the_definition(documents, has_bos, tokens, seq_len):
    tokenizer = TOKENIZERS[has_bos]
    expected = reference(documents, tokenizer, has_bos, tokens, seq_len)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "documents.jsonl"
        path.write_text("".join(json.dumps({"text": d}) + "\n" for d in documents))
        if not expected:
            with pytest.raises(UsageError, match="too few for a window"):
                text_windows(path, tokenizer, tokens=tokens, seq_len=seq_len)
            return
        windows = text_windows(path, tokenizer, tokens=tokens, seq_len=seq_len)
    assert [window.tolist() for window in windows.windows] == expected
    assert all(window.dtype == torch.int64 for window in windows.windows)
    assert windows.tokens == sum(map(len, expected)) <= tokens
    assert windows.sequences == len(expected)
    assert windows.has_bos is has_bos
    if has_bos:
        assert all(window.count(tokenizer.bos_token_id) == 1 for window in expected)


@given(
    lengths=st.lists(st.integers(2, 9), min_size=1, max_size=9),
    batch_size=st.integers(1, 5),
    padding_side=st.sampled_from(["left", "right"]),
)
def test_batches_hold_the_windows(lengths, batch_size, padding_side):
    parts = list(torch.arange(sum(lengths)).split(lengths))
    windows = TextWindows("x", parts, seq_len=9, requested=sum(lengths), has_bos=False)
    batches = list(windows.batches(batch_size, pad_token_id=-7, padding_side=padding_side))
    unpadded = []
    for batch in batches:
        assert batch.keys() == {"input_ids", "attention_mask"}
        ids, mask = batch["input_ids"], batch["attention_mask"]
        assert ids.dtype == mask.dtype == torch.int64
        assert ids.shape == mask.shape
        assert ids.shape[1] == mask.sum(1).max()
        assert ((ids == -7) == (mask == 0)).all()
        rising = mask if padding_side == "left" else mask.flip(1)
        assert (rising.diff(dim=1) >= 0).all()
        unpadded += [row[kept.bool()].tolist() for row, kept in zip(ids, mask, strict=True)]
    assert unpadded == [part.tolist() for part in parts]
    assert [len(batch["input_ids"]) for batch in batches[:-1]] == [batch_size] * (len(batches) - 1)


def test_a_text_in_pieces_gives_the_tokens_of_the_whole(long_book, tokenizer):
    ids = tokenizer(WORDS, add_special_tokens=False)["input_ids"]
    windows = text_windows(long_book, tokenizer, tokens=10**9, seq_len=512)
    body = [token for window in windows.windows for token in window[windows.has_bos :].tolist()]
    assert body == ids
    assert windows.requested == 10**9
    assert windows.tokens == len(ids) + windows.has_bos * windows.sequences


@pytest.mark.parametrize(
    "text", ["x" * 70_000, "语" * 70_000, "word\n" * 20_000, " " * 70_000 + "x"]
)
def test_a_text_without_spaces_between_words_is_cut_all_the_same(tmp_path, without_bos, text):
    path = tmp_path / "odd.txt"
    path.write_text(text, encoding="utf-8")
    windows = text_windows(path, without_bos, tokens=10**9, seq_len=1024)
    assert without_bos.decode(torch.cat(windows.windows)) == text


def test_only_as_much_text_is_tokenized_as_needed(long_book, without_bos):
    read = []

    def counting(text, **options):
        read.append(len(text))
        return without_bos(text, **options)

    windows = text_windows(long_book, counting, tokens=4096, seq_len=512)
    assert windows.tokens == 4096
    assert sum(read) < 40_000 < len(WORDS) / 5


def test_no_warning_of_long_texts(book, tokenizer, caplog, monkeypatch):
    library = logging.getLogger("transformers")
    monkeypatch.setattr(library, "propagate", True)
    text_windows(book, tokenizer, tokens=600, seq_len=64)
    assert not caplog.records


def test_source_is_kept_as_given(book, tokenizer):
    assert text_windows(book, tokenizer, tokens=20, seq_len=8).source == str(book)
    assert text_windows("corpus", tokenizer, tokens=20, seq_len=8).source == "corpus"


def test_bos_is_found_by_what_the_tokenizer_does(book):
    class Doubled:
        """One that says it has no BOS, and puts two ids before and one after a text."""

        bos_token_id = None

        def __call__(self, text, add_special_tokens, **options):
            ids = list(text.encode())
            return {"input_ids": [300, 300, *ids, 301] if add_special_tokens else ids}

    windows = text_windows(book, Doubled(), tokens=16, seq_len=8)
    assert windows.has_bos
    assert [window[0].item() for window in windows.windows] == [300, 300]
    assert bytes(windows.windows[0][1:].tolist()) == SAMPLE[0].encode()[:7]


def test_several_different_tokens_before_a_text_are_refused(book):
    class Prefixed:
        bos_token_id = None

        def __call__(self, text, add_special_tokens, **options):
            return {"input_ids": [*([300, 301] if add_special_tokens else []), *text.encode()]}

    with pytest.raises(UsageError, match=r"puts the 2 tokens \[300, 301\] before a text"):
        text_windows(book, Prefixed(), tokens=16, seq_len=8)


def test_an_end_token_is_no_bos(book):
    class Closing:
        bos_token_id = 300

        def __call__(self, text, add_special_tokens, **options):
            return {"input_ids": [*text.encode(), *([301] if add_special_tokens else [])]}

    assert not text_windows(book, Closing(), tokens=16, seq_len=8).has_bos


@pytest.mark.parametrize(
    ("tokens", "seq_len", "message"),
    [
        (0, 8, "0 tokens"),
        (-5, 8, "-5 tokens"),
        (1, 8, "1 token"),
        (8, 1, "length of 1"),
        (8, 0, "0"),
    ],
)
def test_sizes_that_hold_no_window_are_refused(book, tokenizer, tokens, seq_len, message):
    with pytest.raises(UsageError, match=message):
        text_windows(book, tokenizer, tokens=tokens, seq_len=seq_len)


def test_text_that_gives_no_tokens_is_refused(book):
    def silent(text, **options):
        return {"input_ids": []}

    silent.bos_token_id = None
    with pytest.raises(UsageError, match="gives 0 tokens"):
        text_windows(book, silent, tokens=8, seq_len=8)


def test_fingerprint(book, tokenizer):
    one = text_windows(book, tokenizer, tokens=100, seq_len=16)
    again = text_windows(str(book), tokenizer, tokens=100, seq_len=16)
    assert one.fingerprint == again.fingerprint
    digest = hashlib.sha256()
    for window in one.windows:
        digest.update(torch.tensor([len(window)]).numpy().tobytes() + window.numpy().tobytes())
    assert one.fingerprint == digest.hexdigest()
    for tokens, seq_len in ((99, 16), (100, 15), (100, 17)):
        other = text_windows(book, tokenizer, tokens=tokens, seq_len=seq_len)
        assert other.fingerprint != one.fingerprint
    list(one.batches(3, pad_token_id=0, padding_side="left"))
    assert one.fingerprint == again.fingerprint


def test_fingerprint_tells_the_borders_of_windows_apart():
    def windows(*lengths):
        parts = list(torch.arange(6).split(lengths))
        return TextWindows("x", parts, seq_len=4, requested=6, has_bos=False)

    assert windows(4, 2).fingerprint == windows(4, 2).fingerprint
    assert windows(4, 2).fingerprint != windows(2, 4).fingerprint
    assert windows(4, 2).fingerprint != windows(3, 3).fingerprint


def test_batches_refuse_at_once(book, tokenizer):
    windows = text_windows(book, tokenizer, tokens=20, seq_len=8)
    with pytest.raises(UsageError, match="batch of 0"):
        windows.batches(0, pad_token_id=0)
    with pytest.raises(UsageError, match=r"'both'.*'left' or 'right'"):
        windows.batches(1, pad_token_id=0, padding_side="both")


def test_vocabulary():
    parts = [torch.tensor([1, 2, 3]), torch.tensor([4, 70_000, 80_000]), torch.tensor([90_000, 1])]
    windows = TextWindows("x", parts, seq_len=3, requested=8, has_bos=False)
    check_vocabulary(windows, 90_001)
    place = "token id 70000 at window 1, position 1"
    with pytest.raises(UsageError, match=f"{place} lies outside the model's vocabulary of 49152"):
        check_vocabulary(windows, 49_152)
    with pytest.raises(UsageError, match="token id 90000 at window 2, position 0"):
        check_vocabulary(windows, 90_000)
    negative = TextWindows("x", [torch.tensor([0, -1])], seq_len=2, requested=2, has_bos=False)
    with pytest.raises(UsageError, match="token id -1 at window 0, position 1"):
        check_vocabulary(negative, 10)


def test_public_names():
    assert set(text_module.__all__) == {
        "TextWindows",
        "added_bos",
        "check_vocabulary",
        "read_documents",
        "text_windows",
    }
