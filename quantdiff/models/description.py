"""Description of a loaded model: name, family, size, context length."""

from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

__all__ = ["context_length", "describe", "remember_name", "vocabulary_size"]

# The name under which each model was requested. Kept outside the model, so that it is never saved,
# and weakly, so that the model can be freed.
_NAMES: "WeakKeyDictionary[nn.Module, str]" = WeakKeyDictionary()

# Config entries that bound the positions; some families have no max_position_embeddings.
LENGTHS = ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len")


def remember_name(model: nn.Module, name: str) -> None:
    """Keep the name under which a model was requested; `describe` returns it."""
    _NAMES[model] = name


def describe(model: Any) -> dict[str, Any]:
    """What a result records about its model.

    Args:
        model: a transformers model, loaded by quantdiff or not, or any other module.

    Returns:
        "name": as requested, or else the config's or the class's; "family": the config's model
        type; "parameters": count, tied weights once, packed 4-bit weights at their real number;
        "dtype": of the floating-point parameters, for example "float32".
    """
    config = getattr(model, "config", None)
    name = _NAMES.get(model) or getattr(config, "name_or_path", "") or type(model).__name__
    floating = (p.dtype for p in model.parameters() if p.is_floating_point())
    dtype = getattr(model, "dtype", None) or next(floating, torch.get_default_dtype())
    count = getattr(model, "num_parameters", None)
    return {
        "name": name,
        "family": str(getattr(config, "model_type", type(model).__name__)),
        "parameters": int(count() if count else sum(p.numel() for p in model.parameters())),
        "dtype": str(dtype).removeprefix("torch."),
    }


def context_length(model: Any) -> int | None:
    """Longest sequence in tokens that the config allows, or None if it sets no limit.

    A module from outside transformers need not have a config.
    """
    config: Any = getattr(model, "config", None)
    if hasattr(config, "get_text_config"):
        config = config.get_text_config()
    for entry in LENGTHS:
        value = getattr(config, entry, None)
        if isinstance(value, int) and value > 0:
            return value
    return None


def vocabulary_size(model: Any) -> int:
    """Rows of a transformers model's input embedding; token ids must be less."""
    return int(model.get_input_embeddings().weight.shape[0])
