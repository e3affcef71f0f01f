"""The processes of one sweep under torchrun: which one takes which cell, and when all are done."""

import functools
import itertools
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from quantdiff.analysis.evaluation import Stopped
from quantdiff.errors import UsageError

__all__ = ["Processes", "is_first"]

_PAUSE = 0.1  # seconds between two checks on the other processes
_SWEEPS = itertools.count()


def is_first() -> bool:
    """Whether this process is alone, or the one among several that reports."""
    return int(os.environ.get("RANK", "0")) == 0 or int(os.environ.get("WORLD_SIZE", "1")) == 1


class Processes:
    """This process among those of its sweep; alone if no launcher started it.

    They coordinate through torchrun's in-memory store: a cell that one has taken is taken for all,
    and nothing is left behind when they are killed.

    Attributes:
        rank, size: rank of this process, and number of processes.

    Raises:
        UsageError: the environment specifies several processes, but they cannot meet.
    """

    def __init__(self) -> None:
        self.size = int(os.environ.get("WORLD_SIZE", "1"))
        self.rank = int(os.environ.get("RANK", "0")) if self.size > 1 else 0
        # All processes count their sweeps alike, so that a second one in a program starts afresh.
        self._sweep = next(_SWEEPS)
        self._store = _store() if self.size > 1 else None
        self._alone: dict[str, int] = {}

    @property
    def first(self) -> bool:
        """Whether this process is the one that reports and keeps the record."""
        return self.rank == 0

    @property
    def device(self) -> str | None:
        """The GPU of this process; None if it is alone or there is no GPU."""
        if self.size == 1 or not torch.cuda.is_available():
            return None
        return f"cuda:{os.environ.get('LOCAL_RANK', '0')}"

    def take(self, cell: str) -> bool:
        """Try to take a cell; True if no other process has, so that this one is to compute it."""
        return self._count(f"cell {cell}", 1) == 1

    def tell_done(self) -> None:
        """Tell the others that one more cell is done."""
        self._count("cells done", 1)

    def done(self) -> int:
        """The number of cells that all processes together have done since the start."""
        return self._count("cells done", 0)

    def meet(self, place: str, stop: Callable[[], bool]) -> None:
        """Wait until all processes have reached a place, whose name is used once per sweep.

        Raises:
            Stopped: `stop` returned True.
            UsageError: another process has given up.
        """
        self._count(f"at {place}", 1)
        while self._store is not None and self._count(f"at {place}", 0) < self.size:
            if stop():
                raise Stopped
            if self._count("given up", 0):
                raise UsageError("another process of this sweep has ended early; see what it says")
            time.sleep(_PAUSE)

    @contextmanager
    def together(self) -> Iterator[None]:
        """Let the others know if this process leaves with an exception."""
        try:
            yield
        except BaseException:
            self._count("given up", 1)
            raise

    def _count(self, name: str, more: int) -> int:
        if self._store is None:
            self._alone[name] = self._alone.get(name, 0) + more
            return self._alone[name]
        return int(self._store.add(f"quantdiff sweep {self._sweep} {name}", more))


@functools.cache
def _store() -> Any:
    from torch.distributed import rendezvous

    try:
        store, _, _ = next(rendezvous("env://"))
    except (ValueError, RuntimeError) as error:
        raise UsageError(
            "WORLD_SIZE tells of several processes, which cannot meet: start them with torchrun, "
            f"or unset it ({str(error).splitlines()[0]})"
        ) from None
    return store
