"""What a terminal shows of a sweep: its progress, then tables, or JSON."""

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from quantdiff.analysis.sensitivity import Sensitivity
    from quantdiff.analysis.sweep import Progress, SweepResults
    from quantdiff.analysis.sweep.mixed import Plan

__all__ = ["cell_progress", "note", "show_sweep"]


def note(sentence: str) -> None:
    """Print a note on stderr."""
    sys.stderr.write(f"note: {sentence}\n")


def show_sweep(
    results: "SweepResults",
    ranked: "Sequence[Sensitivity]",
    plans: "Sequence[Plan]",
    *,
    published: bool,
    as_json: bool,
) -> None:
    """Write the figures, and print the tables or JSON."""
    from rich.console import Console

    from quantdiff.analysis.sweep import save_sweep_figures, sweep_report
    from quantdiff.analysis.sweep.figure import has_accuracy
    from quantdiff.analysis.sweep.mixed import mixed_table, save_plan_figures
    from quantdiff.analysis.sweep.ranking import (
        ranking_table,
        ranking_told,
        save_sensitivity_figures,
    )

    if published and not has_accuracy(results):
        note("no accuracy was measured that the published Figure 8 could be drawn beside")
    figures = results.folder / "figures"
    save_sweep_figures(results, figures, published=published)
    save_sensitivity_figures(ranked, figures)
    save_plan_figures(plans, results, figures)
    if as_json:
        content = {
            "folder": str(results.folder),
            "models": results.record["models"],
            "cells": len(results.record["cells"]),
            "missing": results.missing,
            "results": results.rows,
            "rankings": [ranking_told(one) for one in ranked],
            "plans": [plan.told(results) for plan in plans],
        }
        print(json.dumps(content, ensure_ascii=False, allow_nan=False))
        return
    console = Console()
    parts = [*sweep_report(results), *map(ranking_table, ranked)]
    for part in [*parts, *(mixed_table(plan, results) for plan in plans)]:
        console.print(part)
    console.print(f"written to {results.folder}", markup=False, highlight=False, soft_wrap=True)


@contextmanager
def cell_progress(*, quiet: bool) -> Iterator[Callable[["Progress"], None]]:
    """A bar over cells with the time left, on stderr; in a log, one line per finished cell.

    Yields:
        A function that takes the sweep's progress.
    """
    from rich.console import Console
    from rich.progress import BarColumn, ProgressColumn, Task, TextColumn
    from rich.progress import Progress as Bar
    from rich.text import Text

    class Left(ProgressColumn):
        """Time left, as the sweep estimates it: cells of different kinds take different times."""

        def render(self, task: Task) -> Text:
            return Text(task.fields["left"], style="progress.remaining")

    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}", markup=False), BarColumn(bar_width=20),
        TextColumn("{task.fields[cells]}"), Left(),
    )  # fmt: skip
    on_screen = console.is_terminal and not quiet
    told = -1
    with Bar(*columns, console=console, disable=not on_screen) as bar:
        task = bar.add_task("opening the models", total=None, cells="", left="")

        def tell(now: "Progress") -> None:
            nonlocal told
            cells, left = f"{int(now.done):,} of {now.total:,} cells", _duration(now.left)
            bar.update(
                task, total=now.total, completed=now.done, description=now.doing, cells=cells,
                left=left,
            )  # fmt: skip
            if not quiet and not on_screen and int(now.done) > told:
                told = int(now.done)
                console.print(f"{cells}, {left}: {now.doing}", markup=False, soft_wrap=True)

        yield tell


def _duration(seconds: float | None) -> str:
    if seconds is None:
        return "time left unknown"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02} left"
