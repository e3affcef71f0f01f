"""How a model is run if only its activations are needed."""

import inspect
from typing import Any

import torch
from torch import Tensor

__all__ = ["forward_options", "model_device", "places_to_keep"]


def model_device(model: torch.nn.Module) -> torch.device:
    """Device of the model's first parameter; the CPU for a model without any.

    Offloaded parameters are on the meta device between passes and are skipped.
    """
    devices = (p.device for p in model.parameters())
    return next((device for device in devices if device.type != "meta"), torch.device("cpu"))


def forward_options(model: torch.nn.Module) -> dict[str, Any]:
    """Keywords for a forward pass whose output and cache are not used, if the model has them.

    `logits_to_keep` is a slice and not a number: for a number, Gemma 4 leaves out the other tokens
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
    """Value of `logits_to_keep` for some places of all sequences.

    Args:
        model: the model.
        places: (K,) int64 on the CPU, ascending.

    Returns:
        For consecutive places a slice, which works wherever the output head lies; otherwise the
        places on the model's device, or None for a model on several devices, which has to keep
        them all.
    """
    first, last = int(places[0]), int(places[-1])
    if last - first + 1 == len(places):
        return slice(first, last + 1)
    if len({p.device for p in model.parameters()}) > 1:
        return None
    return places.to(model_device(model))
