"""The processes of one sweep, as torchrun starts them: who takes which cell, when all are done."""

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

_PAUSE = 0.1  # seconds between two looks at what the others do
_SWEEPS = itertools.count()


def is_first() -> bool:
    """Whether this process is alone, or the one among several that speaks."""
    return int(os.environ.get("RANK", "0")) == 0 or int(os.environ.get("WORLD_SIZE", "1")) == 1


class Processes:
    """This process among those of its sweep; alone where no launcher started it.

    They agree through the store that torchrun keeps, in memory: what one has taken is taken, and
    nothing is left behind when they are killed.

    Attributes:
        rank, size: of this process, and of them all.

    Raises:
        UsageError: the environment tells of several processes, but not where they meet.
    """

    def __init__(self) -> None:
        self.size = int(os.environ.get("WORLD_SIZE", "1"))
        self.rank = int(os.environ.get("RANK", "0")) if self.size > 1 else 0
        # Every process counts its sweeps alike, so that a second one in a program starts anew.
        self._sweep = next(_SWEEPS)
        self._store = _store() if self.size > 1 else None
        self._alone: dict[str, int] = {}

    @property
    def first(self) -> bool:
        """Whether this process is the one that speaks and keeps the record."""
        return self.rank == 0

    @property
    def device(self) -> str | None:
        """The GPU of this process; None where it is alone or there are none."""
        if self.size == 1 or not torch.cuda.is_available():
            return None
        return f"cuda:{os.environ.get('LOCAL_RANK', '0')}"

    def take(self, cell: str) -> bool:
        """Whether a cell is this process's to compute: no other has taken it."""
        return self._count(f"cell {cell}", 1) == 1

    def tell_done(self) -> None:
        """Tell the others that one more cell is done."""
        self._count("cells done", 1)

    def done(self) -> int:
        """Cells that all processes have done since the start."""
        return self._count("cells done", 0)

    def meet(self, place: str, stop: Callable[[], bool]) -> None:
        """Wait until all processes have come to a place, named once in a sweep.

        Raises:
            Stopped: `stop` said so.
            UsageError: one of the others has given up.
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
        """Let the others know where this process leaves by an exception."""
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
