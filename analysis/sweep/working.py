"""The cells of a sweep, computed one after the other, each written as it finishes."""

import math
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, TypeVar

from quantdiff.analysis.evaluation import Outcome, Stopped
from quantdiff.analysis.sweep.distributed import Processes
from quantdiff.analysis.sweep.entries import Entry
from quantdiff.analysis.sweep.grid import Cell
from quantdiff.analysis.sweep.once import once
from quantdiff.analysis.sweep.planning import Opened, Request, Shelf
from quantdiff.analysis.sweep.progress import Progress, Tracker
from quantdiff.analysis.sweep.record import REFERENCE, writing
from quantdiff.analysis.sweep.remedied import Remedied, in_turn
from quantdiff.analysis.sweep.results import ResultsFile, Row
from quantdiff.errors import UsageError
from quantdiff.quantization import fake_quantize
from quantdiff.quantization.remedy import NONE

__all__ = ["Work"]

_LONGEST = 500  # characters of a failed cell's message

T = TypeVar("T")


class Work:
    """The unfinished cells of a sweep.

    Args:
        request: what was asked for.
        shelf: opens the models.
        plan: each model's cells, by evaluation.
        processes: this one among the others.
        tell: called with the state of the sweep.
    """

    def __init__(
        self,
        request: Request,
        shelf: Shelf,
        plan: Sequence[dict[str, list[Cell]]],
        processes: Processes,
        tell: Callable[[Progress], None],
    ) -> None:
        self._request, self._shelf, self._processes = request, shelf, processes
        self._plan = plan
        self._results = ResultsFile(request.out)
        cells = [cell for of_model in plan for of_one in of_model.values() for cell in of_one]
        self._finished = self._results.finished() & {cell.id for cell in cells}
        todo = [cell for cell in cells if cell.id not in self._finished]
        self._tracker = Tracker(todo, len(self._finished), processes, tell)
        if self._finished and processes.first:
            request.note(f"{len(self._finished)} of {len(cells)} cells are finished already")

    def do(self) -> None:
        """Compute the cells that no other process takes.

        Raises:
            Stopped: the sweep was asked to stop.
        """
        # Every process begins with a different model, so that not all need the same one at once.
        for number in _rotated(range(len(self._plan)), self._processes.rank):
            self._model(number)

    def _model(self, number: int) -> None:
        """Compute the cells of one model, keeping no reference to it afterwards."""
        missing = {
            name: [cell for cell in cells if cell.id not in self._finished]
            for name, cells in self._plan[number].items()
        }
        if not any(missing.values()):
            return
        try:
            opened = self._shelf.open(number)
            if opened.cells != self._plan[number]:
                raise UsageError(f"{opened.name} or its data have changed since the start")
        except Exception as error:  # a model that is gone must not cost the others their cells
            for cell in (cell for cells in missing.values() for cell in cells):
                if self._processes.take(cell.id):
                    self._tracker.begin(cell, 1)
                    self._fail(cell, error, 0.0)
            return
        for name in _rotated(list(missing), self._processes.rank):
            self._evaluate(opened, name, missing[name])

    def _evaluate(self, opened: Opened, name: str, cells: list[Cell]) -> None:
        """Compute the cells of one model and evaluation."""
        evaluation, request = opened.evaluations[name], self._request
        cells = [cells[n] for n in in_turn([Entry(c.schemes, c.remedy) for c in cells])]
        with (
            tempfile.TemporaryDirectory(prefix=REFERENCE, dir=request.out) as folder,
            Remedied(opened.model, opened.windows, request.batch_size) as remedied,
        ):

            def prepare() -> None:
                self._tracker.prepare(cell, "reference")
                evaluation.prepare(Path(folder), batch_size=request.batch_size, stop=request.stop)

            prepared = once(prepare)
            for cell in cells:
                if request.stop():
                    raise Stopped
                if not self._processes.take(cell.id):
                    continue
                begin = time.perf_counter()
                try:
                    prepared()
                    context = self._context(opened, cell, remedied)
                    self._tracker.begin(cell, evaluation.total)
                    begin = time.perf_counter()
                    outcome = evaluation.run(
                        context, batch_size=request.batch_size, progress=self._tracker.advance,
                        stop=request.stop,
                    )  # fmt: skip
                    _check_finite(outcome)
                except Stopped:
                    raise
                except Exception as error:  # whatever it is, the other cells may succeed
                    self._fail(cell, error, time.perf_counter() - begin)
                else:
                    self._succeed(cell, outcome, time.perf_counter() - begin)

    def _context(
        self, opened: Opened, cell: Cell, remedied: Remedied
    ) -> Callable[[], AbstractContextManager[Any]]:
        table = None
        if cell.remedy != NONE:
            self._tracker.prepare(cell, cell.remedy.name)
        schemes = remedied.put_on(Entry(cell.schemes, cell.remedy))
        if not schemes:
            return nullcontext
        if any(scheme.static for scheme in cell.schemes):
            assert opened.ranges is not None
            self._tracker.prepare(cell, "calibration")
            table = opened.ranges.table()
        return lambda: fake_quantize(opened.model, *schemes, table=table)

    def _succeed(self, cell: Cell, outcome: Outcome, seconds: float) -> None:
        rows = [
            _row(cell, seconds, "ok")
            | {"metric": m.name, "value": float(m.value), "count": int(m.count)}
            | {"stderr": _known(m.stderr)}
            for m in outcome.metrics
        ]
        with writing(self._request.out):
            self._results.append(rows, outcome.items)
        self._tracker.end(cell, failed=False)

    def _fail(self, cell: Cell, error: Exception, seconds: float) -> None:
        told = " ".join(str(error).split())
        if not isinstance(error, UsageError):  # which is a complete sentence
            told = f"{type(error).__name__}: {told}"
        with writing(self._request.out):
            self._results.append([_row(cell, seconds, "error") | {"error": told[:_LONGEST]}])
        self._tracker.end(cell, failed=True)


def _row(cell: Cell, seconds: float, status: str) -> Row:
    """A line of `results.jsonl`, in the order of its fields."""
    return cell.fields() | {
        "metric": None,
        "value": None,
        "stderr": None,
        "count": None,
        "data": cell.data,
        "seconds": round(seconds, 3),
        "status": status,
    }


def _known(error: float | None) -> float | None:
    """A standard error, or None if it is unknown, which some evaluations indicate by NaN."""
    return float(error) if error is not None and math.isfinite(error) else None


def _check_finite(outcome: Outcome) -> None:
    if not outcome.metrics:
        raise ValueError("the evaluation gave no metric")
    for metric in outcome.metrics:
        if not math.isfinite(metric.value):
            raise ValueError(f"{metric.name} is {metric.value}")


def _rotated(things: Sequence[T], by: int) -> list[T]:
    start = by % max(len(things), 1)
    return [*things[start:], *things[:start]]
