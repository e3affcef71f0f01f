"""The text windows that perplexity, divergence and noise run on."""

from typing import Any

import torch
from torch import Tensor

from quantdiff.analysis.evaluation.base import Text
from quantdiff.analysis.profiling import check_length
from quantdiff.calibration.text import TextWindows, check_vocabulary, text_windows
from quantdiff.errors import UsageError
from quantdiff.models import context_length, vocabulary_size

__all__ = ["evaluation_windows", "no_argument", "scored", "targets", "window_settings"]

_SEQ_LEN = 2048


def evaluation_windows(model: Any, tokenizer: Any, text: Text) -> TextWindows:
    """Windows of the text, checked against the model.

    Raises:
        UsageError: the text cannot be read, windows exceed the model's context, or token ids are
            outside its vocabulary.
    """
    seq_len = text.seq_len
    if seq_len is None:
        seq_len = min(_SEQ_LEN, context_length(model) or _SEQ_LEN)
    check_length(model, seq_len)
    windows = text_windows(text.source, tokenizer, tokens=text.tokens, seq_len=seq_len)
    check_vocabulary(windows, vocabulary_size(model))
    return windows


def window_settings(windows: TextWindows) -> dict[str, Any]:
    """What the windows are, and which of their tokens are scored."""
    return {
        "tokens": windows.tokens,
        "windows": windows.sequences,
        "seq_len": windows.seq_len,
        "bos": windows.has_bos,
        "scored": "every token of a window but its first",
        "stderr": "over windows",
    }


def no_argument(name: str, argument: str) -> None:
    """Refuse an argument to an evaluation that takes none.

    Raises:
        UsageError: there is one.
    """
    if argument:
        raise UsageError(f"{name!r} takes no argument: its text is named by --data")


def scored(window: Tensor) -> tuple[int, int]:
    """Positions whose next token is scored: all but the last, so that a BOS is never a target."""
    return 0, len(window) - 1


def targets(windows: list[Tensor]) -> Tensor:
    """The tokens that follow the scored positions, (R,) int64."""
    return torch.cat([window[1:] for window in windows])
