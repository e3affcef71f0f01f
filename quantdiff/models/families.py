"""Which head layout a model family has."""

from torch import nn

__all__ = ["FAMILIES", "layout_of"]

# By config.model_type; every family that is not named has standard heads.
FAMILIES: dict[str, str] = {"diff_v2": "adjacent_shared", "diffllama": "halves"}


def layout_of(model: nn.Module) -> str:
    """Head layout of a model, by its family."""
    return FAMILIES.get(str(getattr(getattr(model, "config", None), "model_type", "")), "none")
