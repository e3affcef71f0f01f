"""The runs of a comparison, and the names and colours of their models."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from quantdiff.analysis.style import model_colors
from quantdiff.analysis.sweep.lines import model_labels
from quantdiff.analysis.sweep.loaded import SweepResults
from quantdiff.analysis.text import literal
from quantdiff.calibration.table import CalibrationTable
from quantdiff.statistics.profile import Profile

__all__ = [
    "KINDS",
    "CalibrationRun",
    "CheckpointRun",
    "Names",
    "ProfileRun",
    "Run",
    "SweepRun",
    "models_of",
    "place_of",
    "told_runs",
]


@dataclass(frozen=True, eq=False)
class ProfileRun:
    """A profile; `folder` is None for one in memory."""

    folder: Path | None
    profile: Profile


@dataclass(frozen=True, eq=False)
class SweepRun:
    """A sweep, of one or many models."""

    folder: Path
    results: SweepResults


@dataclass(frozen=True, eq=False)
class CheckpointRun:
    """An exported checkpoint.

    Attributes:
        folder: its location.
        content: of `quantdiff.json`.
        verification: `passed`, or in words why not.
    """

    folder: Path
    content: dict[str, Any]
    verification: str


@dataclass(frozen=True, eq=False)
class CalibrationRun:
    """A calibration; `folder` is None for one in memory."""

    folder: Path | None
    table: CalibrationTable


Run: TypeAlias = ProfileRun | SweepRun | CheckpointRun | CalibrationRun

_NO_PATH = set('<>"|?*')

KINDS: dict[type, str] = {
    ProfileRun: "profile", SweepRun: "sweep", CheckpointRun: "checkpoint",
    CalibrationRun: "calibration",
}  # fmt: skip


def models_of(run: Run) -> list[str]:
    """Names of a run's models, as recorded in it."""
    if isinstance(run, SweepRun):
        return run.results.models
    if isinstance(run, CheckpointRun):
        return [str(run.content["model"]["name"])]
    about = run.profile.model if isinstance(run, ProfileRun) else run.table.model
    return [str(about.get("name"))]


def place_of(run: Run) -> str:
    """Where a run is, on one line."""
    return "in memory" if run.folder is None else literal(run.folder)


def told_runs(runs: Sequence[Run]) -> str:
    """The number of runs of each kind, in words."""
    counts = Counter(KINDS[type(run)] for run in runs)
    return ", ".join(f"{count} {kind}{'s' * (count > 1)}" for kind, count in counts.items())


class Names:
    """The models' names in all tables and figures: short, on one line, and distinct.

    A name that occurs in two profiles, or in two sweeps with different weights, is followed by the
    run's folder: these count as two models until somebody shows that they are one.

    Attributes:
        labels: of all models, in order.
        colors: by label.
        as_written: label -> the model's name in its runs.
        warnings: on models whose runs do not describe the same model, one sentence each.
    """

    def __init__(self, runs: Sequence[Run]) -> None:
        self._short = _short(dict.fromkeys(name for run in runs for name in models_of(run)))
        self._labels: dict[tuple[int, str], str] = {}
        mentions = list(_mentions(runs))
        # For each kind of run, how many models share a name.
        several = Counter((kind, name) for kind, name, _ in {mention[:3] for mention in mentions})
        known: dict[tuple[str, str, Any], str] = {}
        owners: dict[str, tuple[str, str]] = {}
        for kind, name, identity, run in mentions:
            if (kind, name, identity) not in known:
                told = f" ({_told(run, runs)})" if several[kind, name] > 1 else ""
                label = _free(f"{literal(self._short[name])}{told}", (name, told), owners)
                known[kind, name, identity] = label
            self._labels[id(run), name] = known[kind, name, identity]
        self.labels = list(dict.fromkeys(self._labels.values()))
        self.as_written = {label: name for (_, name), label in self._labels.items()}
        self.warnings = _unlike(runs, self)
        self.colors = model_colors(self.labels)

    def of(self, run: Run, model: str | None = None) -> str:
        """The label of a model of a run; without `model`, of the run's only one."""
        name = models_of(run)[0] if model is None else model
        return self._labels.get((id(run), name)) or literal(self._short[name])


def _unlike(runs: Sequence[Run], names: Names) -> list[str]:
    """The models that a profile and a sweep describe differently under one name."""
    profiled = {names.of(run): run.profile.model for run in runs if isinstance(run, ProfileRun)}
    sentences = []
    for run in (run for run in runs if isinstance(run, SweepRun)):
        for model, swept in run.results.record["models"].items():
            label = names.of(run, model)
            ours = profiled.get(label, {})
            different = [
                f"{entry} {literal(ours[entry])} and {literal(swept[entry])}"
                for entry in ("family", "parameters")
                if entry in ours and entry in swept and ours[entry] != swept[entry]
            ]
            if different:
                sentences.append(
                    f"{label} is another model in its profile than in the sweep in "
                    f"{place_of(run)}: {', '.join(different)}."
                )
    return sentences


def _short(names: Iterable[str]) -> dict[str, str]:
    """Names without their folders; a name with characters that paths do not have stays whole."""
    paths = [name for name in names if not set(name) & _NO_PATH]
    return {name: name for name in names} | model_labels(paths)


def _mentions(runs: Sequence[Run]) -> Iterator[tuple[str, str, Any, Run]]:
    """Kind of run, model, what sets it apart from others of that name, and the run."""
    for run in runs:
        for name in models_of(run):
            if isinstance(run, ProfileRun):
                yield "profile", name, id(run), run
            elif isinstance(run, SweepRun):
                yield "sweep", name, run.results.record["models"][name]["fingerprint"], run


def _told(run: Run, runs: Sequence[Run]) -> str:
    """A run among others: its folder's own name where that is unique, else the whole path."""
    if run.folder is None:
        return f"run {list(runs).index(run) + 1}"
    ends = [other.folder.name for other in runs if other.folder is not None]
    return literal(run.folder.name if ends.count(run.folder.name) == 1 else run.folder)


def _free(label: str, owner: tuple[str, str], owners: dict[str, tuple[str, str]]) -> str:
    """The label, numbered if another model has it already."""
    result, number = label, 1
    while owners.setdefault(result, owner) != owner:
        number += 1
        result = f"{label} #{number}"
    return result
