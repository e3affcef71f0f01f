"""Dynamic ranges over both maps, for modules that compute each map in a separate attention call.

The first call cannot know the logits of the second, so such a module is computed twice: first
unquantized and hidden from recordings, to measure its logits, then quantized.
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
from quantdiff.hooks.passes import Pass
from quantdiff.hooks.runs import Runs
from quantdiff.hooks.unseen import unseen

__all__ = ["MeasuredFirst", "add_ends"]

_CACHES = (
    "past_key_value",
    "past_key_values",
    "layer_past",
    "inference_params",
    "kv_cache",
    "cache",
)


class MeasuredFirst:
    """Computes modules twice, first to measure the logits of all their attention calls.

    While `Pass.measuring` contains a module's name, its calls are to be measured (`add_ends`), not
    quantized; afterwards `Pass.ends` holds the extremes of the logits of all of them.

    Args:
        modules: by name.
        runs: knows the current pass.
        watching: makes a context in which attention calls are seen.
    """

    def __init__(
        self,
        modules: Mapping[str, nn.Module],
        runs: Runs,
        watching: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self._modules, self._runs, self._watching = modules, runs, watching
        self._begun = False
        self._own: dict[str, Any] = {}  # forwards that overrode those of the class

    def begin(self) -> None:
        """Compute the modules twice from now on, until `end`."""
        self._begun = True
        for name, module in self._modules.items():
            if "forward" in vars(module):
                self._own[name] = module.forward
            module.forward = functools.partial(self._twice, name, module.forward)

    def end(self) -> None:
        """Restore the modules."""
        if not self._begun:
            return
        self._begun = False
        for name, module in self._modules.items():
            module.__dict__.pop("forward", None)
            if name in self._own:
                module.forward = self._own.pop(name)

    def _twice(self, name: str, real: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if in_backward():
            return real(*args, **kwargs)
        cached = any(kwargs.get(cache) is not None for cache in _CACHES)
        if cached or any(hasattr(x, "get_seq_length") for x in (*args, *kwargs.values())):
            raise QuantizationError(
                f"{name} computes its two maps in calls of their own, and would have to fill its "
                "cache twice for a dynamic range over both; use granularity head or row, a static "
                "range, or use_cache=False"
            )
        now = self._runs.current(name)
        now.measuring.add(name)
        masks = dict(now.masks)
        try:
            with torch.no_grad(), unseen(), _without_modes(), self._watching():
                real(*args, **kwargs)
            now.measuring.discard(name)
            now.forget(name)
            now.masks = masks  # a mask read without gradients would pass none to its bias
            return real(*args, **kwargs)
        finally:
            now.measuring.discard(name)
            now.ends.pop(name, None)


def add_ends(now: Pass, name: str, least: Tensor, most: Tensor) -> None:
    """Add the extremes of the logits of one call of a module, (B, H) each, to earlier ones."""
    if name in now.ends:
        least = torch.cat([now.ends[name][0], least], 1)
        most = torch.cat([now.ends[name][1], most], 1)
    now.ends[name] = least, most


@contextmanager
def _without_modes() -> Iterator[None]:
    """Suspend all modes, such as those of a recording."""
    modes = _get_current_function_mode_stack()
    for _ in modes:
        _pop_mode()
    try:
        with _disable_current_modes():
            yield
    finally:
        for mode in modes:
            _push_mode(mode)
