"""Computations that no recording should see: a module is computed once more to measure it."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["is_unseen", "unseen"]

_local = threading.local()


def is_unseen() -> bool:
    """Whether such a computation is under way in this thread."""
    return getattr(_local, "depth", 0) > 0


@contextmanager
def unseen() -> Iterator[None]:
    """Have the hooks of recordings leave out what is computed within, in this thread."""
    _local.depth = getattr(_local, "depth", 0) + 1
    try:
        yield
    finally:
        _local.depth -= 1
