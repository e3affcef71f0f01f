"""The short text on which a checkpoint is compared with the model from before saving."""

import platform
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quantdiff.errors import UsageError
from quantdiff.models import context_length, vocabulary_size
from quantdiff.models.tokenizing import untouched
from quantdiff.statistics.precision import true_fp32

__all__ = ["ROWS", "environment", "last_logits", "passage_ids"]

TEXT = (
    "The harbour lay quiet under 37 lamps. “Is the pilot aboard?” asked the mate; nobody "
    "answered. In 1851 a chart cost 2.50, and a wrong one cost the ship: three rocks, two of "
    "them under water at high tide, stood where the printer had left the paper white. She read "
    "the soundings twice, drew a pencil line between them, and gave the order to wait for the "
    "morning."
)
_TOKENS = 64
# Positions whose logits are kept: the last ones, which have seen all of the text. Logits of all
# positions would take more space than some models.
ROWS = 8


def passage_ids(model: Any, tokenizer: Any) -> list[int]:
    """Token ids of the text, up to the limits of the model and the record.

    Raises:
        UsageError: the tokenizer gives ids that the model has no embedding for, or none at all.
    """
    # Cut here: the tokenizer is exported, with whatever state a call leaves in it. Special tokens
    # after the text may be cut off, since any ids serve to compare two models.
    with untouched(tokenizer):
        encoded = tokenizer(TEXT, truncation=False, padding=False, verbose=False)
    ids: list[int] = list(encoded["input_ids"])[: min(_TOKENS, context_length(model) or _TOKENS)]
    if not ids:
        raise UsageError("the tokenizer gives no tokens for a plain English text")
    if max(ids) >= vocabulary_size(model):
        raise UsageError(
            f"the tokenizer gives the token {max(ids)}, but the model has {vocabulary_size(model)} "
            "embeddings: export the model with the tokenizer that it was trained with"
        )
    return ids


@torch.no_grad()
def last_logits(model: Any, ids: list[int]) -> Tensor:
    """Logits of the last positions, (ROWS or fewer, V), fp32, on the CPU.

    Independent of the precision this process allows or casts to: another one recomputes them.
    """
    batch = torch.tensor([ids], device=model.get_input_embeddings().weight.device)  # (1, N)
    with true_fp32(), torch.autocast(batch.device.type, enabled=False):
        logits = model(input_ids=batch, use_cache=False).logits  # (1, N, V)
    return logits[0, -ROWS:].float().cpu().contiguous()  # type: ignore[no-any-return]


def environment(device: torch.device) -> dict[str, Any]:
    """What the last bits of a result depend on, besides the versions."""
    if device.type == "cuda":
        return {"device": torch.cuda.get_device_name(device), "threads": None}
    words = platform.machine(), torch.backends.cpu.get_cpu_capability(), _processor()
    return {
        "device": " ".join(filter(None, words)),
        "threads": torch.get_num_threads(),
    }


def _processor() -> str:
    """The CPU's name, by which libraries choose their kernels; empty if unknown."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, "")
