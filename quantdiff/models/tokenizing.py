"""Calling a tokenizer without changing it."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

__all__ = ["untouched"]


@contextmanager
def untouched(tokenizer: Any) -> Iterator[None]:
    """Restore a tokenizer's truncation and padding after it is called.

    A fast tokenizer of transformers keeps those of the last call, and is saved with them.

    Args:
        tokenizer: of any class.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        yield
        return
    truncation, padding = backend.truncation, backend.padding
    try:
        yield
    finally:
        if backend.truncation != truncation:
            _set(truncation, backend.enable_truncation, backend.no_truncation)
        if backend.padding != padding:
            _set(padding, backend.enable_padding, backend.no_padding)


def _set(settings: dict[str, Any] | None, enable: Any, disable: Any) -> None:
    if settings is None:
        disable()
    else:
        enable(**settings)
