"""The way into a model: its forward wrapped for a time, and what a call hands over."""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from quantdiff.errors import RecordingError

__all__ = ["Entrance", "arguments", "cache_of", "in_backward", "is_entered", "padding_of"]


class _Wrapped:
    """A forward that goes through `around`; says so, and cannot be copied with its module."""

    def __init__(
        self, module: nn.Module, forward: Callable[..., Any], around: Callable[..., Any]
    ) -> None:
        functools.update_wrapper(self, forward)
        self.__signature__ = inspect.signature(forward)
        self.module, self.forward, self.around = module, forward, around
        self.bare = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.around(self.module, self.forward, args, kwargs)

    def __deepcopy__(self, memo: Any) -> Any:
        raise RecordingError("a model cannot be copied while it is recorded; leave the recording")

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.__deepcopy__(protocol)


def is_entered(module: nn.Module, kind: type) -> bool:
    """Whether the module's forward is wrapped by a method of just this `kind`."""
    forward = vars(module).get("forward")
    while isinstance(forward, _Wrapped):
        if type(getattr(forward.around, "__self__", None)) is kind:
            return True
        forward = forward.forward
    return False


class Entrance:
    """Wraps a module's forward for a time, so that a pass is left in every case, also by Ctrl-C."""

    def __init__(self, module: nn.Module, around: Callable[..., Any]) -> None:
        """`around(module, forward, args, kwargs)` is called in place of the forward."""
        self.module = module
        self._own = _Wrapped(module, module.forward, around)
        # Whether the module had a forward of its own, and not its class's, before all entrances.
        self._own.bare = "forward" not in vars(module)
        module.forward = self._own

    def remove(self) -> None:
        """Give the module its own forward back; entrances may be left in any order."""
        top = vars(self.module).get("forward")
        if top is self._own:
            if self._own.bare:
                vars(self.module).pop("forward")
            else:
                self.module.forward = self._own.forward
            return
        while isinstance(top, _Wrapped):
            if top.forward is self._own:
                top.forward, top.bare = self._own.forward, self._own.bare
                return
            top = top.forward


def in_backward() -> bool:
    """Whether autograd is running: gradient checkpointing then computes a second time."""
    return torch._C._current_graph_task_id() != -1


def arguments(
    forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> dict[str, Any]:
    """A call's arguments by name."""
    names = list(inspect.signature(forward).parameters)
    return {**dict(zip(names, args, strict=False)), **kwargs}


def cache_of(source: Any) -> Any:
    """The key-value cache among a call's arguments or in a model's output, or None."""
    # Its name changed from past_key_values to cache; asking a new output by the old name warns.
    values = list(source.values()) if isinstance(source, dict) else list(source)
    return next((value for value in values if hasattr(value, "get_seq_length")), None)


def padding_of(given: dict[str, Any]) -> Tensor | None:
    """The 2-D mask among a call's arguments, or None."""
    mask = given.get("attention_mask")
    return mask if isinstance(mask, Tensor) and mask.dim() == 2 else None
