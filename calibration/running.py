"""How a model is run where only its activations are wanted."""

import inspect
from typing import Any

import torch
from torch import Tensor

__all__ = ["forward_options", "model_device", "places_to_keep"]


def model_device(model: torch.nn.Module) -> torch.device:
    """Where the model's first parameter lies; the CPU for a model without any.

    Parameters that were offloaded lie on the meta device between passes and are passed over.
    """
    devices = (p.device for p in model.parameters())
    return next((device for device in devices if device.type != "meta"), torch.device("cpu"))


def forward_options(model: torch.nn.Module) -> dict[str, Any]:
    """Keywords of a forward pass whose output and cache nobody looks at, where the model has them.

    A slice and not a number in `logits_to_keep`: for a number, Gemma 4 leaves out the other tokens
    in its last layers too.
    """
    known = inspect.signature(model.forward).parameters
    options: dict[str, Any] = {}
    if "use_cache" in known:
        options["use_cache"] = False
    if "logits_to_keep" in known:
        options["logits_to_keep"] = slice(0, 1)
    return options


def places_to_keep(model: torch.nn.Module, places: Tensor) -> slice | Tensor | None:
    """What `logits_to_keep` says of some places of all sequences.

    Args:
        model: the model.
        places: (K,) int64 on the CPU, ascending.

    Returns:
        A slice, which is right wherever the output head lies, for places that follow each other;
        else the places on the model's device, or None for a model on several, which is to keep
        them all.
    """
    first, last = int(places[0]), int(places[-1])
    if last - first + 1 == len(places):
        return slice(first, last + 1)
    if len({p.device for p in model.parameters()}) > 1:
        return None
    return places.to(model_device(model))
