"""How a model is run where only its activations are wanted."""

import inspect
from typing import Any

import torch

__all__ = ["forward_options", "model_device"]


def model_device(model: torch.nn.Module) -> torch.device:
    """Where the model's first parameter lies; the CPU for a model without any."""
    return next((p.device for p in model.parameters()), torch.device("cpu"))


def forward_options(model: torch.nn.Module) -> dict[str, Any]:
    """Keywords of a forward pass whose output and cache nobody looks at, where the model has them.

    Places and not a number in `logits_to_keep`: for a number, Gemma 4 leaves out the other tokens
    in its last layers too.
    """
    known = inspect.signature(model.forward).parameters
    options: dict[str, Any] = {}
    if "use_cache" in known:
        options["use_cache"] = False
    if "logits_to_keep" in known:
        options["logits_to_keep"] = torch.zeros(1, dtype=torch.long, device=model_device(model))
    return options
