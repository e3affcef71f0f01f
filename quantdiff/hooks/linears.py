"""The linear modules of a model's layers, and their inputs as tokens."""

import re
import warnings
from collections.abc import Mapping
from typing import TypeVar

from torch import Tensor, nn

from quantdiff.errors import LeftAloneWarning, RecordingError
from quantdiff.hooks.found import Found
from quantdiff.hooks.layers import layer_of
from quantdiff.hooks.passes import Pass

__all__ = ["hooked", "in_order", "input_rows", "input_width", "linear_modules"]

T = TypeVar("T")

# Shared experts, expert gates, and modules before or after the experts see all tokens.
_EXPERT = re.compile(r"(?!.*shared)(?!.*(pre|post)_expert)(?!.*expert_gate).*expert", re.IGNORECASE)


def linear_modules(found: Found) -> dict[str, nn.Module]:
    """The linear modules in the layers, by name; neither embeddings nor the output head."""
    from transformers.pytorch_utils import Conv1D

    return {
        name: module
        for name, module in found.modules.items()
        if isinstance(module, nn.Linear | Conv1D) and layer_of(name, found.layers) is not None
    }


def hooked(found: Found, modules: Mapping[str, T], done: str) -> dict[str, T]:
    """Select the linear modules that are called, and not just read for their weight.

    Warns about the others.

    Args:
        found: what is known of the model.
        modules: by name.
        done: what is done to the inputs of those that are called, such as "recorded".
    """
    past = [
        name
        for name in modules
        if name.endswith(".out_proj")
        and isinstance(found.modules.get(name.rpartition(".")[0]), nn.MultiheadAttention)
    ]
    if past:
        warnings.warn(
            f"{past[0]} is used by torch.nn.MultiheadAttention past any hook: its linear_inputs, "
            f"and those of others like it, are not {done}",
            LeftAloneWarning,
            stacklevel=3,
        )
    return {name: module for name, module in modules.items() if name not in past}


def input_width(module: nn.Module) -> int:
    """Number of input channels."""
    return int(module.in_features if isinstance(module, nn.Linear) else module.nx)  # type: ignore[arg-type]


def in_order(found: Found, name: str) -> bool:
    """Whether inputs (B·N, C) of a linear module are the tokens of a pass in their order.

    Those of an expert are the tokens routed to it, which may be just as many. An expert is
    recognized by its name, or by being in a list within its layer.
    """
    layer = layer_of(name, found.layers)
    assert layer is not None, name
    outer = found.layers[layer][0]
    parts = name[len(outer) :].split(".")[1:]
    places = [".".join([outer, *parts[:end]]) for end in range(1, len(parts))]
    lists = any(isinstance(found.modules[p], nn.ModuleList | nn.ModuleDict) for p in places)
    expert = any(_EXPERT.match(part) for part in parts)
    routes = any("router" in part.lower() for part in parts)  # may be among the experts
    return not lists and (not expert or routes)


def input_rows(name: str, x: Tensor, now: Pass, found: Found) -> Tensor:
    """The inputs of a linear module, one row per token of the pass, (B·N, C).

    Raises:
        RecordingError: they are not the tokens of the pass, or it is not known which are padding.
    """
    if now.ready_mask and not now.batch.told:
        raise RecordingError(
            f"only a ready attention mask was given, and {name} ran before the first attention "
            "that reads it; give the 2-D mask of the padding, or leave linear_inputs out"
        )
    batch, rows = now.batch.shape
    given = tuple(x.shape[:-1])
    if given != (batch, rows) and not (given == (batch * rows,) and in_order(found, name)):
        raise RecordingError(
            f"the inputs of {name}, {tuple(x.shape)}, are not the {batch} sequences of {rows} "
            "tokens of the pass in their order, so that their places cannot be told; leave "
            "linear_inputs out"
        )
    return x.reshape(-1, x.shape[-1])
