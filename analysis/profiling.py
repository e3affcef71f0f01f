"""A profile of a model on text: the recorder run over token windows."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Literal

import torch

from quantdiff.calibration.running import forward_options, model_device
from quantdiff.calibration.text import TextWindows, check_vocabulary
from quantdiff.errors import UsageError
from quantdiff.hooks import record
from quantdiff.models import context_length, vocabulary_size
from quantdiff.models.families import given_family
from quantdiff.statistics.profile import Profile

__all__ = ["check_layout", "check_length", "profile_text"]


def check_layout(name: str) -> None:
    """Refuse an unknown head layout.

    Raises:
        UsageError: names the known ones.
    """
    try:
        given_family(name)
    except ValueError as error:
        raise UsageError(str(error)) from None


def check_length(model: torch.nn.Module, seq_len: int) -> None:
    """Refuse windows longer than the model's context.

    Raises:
        UsageError: `seq_len` is beyond the model's context.
    """
    limit = context_length(model)
    if limit is not None and seq_len > limit:
        raise UsageError(
            f"--seq-len {seq_len} is beyond the model's context of {limit} tokens; "
            f"choose at most {limit}"
        )


@torch.inference_mode()
def profile_text(
    model: torch.nn.Module,
    windows: TextWindows,
    *,
    batch_size: int = 1,
    top_k: int = 100,
    detail: Literal["extremes", "full"] = "full",
    layout: str | None = None,
    maps: bool = False,
    spans: Sequence[tuple[int, int]] = (),
    sites: Sequence[str] = (),
    progress: Callable[[int], None] | None = None,
    stop: Callable[[], bool] | None = None,
) -> Profile:
    """Record a model's activations over windows of text.

    Args:
        model: any model that `quantdiff.record` accepts and whose forward takes `input_ids` and
            `attention_mask`, (B, N).
        windows: the text as tokens.
        batch_size: windows per forward pass; does not change the result.
        top_k, detail, layout, maps, spans, sites: as in `quantdiff.record`.
        progress: called after each pass with its number of tokens.
        stop: called after each pass; True ends the recording, which is then marked partial.

    Raises:
        UsageError: windows beyond the model's context, or token ids outside its vocabulary.
        RecordingError: the model cannot be recorded correctly.
    """
    check_length(model, max(len(window) for window in windows.windows))
    if hasattr(model, "get_input_embeddings"):  # others do not expose a vocabulary size
        check_vocabulary(windows, vocabulary_size(model))
    device, options = model_device(model), forward_options(model)
    partial, seen = False, 0
    with record(
        model, top_k=top_k, detail=detail, layout=layout, maps=maps, spans=spans, sites=sites
    ) as recorder:
        left = windows.tokens
        for batch in windows.batches(batch_size, pad_token_id=0):
            model(**{name: value.to(device) for name, value in batch.items()}, **options)
            seen += len(batch["input_ids"])
            tokens = int(batch["attention_mask"].sum())
            left -= tokens
            if progress is not None:
                progress(tokens)
            if left and stop is not None and stop():
                partial = True
                break
    profile = recorder.profile(source=windows.source, partial=partial)
    recorded = dataclasses.replace(windows, windows=windows.windows[:seen])
    profile.data |= {"sequence_length": windows.seq_len, "fingerprint": recorded.fingerprint}
    return profile
