"""The hook between q·kᵀ and softmax: transformers' attention dispatch, for chosen modules only.

An attention module asks the dispatch table for the function that its config names. A hooked module
gets a stand-in for its config whose implementation name compares equal to the real one but is
another key of the table, under which the hook is registered. The model's masks and its own
decisions are thus those of the real implementation, the hook calls that implementation for the
output, and no other model, in this thread or another, ever reaches the hook.
"""

import copy
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from types import CodeType, ModuleType
from typing import Any, Protocol

from torch import Tensor, nn

from quantdiff.errors import RecordingError

__all__ = [
    "AttentionCall",
    "Observer",
    "Replacement",
    "attends_itself",
    "attention_modules",
    "hook",
    "is_hooked",
    "is_replaced",
    "replace",
    "restore",
    "unhook",
]


class AttentionCall:
    """One call of an attention function.

    Attributes:
        module: the attention module.
        implementation: name of the real implementation, for example `sdpa`.
        query: (B, H, N, D), after rotary embedding.
        key: (B, G, M, D), cached keys included, not repeated over groups.
        value: (B, G, M, w) likewise.
        mask: as the function receives it: a tensor, a block mask, or None.
        options: the remaining keywords.
        recorded: for the observer's own use.
        replaced: whether something other than the real function computed the output.
    """

    __slots__ = (
        "implementation", "key", "mask", "module", "options", "query", "recorded", "replaced",
        "value",
    )  # fmt: skip

    def __init__(
        self,
        module: nn.Module,
        implementation: str,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Any,
        options: dict[str, Any],
    ) -> None:
        self.module = module
        self.implementation = implementation
        self.query = query
        self.key = key
        self.value = value
        self.mask = mask
        self.options = options
        self.recorded: Any = None
        self.replaced = False


# Computes a call's output in place of the real function, which it is given: (call, value, real).
Replacement = Callable[["AttentionCall", Tensor, Callable[[], Any]], Any]


class Observer(Protocol):
    """Sees every attention call of the modules it is hooked to."""

    def attention(self, call: AttentionCall) -> None:
        """Inspect a call before it is computed; must change nothing."""

    def attended(self, call: AttentionCall, output: Any) -> None:
        """Inspect the call's output; must change nothing."""


class _Name(str):
    """An implementation's name that compares equal to it but is another key in a dictionary."""

    __slots__ = ()

    def __hash__(self) -> int:
        return hash(("quantdiff", str(self)))

    def __eq__(self, other: object) -> bool:
        return str.__eq__(self, other) is True  # type: ignore[arg-type]

    def __ne__(self, other: object) -> bool:
        return not self == other


class _Config:
    """Stand-in for a module's config that differs only in the implementation's name."""

    def __init__(self, config: Any) -> None:
        vars(self).update(
            _quantdiff_config=config,
            _quantdiff_observers=[],
            _quantdiff_replacement=None,
            _quantdiff_inside=threading.local(),
        )

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        return type(self._quantdiff_config)

    def __getattr__(self, name: str) -> Any:
        # Called for missing attributes only, so for all of the real config's.
        if name.startswith("_quantdiff"):
            raise AttributeError(name)
        return getattr(self._quantdiff_config, name)

    def __deepcopy__(self, memo: Any) -> Any:
        return copy.deepcopy(self._quantdiff_config, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._quantdiff_config.__reduce_ex__(protocol)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._quantdiff_config, name, value)

    @property
    def _attn_implementation(self) -> Any:
        name = self._quantdiff_config._attn_implementation
        if name is None or getattr(self._quantdiff_inside, "value", False):
            return name
        key = _Name(name)
        _interface().register(key, _observed_attention)
        return key

    @_attn_implementation.setter
    def _attn_implementation(self, value: Any) -> None:
        self._quantdiff_config._attn_implementation = value


def _interface() -> Any:
    # The class holds what all tables share; a family may have its own table.
    from transformers.modeling_utils import AttentionInterface

    return AttentionInterface


def _observed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    **options: Any,
) -> Any:
    config = vars(module).get("config")
    if type(config) is not _Config:
        raise RecordingError(
            f"{type(module).__name__} was handed to the attention function of another module; "
            "quantdiff cannot tell whose logits these are"
        )
    name = str(config._quantdiff_config._attn_implementation)
    caller = sys._getframe(1)
    table = caller.f_globals.get("ALL_ATTENTION_FUNCTIONS") or _interface()()
    default = _default_attention(caller) if name == "eager" else None
    if name == "eager" and default is None and "eager" not in table:
        raise RecordingError(
            f"the eager attention function of {type(module).__name__} was not found; "
            "load the model with attention='sdpa'"
        )
    attend = table.get_interface(name, default)
    call = AttentionCall(module, name, query, key, value, attention_mask, options)
    for observer in config._quantdiff_observers:
        observer.attention(call)

    def real() -> Any:
        config._quantdiff_inside.value = True
        try:
            return attend(module, query, key, value, attention_mask, **options)
        finally:
            config._quantdiff_inside.value = False

    replacement = config._quantdiff_replacement
    call.replaced = replacement is not None
    output = real() if replacement is None else replacement(call, value, real)
    for observer in config._quantdiff_observers:
        observer.attended(call, output)
    return output


def _default_attention(caller: Any) -> Callable[..., Any] | None:
    """The function that the calling code passes as its default: its only global named *eager*."""
    names = [
        name
        for name in caller.f_code.co_names
        if "eager" in name and callable(caller.f_globals.get(name))
    ]
    return caller.f_globals[names[0]] if len(names) == 1 else None


def _asks_the_table(module_type: type) -> bool:
    return any("ALL_ATTENTION_FUNCTIONS" in f.__code__.co_names for f in _functions(module_type))


def attends_itself(module_type: type) -> bool:
    """Whether a class's methods, or functions that they name, call an attention function.

    It may have another name there, through an import or a module of helpers.
    """
    for function in _functions(module_type):
        names = _names(function.__code__)
        named = [function.__globals__.get(name) for name in names]
        for known in [function, *named]:
            code = getattr(known, "__code__", None)
            if code is not None and _ATTENTION & _names(code):
                return True
        modules = [known for known in named if isinstance(known, ModuleType)]
        named += [vars(module).get(name) for module in modules for name in names]
        if any(getattr(known, "__name__", None) in _ATTENTION for known in named):
            return True
    return False


def _names(code: CodeType) -> set[str]:
    """All names in a function's code and in the functions inside it."""
    inner = [constant for constant in code.co_consts if isinstance(constant, CodeType)]
    return set(code.co_names).union(*map(_names, inner))


_ATTENTION = {
    "scaled_dot_product_attention", "flash_attn_func", "flash_attn_varlen_func",
    "_flash_attn_forward", "_flash_attn_varlen_forward",
}  # fmt: skip


def _functions(module_type: type) -> Iterator[Any]:
    """The methods of a class, except those of torch's own classes."""
    for kind in module_type.__mro__:
        if kind.__module__.startswith("torch."):
            continue
        for member in vars(kind).values():
            function = member
            while hasattr(function, "__wrapped__"):
                function = function.__wrapped__
            if hasattr(function, "__code__"):
                yield function


def attention_modules(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Names and modules that ask transformers' dispatch table for their attention function."""
    from transformers import PreTrainedModel

    return [
        (name, module)
        for name, module in model.named_modules()
        if not isinstance(module, PreTrainedModel)
        and hasattr(vars(module).get("config"), "_attn_implementation")
        and _asks_the_table(type(module))
    ]


_hooked: Counter[str] = Counter()
_lock = threading.Lock()


def is_hooked(module: nn.Module) -> bool:
    """Whether an observer is on the module."""
    config = vars(module).get("config")
    return type(config) is _Config and bool(config._quantdiff_observers)


def is_replaced(module: nn.Module) -> bool:
    """Whether the module's attention is computed by a replacement."""
    config = vars(module).get("config")
    return type(config) is _Config and config._quantdiff_replacement is not None


def hook(modules: Iterable[nn.Module], observer: Observer) -> None:
    """Show the modules' attention calls to `observer` until `unhook`."""
    for module in modules:
        _stand_in(module)._quantdiff_observers.append(observer)


def unhook(modules: Iterable[nn.Module], observer: Observer) -> None:
    """Stop showing them to `observer`."""
    for module in modules:
        config = vars(module).get("config")
        if type(config) is _Config and observer in config._quantdiff_observers:
            config._quantdiff_observers.remove(observer)
            _clear(module, config)


def replace(modules: Iterable[nn.Module], replacement: Replacement) -> None:
    """Have `replacement` compute the modules' attention calls until `restore`."""
    for module in modules:
        vars(_stand_in(module))["_quantdiff_replacement"] = replacement


def restore(modules: Iterable[nn.Module]) -> None:
    """Have the modules compute their own attention calls again."""
    for module in modules:
        config = vars(module).get("config")
        if type(config) is _Config:
            vars(config)["_quantdiff_replacement"] = None
            _clear(module, config)


def _stand_in(module: nn.Module) -> _Config:
    config = vars(module).get("config")
    if type(config) is not _Config:
        with _lock:
            _hooked["modules"] += 1
        module.config = config = _Config(config)
    return config


def _clear(module: nn.Module, config: _Config) -> None:
    """Give a module its own config back; after the last one, the table is as it was."""
    if config._quantdiff_observers or config._quantdiff_replacement is not None:
        return
    module.config = config._quantdiff_config
    with _lock:
        _hooked["modules"] -= 1
        if not _hooked["modules"]:
            table = _interface()._global_mapping
            for key in [key for key in table if type(key) is _Name]:
                del table[key]
