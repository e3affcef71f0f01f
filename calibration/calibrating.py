"""Calibration: one run of the recorder over text, and a table of what it saw."""

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from quantdiff.calibration.running import forward_options, model_device
from quantdiff.calibration.table import CalibrationTable
from quantdiff.calibration.text import TextWindows, check_vocabulary
from quantdiff.errors import UsageError
from quantdiff.hooks import record
from quantdiff.models import context_length, vocabulary_size

__all__ = ["calibrate"]

_FIRST_PART = 0.75  # of the tokens; the ranges at this point are compared with those at the end

Batch = Mapping[str, Any]


@torch.inference_mode()
def calibrate(
    model: torch.nn.Module,
    batches: TextWindows | Iterable[Batch],
    *,
    source: str = "",
    batch_size: int = 1,
    layout: str | None = None,
    sites: Sequence[str] = (),
    progress: Callable[[int], None] | None = None,
    stop: Callable[[], bool] | None = None,
) -> CalibrationTable:
    """Record a model's activations over some batches and make the table for all observers.

    The model runs over the data once. Padding (by `attention_mask`) never counts, and ranges depend
    neither on the order of the batches nor on what is batched together.

    Args:
        model: any model that `quantdiff.record` accepts.
        batches: windows of text (`quantdiff.calibration.text_windows`), for a model whose forward
            takes `input_ids` and `attention_mask`, (B, N), or dictionaries of its inputs. All of
            them are held at once, on the device where they are.
        source: name of the data, for the record; by default that of the windows.
        batch_size: windows per forward pass; unused for dictionaries.
        layout: head layout of a model that quantdiff does not know, as in `quantdiff.record`.
        sites: those whose ranges are held in addition to the attention logits: `linear_inputs`,
            `keys`, `values`, `hidden_states`.
        progress: called after each pass with its number of tokens.
        stop: called between passes; True ends the calibration, whose table is then marked partial.

    Raises:
        UsageError: no batches, or text that does not fit the model.
        RecordingError: the model cannot be recorded correctly.
    """
    if isinstance(batches, TextWindows):
        windows, source = batches, source or batches.source
        _check(model, windows)
        work: list[Batch] = list(windows.batches(batch_size, pad_token_id=0))
    else:
        windows, work = None, _as_list(batches)
    tokens = [_tokens(batch) for batch in work]
    ends = list(accumulate(tokens))
    # The batch after which the first part ends; never the last, or there would be no second part.
    first_part = min(
        range(len(ends) - 1), key=lambda i: abs(ends[i] - _FIRST_PART * ends[-1]), default=None
    )
    device, options = model_device(model), forward_options(model)
    partial, earlier = False, None
    with record(model, top_k=0, detail="full", layout=layout, sites=sites) as recorder:
        for number, batch in enumerate(work):
            model(**_moved(batch, device), **options)
            if progress is not None:
                progress(tokens[number])
            if number == len(work) - 1:
                break
            if stop is not None and stop():
                partial = True
                break
            if number == first_part:
                earlier = recorder.profile(source=source)
    profile = recorder.profile(source=source, partial=partial)
    profile.data["fingerprint"] = _fingerprint(work[: number + 1])
    if windows is not None:
        profile.data["sequence_length"] = windows.seq_len
    return CalibrationTable.from_profile(profile, earlier)


def _check(model: torch.nn.Module, windows: TextWindows) -> None:
    limit = context_length(model)
    longest = max(map(len, windows.windows))
    if limit is not None and longest > limit:
        raise UsageError(
            f"windows of {longest} tokens are beyond the model's context of {limit}; "
            "choose a shorter sequence length"
        )
    if hasattr(model, "get_input_embeddings"):  # others do not state their vocabulary size
        check_vocabulary(windows, vocabulary_size(model))


def _as_list(batches: Iterable[Batch]) -> list[Batch]:
    work = [batches] if isinstance(batches, Mapping) else list(batches)
    if not work:
        raise UsageError("there is nothing to calibrate on: no batch was given")
    for batch in work:
        if not isinstance(batch, Mapping):
            raise UsageError(
                f"a batch is a dictionary of what the model takes, such as input_ids, not a "
                f"{type(batch).__name__}"
            )
    return work


def _moved(batch: Batch, device: torch.device) -> dict[str, Any]:
    return {
        name: value.to(device) if isinstance(value, Tensor) else value
        for name, value in batch.items()
    }


def _tokens(batch: Batch) -> int:
    """Number of real tokens of a batch; for inputs that are not tokens, of rows."""
    mask, ids = batch.get("attention_mask"), batch.get("input_ids")
    if isinstance(mask, Tensor) and mask.dim() == 2:
        return int((mask != 0).sum())
    if isinstance(ids, Tensor):
        return ids.numel()
    return max((len(value) for value in batch.values() if isinstance(value, Tensor)), default=1)


def _fingerprint(work: list[Batch]) -> str:
    """SHA-256 as hex; for token ids, that of `TextWindows`, whatever the batches and padding."""
    digest = hashlib.sha256()
    for batch in work:
        ids, mask = batch.get("input_ids"), batch.get("attention_mask")
        if isinstance(ids, Tensor) and ids.dim() == 2:
            real = mask if isinstance(mask, Tensor) and mask.dim() == 2 else torch.ones_like(ids)
            for row, kept in zip(ids, real.to(ids.device) != 0, strict=True):
                window = row[kept].cpu()  # (n,)
                digest.update(len(window).to_bytes(8, "little"))
                digest.update(window.numpy().astype("<i8").tobytes())
            continue
        for name in sorted(batch):
            value = batch[name]
            if isinstance(value, Tensor):
                digest.update(f"{name} {tuple(value.shape)} {value.dtype}".encode())
                digest.update(value.cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()
