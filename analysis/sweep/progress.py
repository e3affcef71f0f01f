"""How far a sweep has come, and how long it will still take."""

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from quantdiff.analysis.sweep.distributed import Processes
from quantdiff.analysis.sweep.grid import Cell, short_name, where

__all__ = ["Progress", "Tracker"]

_ENOUGH = 0.02  # share of a cell after which its own speed predicts how long it takes


@dataclass(frozen=True)
class Progress:
    """Where a sweep stands.

    Attributes:
        done: finished cells, plus the finished part of the current one.
        total: cells of the grid.
        doing: the current cell in a few words.
        left: estimated seconds; None while nothing is known.
    """

    done: float
    total: int
    doing: str
    left: float | None


class Tracker:
    """Follows the cells of one process and accounts for those of the others."""

    def __init__(
        self,
        cells: Iterable[Cell],
        finished: int,
        processes: Processes,
        tell: Callable[[Progress], None],
    ) -> None:
        self._todo = Counter((cell.model, cell.evaluation) for cell in cells)
        self._before, self._left = finished, sum(self._todo.values())
        self._processes, self._tell = processes, tell
        self._seconds: dict[tuple[str, str], list[float]] = defaultdict(list)
        self._doing, self._kind = "", ("", "")
        self._begun, self._part, self._share = 0.0, 0.0, 0.0

    def prepare(self, cell: Cell, what: str) -> None:
        """Report preparatory work that serves other cells too."""
        self._doing, self._part, self._share = f"{_short(cell)} · {what}", 0.0, 0.0
        self._report()

    def begin(self, cell: Cell, units: int) -> None:
        """Start a cell of the given number of units of progress."""
        told = short_name(cell.schemes)
        if len(cell.schemes) == 1:
            told += f" {cell.schemes[0].range} {cell.schemes[0].granularity}"
        told += where(cell.fields()["options"])
        self._doing, self._kind = f"{_short(cell)} · {told}", (cell.model, cell.evaluation)
        self._begun, self._part, self._share = time.perf_counter(), 0.0, 1 / max(units, 1)
        self._report()

    def advance(self, units: int) -> None:
        """Count units of the current cell."""
        self._part = min(self._part + units * self._share, 1.0)
        self._report()

    def end(self, cell: Cell, *, failed: bool) -> None:
        """Finish a cell."""
        kind = cell.model, cell.evaluation
        if not failed:  # a failure says nothing about how long the others take
            self._seconds[kind].append(time.perf_counter() - self._begun)
        self._todo[kind] -= 1
        self._part = self._share = 0.0
        self._processes.tell_done()
        self._report()

    def _report(self) -> None:
        done = self._processes.done()
        total = self._before + self._left
        at = min(self._before + done + self._part, total)
        self._tell(Progress(at, total, self._doing, self._estimate(done)))

    def _estimate(self, done: int) -> float | None:
        """Seconds left, from the mean of each kind, else of its evaluation, else of all cells."""
        known = {kind: sum(s) / len(s) for kind, s in self._seconds.items() if s}
        elapsed = time.perf_counter() - self._begun
        if self._part >= _ENOUGH and self._kind not in known:
            known[self._kind] = elapsed / self._part
        if not known:
            return None
        seconds = 0.0
        for kind, count in self._todo.items():
            alike = [s for other, s in known.items() if other[1] == kind[1]] or list(known.values())
            seconds += count * known.get(kind, sum(alike) / len(alike))
        mine = sum(self._todo.values())
        # The others take from the same cells and are assumed to be as fast.
        others = (self._left - done) / max(mine, 1) / self._processes.size
        current = known.get(self._kind, 0.0) * self._part
        return max(seconds * others - current, 0.0)


def _short(cell: Cell) -> str:
    return f"{cell.model.rsplit('/', 1)[-1]} · {cell.evaluation.rsplit('/', 1)[-1]}"
