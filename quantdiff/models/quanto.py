"""Opening a folder whose weights were packed by optimum-quanto."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

import quantdiff.models.diff_v2  # noqa: F401  (quanto builds it from the config alone)
from quantdiff.errors import UsageError
from quantdiff.models.checkpoint import INDEX, WEIGHTS, Checkpoint
from quantdiff.models.checks import check_keys, check_weight_files, library_errors

__all__ = ["MAP", "open_model"]

MAP = "quanto_qmap.json"


def open_model(
    checkpoint: Checkpoint,
    config: Any,
    dtype: torch.dtype | str,
    device: torch.device,
    attention: str | None,
) -> Any:
    """Open the model in the dtype it was saved in, which packed weights cannot change.

    Raises:
        UsageError: files are missing or do not fit, the folder is not on this disk, or another
            dtype is requested by name.
    """
    from optimum.quanto import QuantizedModelForCausalLM

    name = checkpoint.name
    if not checkpoint.on_disk:
        raise UsageError(f"{name!r} is packed by optimum-quanto: download it, and give the folder")
    check_weight_files(checkpoint, config)
    stored = config.dtype or torch.float32
    if dtype not in ("auto", stored):
        wanted, kept = (str(d).removeprefix("torch.") for d in (dtype, stored))
        raise UsageError(
            f"{name!r} is packed by optimum-quanto for {kept} and cannot be loaded in {wanted}: "
            f"pass --dtype {kept} (dtype={kept!r} in Python)"
        )
    folder = Path(checkpoint.location)
    with library_errors(f"{name!r} cannot be loaded by optimum-quanto"):
        model = QuantizedModelForCausalLM.from_pretrained(folder)._wrapped
        _check_complete(name, folder, model)
        if attention is not None:
            model.set_attn_implementation(attention)
        return model.to(device)


def _check_complete(name: str, folder: Path, model: Any) -> None:
    """Refuse keys that do not fit: quanto is not strict, and leaves missing weights random."""
    stored = set()
    if (folder / WEIGHTS).is_file():
        with safe_open(folder / WEIGHTS, framework="pt") as file:
            stored = set(file.keys())
    else:
        stored = set(json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"])
    wanted = set(model.state_dict())
    tied = set(getattr(model, "all_tied_weights_keys", None) or ())
    check_keys(
        name,
        {
            "missing_keys": wanted - stored - tied,
            "unexpected_keys": stored - wanted,
            "mismatched_keys": [],
        },
    )
