"""The way into a model: wrapping its forward temporarily, and reading a call's arguments."""

import copy
import functools
import inspect
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from quantdiff.errors import RecordingError

__all__ = [
    "Entrance",
    "arguments",
    "cache_of",
    "in_backward",
    "is_entered",
    "padding_of",
    "positions_of",
]


_COMPILED = (
    "torch.compile runs past quantdiff's hooks; call the model itself, not the compiled one "
    "(model._orig_mod is the model), and let generate do so with disable_compile=True"
)


# Opaque to the compiler: where traced code raises, it gives up and runs what is below without us.
# With fullgraph=True it raises its own error, with this reason.
@torch.compiler.disable(reason=_COMPILED)
def _refuse_compiled(name: str) -> None:
    raise RecordingError(f"{name} is called under torch.compile: {_COMPILED}")


class _Wrapped:
    """A forward that goes through `around` until that is removed; from then on, just the forward.

    Other code may have wrapped it in the meantime and hold it for longer than it is needed.
    """

    # Slots, because wrapping this with functools.wraps copies its __dict__.
    __slots__ = ("__dict__", "__weakref__", "around", "bare", "forward", "module")

    def __init__(
        self, module: nn.Module, forward: Callable[..., Any], around: Callable[..., Any]
    ) -> None:
        functools.update_wrapper(self, forward)
        self.__signature__ = inspect.signature(forward)
        self.module, self.forward = module, forward
        self.around: Callable[..., Any] | None = around
        # Whether the module had only its class's forward before, and none of its own.
        self.bare = "forward" not in vars(module)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        around = self.around
        if around is None:
            return self.forward(*args, **kwargs)
        if torch.compiler.is_compiling():
            _refuse_compiled(type(self.module).__name__)
        return around(self.module, self.forward, args, kwargs)

    def __deepcopy__(self, memo: Any) -> Any:
        self._check_left()
        return copy.deepcopy(self.forward, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        self._check_left()
        return _itself, (self.forward,)

    def _check_left(self) -> None:
        if self.around is not None:
            raise RecordingError(
                "a model cannot be copied while it is recorded; leave the recording"
            )


def _itself(forward: Callable[..., Any]) -> Callable[..., Any]:
    return forward


# Classes whose methods wrap each module's forward. `forward` itself does not show this: other code
# may have wrapped it since.
_entered: WeakKeyDictionary[nn.Module, list[type]] = WeakKeyDictionary()


def is_entered(module: nn.Module, kind: type) -> bool:
    """Whether the module's forward is wrapped by a method of exactly this `kind`."""
    return kind in _entered.get(module, ())


class Entrance:
    """Wraps a module's forward temporarily, so that no end of a pass is missed, even on Ctrl-C."""

    def __init__(self, module: nn.Module, around: Callable[..., Any]) -> None:
        """`around(module, forward, args, kwargs)` is called in place of the forward."""
        self.module = module
        self._kind = type(getattr(around, "__self__", None))
        _take_off(module)
        self._own = _Wrapped(module, module.forward, around)
        module.forward = self._own
        _entered.setdefault(module, []).append(self._kind)

    def remove(self) -> None:
        """Give the module its own forward back; entrances may be removed in any order.

        If other code has wrapped the forward since, its wrapper stays and bypasses this one.
        """
        if self._own.around is None:
            return
        self._own.around = None
        _entered[self.module].remove(self._kind)
        _take_off(self.module)


def _take_off(module: nn.Module) -> None:
    """Take removed entrances off a module's forward, from the top down to one still in use."""
    top = vars(module).get("forward")
    while isinstance(top, _Wrapped) and top.around is None:
        if top.bare:
            vars(module).pop("forward")
            return
        module.forward = top = top.forward


def in_backward() -> bool:
    """Whether autograd is running: gradient checkpointing then computes forwards again."""
    return torch._C._current_graph_task_id() != -1


def arguments(
    forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> dict[str, Any]:
    """A call's arguments by name."""
    names = list(inspect.signature(forward).parameters)
    return {**dict(zip(names, args, strict=False)), **kwargs}


def cache_of(source: Any) -> Any:
    """The key-value cache among a call's arguments or in a model's output, or None."""
    # Its name changed from past_key_values to cache; the old name warns on a new output.
    values = list(source.values()) if isinstance(source, dict) else list(source)
    return next((value for value in values if hasattr(value, "get_seq_length")), None)


def padding_of(given: dict[str, Any]) -> Tensor | None:
    """The 2-D mask among a call's arguments, or None."""
    mask = given.get("attention_mask")
    return mask if isinstance(mask, Tensor) and mask.dim() == 2 else None


def positions_of(given: dict[str, Any]) -> Tensor | None:
    """The position_ids among a call's arguments, or None."""
    positions = given.get("position_ids")
    return positions if isinstance(positions, Tensor) else None
