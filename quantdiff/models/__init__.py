"""What can be opened: loading by name, and what a loaded model says about itself.

The names are fetched on first use, so that importing this package does not import transformers.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from quantdiff.models.description import context_length, describe, vocabulary_size
    from quantdiff.models.loading import load
    from quantdiff.models.sources import known_names

__all__ = ["context_length", "describe", "known_names", "load", "vocabulary_size"]

# Public name -> module of this package that defines it.
_HOMES = {
    "context_length": "description",
    "describe": "description",
    "known_names": "sources",
    "load": "loading",
    "vocabulary_size": "description",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(globals() | _HOMES)
