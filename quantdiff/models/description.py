"""What a loaded model says about itself."""

from typing import Any
from weakref import WeakKeyDictionary

from torch import nn

__all__ = ["context_length", "describe", "remember_name", "vocabulary_size"]

# The name each model was asked for under. Beside the model and not on it, so that it is never
# saved, and weak, so that a model can be freed.
_NAMES: "WeakKeyDictionary[nn.Module, str]" = WeakKeyDictionary()

# Config entries that bound the positions, in families that have no max_position_embeddings.
LENGTHS = ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len")


def remember_name(model: nn.Module, name: str) -> None:
    """Keep the name under which a model was asked for; `describe` gives it back."""
    _NAMES[model] = name


def describe(model: Any) -> dict[str, Any]:
    """What a result records about its model.

    Args:
        model: a causal language model of transformers, loaded by quantdiff or not.

    Returns:
        "name": as asked for, or else the config's or the class's; "family": the config's model
        type; "parameters": count, tied weights once, packed 4-bit weights at their real number;
        "dtype": of the floating-point parameters, for example "float32".
    """
    name = _NAMES.get(model) or getattr(model.config, "name_or_path", "") or type(model).__name__
    return {
        "name": name,
        "family": str(model.config.model_type),
        "parameters": int(model.num_parameters()),
        "dtype": str(model.dtype).removeprefix("torch."),
    }


def context_length(model: Any) -> int | None:
    """Longest sequence in tokens that the config allows, or None where it names no limit."""
    config = model.config.get_text_config()
    for entry in LENGTHS:
        value = getattr(config, entry, None)
        if isinstance(value, int) and value > 0:
            return value
    return None


def vocabulary_size(model: Any) -> int:
    """Rows of the input embedding: token ids must lie below it."""
    return int(model.get_input_embeddings().weight.shape[0])
