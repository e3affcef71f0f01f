"""Dynamic ranges over both maps of modules that compute each map in an attention call of its own.

The first call cannot know the logits of the second. So such a module is computed twice: as it is,
unseen by anybody else, while its logits are measured, and then quantized.
"""

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import _get_current_function_mode_stack, _pop_mode, _push_mode
from torch.utils._python_dispatch import _disable_current_modes

from quantdiff.errors import QuantizationError
from quantdiff.hooks.entrance import in_backward
from quantdiff.hooks.runs import Runs

__all__ = ["MeasuredFirst"]

_CACHES = ("past_key_value", "past_key_values", "layer_past", "inference_params", "kv_cache")


class MeasuredFirst:
    """Computes modules twice, first to measure the logits of all their attention calls.

    Args:
        modules: by name.
        runs: knows the pass under way.
        watching: a context in which attention calls are seen.
    """

    def __init__(
        self,
        modules: Mapping[str, nn.Module],
        runs: Runs,
        watching: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self._modules, self._runs, self._watching = modules, runs, watching
        self._begun = False
        self._own: dict[str, Any] = {}  # forwards that modules had beside their class's
        self._measuring: set[str] = set()
        self._ends: dict[str, tuple[Tensor, Tensor]] = {}

    def begin(self) -> None:
        """From now on, until `end`."""
        self._begun = True
        for name, module in self._modules.items():
            if "forward" in vars(module):
                self._own[name] = module.forward
            module.forward = functools.partial(self._twice, name, module.forward)

    def end(self) -> None:
        """Leave the modules as they were."""
        if not self._begun:
            return
        self._begun = False
        for name, module in self._modules.items():
            module.__dict__.pop("forward", None)
            if name in self._own:
                module.forward = self._own.pop(name)

    def measures(self, name: str) -> bool:
        """Whether the logits of a module are wanted, and its output is not."""
        return name in self._measuring

    def add(self, name: str, least: Tensor, most: Tensor) -> None:
        """The ends of a call's logits, (B, H) each."""
        if name in self._ends:
            least = torch.cat([self._ends[name][0], least], 1)
            most = torch.cat([self._ends[name][1], most], 1)
        self._ends[name] = least, most

    def ends(self, name: str) -> tuple[Tensor, Tensor] | None:
        """The ends of the logits of all calls, (B, heads of all calls) each; None if not known."""
        return self._ends.get(name)

    def _twice(self, name: str, real: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if in_backward():
            return real(*args, **kwargs)
        if any(kwargs.get(cache) is not None for cache in _CACHES):
            raise QuantizationError(
                f"{name} computes its two maps in calls of their own, and would have to fill its "
                "cache twice for a dynamic range over both; use granularity head or row, a static "
                "range, or use_cache=False"
            )
        now = self._runs.current(name)
        self._measuring.add(name)
        try:
            with torch.no_grad(), _unseen(), self._watching():
                real(*args, **kwargs)
            self._measuring.discard(name)
            now.forget(name)
            return real(*args, **kwargs)
        finally:
            self._measuring.discard(name)
            self._ends.pop(name, None)


@contextmanager
def _unseen() -> Iterator[None]:
    """Without any mode, such as a recording's."""
    modes = _get_current_function_mode_stack()
    for _ in modes:
        _pop_mode()
    try:
        with _disable_current_modes():
            yield
    finally:
        for mode in modes:
            _push_mode(mode)
