"""Text to token windows, and windows to batches."""

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, islice
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from quantdiff.calibration.sources import document_chunks, read_documents
from quantdiff.errors import UsageError
from quantdiff.models.tokenizing import untouched

__all__ = ["TextWindows", "added_bos", "check_vocabulary", "read_documents", "text_windows"]

_SEPARATOR = "\n\n"
_PIECE = 1 << 15  # characters
_PROBE = "The quick brown fox"


@dataclass(frozen=True, eq=False)
class TextWindows:
    """Token windows of one source, in the order of its text.

    Attributes:
        source: the `--data` value as the user gave it.
        windows: token ids, each (n,) int64 with 2 <= n <= seq_len; all but the last are full.
        seq_len: tokens in a full window, BOS included.
        requested: tokens requested; `tokens` is lower if the source has fewer.
        has_bos: whether each window starts with BOS; if so, no other token is a BOS.
    """

    source: str
    windows: list[Tensor]
    seq_len: int
    requested: int
    has_bos: bool

    @property
    def tokens(self) -> int:
        """Tokens in all windows, BOS included."""
        return sum(map(len, self.windows))

    @property
    def sequences(self) -> int:
        """Number of windows."""
        return len(self.windows)

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 over the lengths and token ids of the windows, as hex: equal for equal data."""
        digest = hashlib.sha256()
        for window in self.windows:
            digest.update(len(window).to_bytes(8, "little"))
            digest.update(window.numpy().astype("<i8").tobytes())
        return digest.hexdigest()

    def batches(
        self,
        batch_size: int,
        pad_token_id: int,
        padding_side: Literal["left", "right"] = "right",
    ) -> Iterator[dict[str, Tensor]]:
        """Windows as model inputs, in order.

        Args:
            batch_size: windows per batch, B; the last batch may hold fewer.
            pad_token_id: fills windows shorter than the longest of their batch.
            padding_side: the side that is padded.

        Returns:
            Iterator of `input_ids` and `attention_mask`, both (B, N) int64 on the CPU, N the
            longest window of the batch; the mask is 1 on real tokens and 0 on padding.

        Raises:
            UsageError: `batch_size` below 1, or another `padding_side`.
        """
        if batch_size < 1:
            raise UsageError(f"a batch of {batch_size} windows is none: use at least 1")
        if padding_side not in ("left", "right"):
            raise UsageError(f"padding side {padding_side!r} is unknown: use 'left' or 'right'")
        return (
            _batch(self.windows[start : start + batch_size], pad_token_id, padding_side)
            for start in range(0, len(self.windows), batch_size)
        )


def text_windows(source: str | Path, tokenizer: Any, *, tokens: int, seq_len: int) -> TextWindows:
    r"""Cut the text of a source into token windows.

    The documents, joined by "\n\n", form one stream of tokens without special tokens; windows are
    consecutive in it and do not stop at the end of a document. If the tokenizer prepends a BOS,
    each window starts with one, and a BOS written out in the text is left out. A last window of a
    single token is dropped.

    Only as much text is read as the windows need. It is tokenized in pieces of at most 32,768
    characters, cut before a single space between words, or after a single line end: a byte-level
    BPE gives the same tokens as for the undivided text; one that marks the start of a text may give
    an extra mark per piece. A piece that has no such place is cut at its last character, where a
    few tokens may differ.

    Args:
        source: a `--data` value, see `read_documents`.
        tokenizer: a tokenizer of transformers.
        tokens: maximum number of tokens in all windows, BOS included.
        seq_len: tokens per window, BOS included.

    Raises:
        UsageError: `tokens` or `seq_len` below 2, a source that cannot be read, or one whose
            text gives no window; a tokenizer that prepends several different tokens.
    """
    if tokens < 2:
        raise UsageError(f"{tokens} tokens are no text window: ask for at least 2 tokens")
    if seq_len < 2:
        raise UsageError(f"a sequence length of {seq_len} is no text window: use at least 2")
    bos = added_bos(tokenizer)
    prefix = torch.tensor([] if bos is None else [bos], dtype=torch.int64)
    body = seq_len - len(prefix)
    full, rest = divmod(tokens, seq_len)
    needed = full * body + (rest - len(prefix) if rest > 1 else 0)

    pieces = _pieces(document_chunks(source))
    stream = chain.from_iterable(_token_ids(tokenizer, piece) for piece in pieces)
    ids = torch.tensor(list(islice((i for i in stream if i != bos), needed)), dtype=torch.int64)
    windows = [torch.cat([prefix, part]) for part in ids.split(body)]
    if len(windows[-1]) < 2:
        windows.pop()
    if not windows:
        raise UsageError(
            f"the text of {source} gives {len(ids)} tokens, too few for a window: use a longer text"
        )
    return TextWindows(
        source=str(source),
        windows=windows,
        seq_len=seq_len,
        requested=tokens,
        has_bos=bos is not None,
    )


def check_vocabulary(windows: TextWindows, vocab_size: int) -> None:
    """Refuse token ids that a model has no embedding for.

    Args:
        windows: the text.
        vocab_size: rows of the model's embedding.

    Raises:
        UsageError: an id below 0 or at least `vocab_size`; the message names the first one.
    """
    for number, window in enumerate(windows.windows):
        outside = ((window < 0) | (window >= vocab_size)).nonzero()  # (found, 1)
        if len(outside):
            position = int(outside[0])
            raise UsageError(
                f"token id {int(window[position])} at window {number}, position {position} lies "
                f"outside the model's vocabulary of {vocab_size}: use the model's own tokenizer"
            )


def _batch(windows: list[Tensor], pad_token_id: int, padding_side: str) -> dict[str, Tensor]:
    longest = max(map(len, windows))
    input_ids = torch.full((len(windows), longest), pad_token_id, dtype=torch.int64)  # (B, N)
    attention_mask = torch.zeros_like(input_ids)  # (B, N)
    for row, window in enumerate(windows):
        start = longest - len(window) if padding_side == "left" else 0
        input_ids[row, start : start + len(window)] = window
        attention_mask[row, start : start + len(window)] = 1
    return {"input_ids": input_ids, "attention_mask": attention_mask}


def _token_ids(tokenizer: Any, text: str, add_special_tokens: bool = False) -> list[int]:
    options = {"truncation": False, "padding": False, "add_special_tokens": add_special_tokens}
    with untouched(tokenizer):
        # verbose: a piece may well be longer than the model's context, which is no problem here.
        return list(tokenizer(text, verbose=False, **options)["input_ids"])


def added_bos(tokenizer: Any) -> int | None:
    """Id that the tokenizer prepends to a text, found by trying, whatever its class.

    Raises:
        UsageError: it prepends several different ones.
    """
    plain = _token_ids(tokenizer, _PROBE)
    marked = _token_ids(tokenizer, _PROBE, add_special_tokens=True)
    starts = [i for i in range(len(marked)) if plain and marked[i : i + len(plain)] == plain]
    if starts:
        before = marked[: starts[0]]
        if len(set(before)) > 1:
            raise UsageError(
                f"the tokenizer puts the {len(before)} tokens {before} before a text by itself, "
                "where a window begins with one at most; let its post-processor add one or none"
            )
        return marked[0] if starts[0] else None
    # The probe itself may be tokenized differently after a BOS.
    return marked[0] if marked and marked[0] == tokenizer.bos_token_id else None


def _pieces(documents: Iterable[Iterable[str]]) -> Iterator[str]:
    """The documents, joined, in pieces that can be tokenized one by one."""
    text = ""
    for number, chunks in enumerate(documents):
        if number:
            text += _SEPARATOR
        for chunk in chunks:
            # In steps, so that a document of any size is not copied once per piece.
            for start in range(0, len(chunk), _PIECE):
                text += chunk[start : start + _PIECE]
                while len(text) > _PIECE:
                    cut = _cut(text)
                    yield text[:cut]
                    text = text[cut:]
    if text:
        yield text


def _cut(text: str) -> int:
    """Last place up to `_PIECE` where pre-tokenizers split anyway, else `_PIECE` itself."""
    for mark, offset in ((" ", 0), ("\n", 1)):
        found = text.rfind(mark, 1, _PIECE)
        while found > 0:
            if not (text[found - 1].isspace() or text[found + 1].isspace()):
                return found + offset
            found = text.rfind(mark, 1, found)
    return _PIECE
