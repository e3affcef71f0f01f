"""Finding runs: what profile, sweep, export and calibrate wrote, in any mix of folders."""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

from quantdiff.analysis.compare.runs import (
    CalibrationRun,
    CheckpointRun,
    ProfileRun,
    Run,
    SweepRun,
)
from quantdiff.analysis.sweep.loaded import SweepResults
from quantdiff.analysis.sweep.sensitivities import schemes_of
from quantdiff.analysis.text import literal
from quantdiff.calibration.table import CalibrationTable
from quantdiff.errors import UsageError
from quantdiff.export.sidecar import VERIFICATION, read_sidecar
from quantdiff.quantization.remedy import NONE, remedy
from quantdiff.statistics.profile import Profile

__all__ = ["Found", "Source", "find_runs", "markers"]

Source: TypeAlias = str | Path | Profile | SweepResults | CalibrationTable

# Entries of a line of results.jsonl that are read.
_ENTRIES = {
    "cell", "model", "scheme", "site", "bits", "range", "granularity", "options", "eval", "data",
    "status",
}  # fmt: skip
_DONE = {"metric", "value", "stderr", "count"}
_CAUSES = (KeyError, TypeError, AttributeError, ValueError, IndexError)


@dataclass
class Found:
    """The runs that were found.

    Attributes:
        runs: in the order in which they were given.
        warnings: what could not be read, one sentence each.
    """

    runs: list[Run] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


def find_runs(sources: Sequence[Source]) -> Found:
    """Read all runs that are there.

    A folder may hold several runs; where it holds none, its subfolders are read, and theirs where
    one holds none. What cannot be read is reported in `warnings`, and the rest is read.

    Args:
        sources: folders, or results in memory; each is read once.

    Raises:
        UsageError: there is nothing that can be read.
    """
    found = Found()
    seen: set[Any] = set()
    for source in sources:
        if not isinstance(source, str | Path):
            if id(source) not in seen:
                seen.add(id(source))
                found.runs.append(_in_memory(source))
            continue
        folder = Path(source).expanduser()
        try:
            inside = [folder] if markers(folder) else _below(folder)
        except OSError as error:
            found.warnings.append(f"{literal(folder)} cannot be read: {error.strerror}.")
            continue
        if not inside:
            found.warnings.append(_nothing(folder))
        for place in inside:
            if place.resolve() not in seen:
                seen.add(place.resolve())
                _read(place, found)
    if not found.runs:
        reason = found.warnings[0].removesuffix(".") if found.warnings else "no run was given"
        raise UsageError(f"there is nothing to compare: {reason}")
    return found


def _in_memory(source: Any) -> Run:
    if isinstance(source, Profile):
        return ProfileRun(None, source)
    if isinstance(source, SweepResults):
        return SweepRun(source.folder, source)
    if isinstance(source, CalibrationTable):
        return CalibrationRun(None, source)
    raise UsageError(
        f"{type(source).__name__} is no run: give folders that quantdiff wrote, profiles, results "
        "of sweeps or calibration tables"
    )


def markers(folder: Path) -> list[str]:
    """The files of a folder that mark a run."""
    return [name for name in _READERS if (folder / name).is_file()]


def _below(folder: Path) -> list[Path]:
    """The runs one level down, or two where the folder between is not a run; no hidden folders.

    Those are being written, or were left behind by a process that was killed.
    """
    if not folder.is_dir():
        return []
    return [
        place
        for inside in _shown(folder)
        for place in ([inside] if markers(inside) else _shown(inside))
        if markers(place)
    ]


def _shown(folder: Path) -> list[Path]:
    return sorted(place for place in folder.glob("*") if not place.name.startswith("."))


def _nothing(folder: Path) -> str:
    if not folder.exists():
        return f"{literal(folder)} does not exist."
    return f"{literal(folder)} holds nothing that profile, sweep, export or calibrate wrote."


def _read(folder: Path, found: Found) -> None:
    for name in markers(folder):
        try:
            found.runs += _READERS[name](folder)
        except UsageError as error:
            found.warnings.append(f"Left out: {literal(error)}.")
        except _CAUSES as error:  # an entry that is missing or of another type
            told = f"{type(error).__name__}: {error}"
            found.warnings.append(
                f"Left out: {literal(folder / name)} is broken ({literal(told)})."
            )


def _profile(folder: Path) -> Iterator[Run]:
    yield ProfileRun(folder, Profile.load(folder))


def _sweep(folder: Path) -> Iterator[Run]:
    results = SweepResults.load(folder)
    for row in results.rows:
        missing = _ENTRIES | (_DONE if row["status"] == "ok" else {"error"})
        missing -= row.keys()
        if missing or row["model"] not in results.models:
            raise UsageError(
                f"{folder} holds a broken sweep: a line of cell {row['cell']} lacks "
                f"{', '.join(sorted(missing)) or 'its model in sweep.json'}"
            )
        try:
            schemes_of(row), remedy(row["options"].get("remedy", NONE.name))
        except UsageError as error:
            raise UsageError(
                f"{folder} holds a sweep that this version cannot read ({error}); upgrade quantdiff"
            ) from None
    for about in results.record["models"].values():
        about["fingerprint"], about["evaluations"].items(), about["calibration"]
        about["dtype"], about["device"], about["attention"]
    results.record["versions"].items(), results.record["commands"]
    yield SweepRun(folder, results)


def _calibration(folder: Path) -> Iterator[Run]:
    yield CalibrationRun(folder, CalibrationTable.load(folder))


def _checkpoint(folder: Path) -> Iterator[Run]:
    content = read_sidecar(folder).content
    content["model"]["name"], content["size"]["bytes"], content["size"]["bits_per_weight"]
    try:
        checked = json.loads((folder / VERIFICATION).read_text(encoding="utf-8"))
        failed = [str(check["detail"]) for check in checked["checks"] if not check["passed"]]
        status = "passed" if checked["passed"] is True else f"failed: {'; '.join(failed)}"
    except FileNotFoundError:
        status = "not verified"
    except (OSError, *_CAUSES):
        status = f"{VERIFICATION} is broken"
    yield CheckpointRun(folder, content, status)


# The file that marks a run -> its reader.
_READERS: dict[str, Callable[[Path], Iterator[Run]]] = {
    "profile.json": _profile,
    "sweep.json": _sweep,
    "quantdiff.json": _checkpoint,
    "calibration.json": _calibration,
}
