"""Where every number comes from: data, definitions, schemes, versions and commands of all runs."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pandas as pd

from quantdiff.analysis.compare.recorded import fingerprint
from quantdiff.analysis.compare.runs import (
    KINDS,
    CalibrationRun,
    CheckpointRun,
    Names,
    ProfileRun,
    Run,
    SweepRun,
    models_of,
    place_of,
)
from quantdiff.analysis.sweep.lines import lines, measures, way_label
from quantdiff.analysis.text import literal
from quantdiff.calibration.table import SITE
from quantdiff.export.card import scheme_in_words
from quantdiff.quantization import Scheme
from quantdiff.quantization.remedy import remedy

__all__ = ["definitions", "provenance"]

Row = dict[str, Any]


def provenance(runs: Sequence[Run], names: Names) -> pd.DataFrame:
    """One row per run and model; for a sweep, one per model and evaluation.

    Returns:
        `model`, `name` (as recorded in the run), `kind`, `folder`, `what` (evaluation, format or
        level of detail), `dtype`, `device`, `attention`, `data`, `fingerprint`, `tokens`,
        `sequence_length`, `state` (`whole` or what is missing), `scheme`, `calibrated_on` (what
        static ranges and remedies saw, in words), `versions` and `command`; missing where a run
        does not record it.
    """
    rows = []
    for run in runs:
        for row in _ROWS[type(run)](run):
            name = row.pop("name")
            start = {"model": names.of(run, name), "name": name, "kind": KINDS[type(run)]}
            rows.append(start | {"folder": place_of(run)} | row)
    return pd.DataFrame(rows, columns=list(_COLUMNS)).astype(_WHOLE)


def definitions(runs: Sequence[Run], names: Names) -> pd.DataFrame:
    """What was counted, in the words of the runs.

    Returns:
        One row per measure and definition: `measure`, `definition`, and `models`, those of the
        runs that use it.
    """
    found: dict[tuple[str, str], dict[str, None]] = {}
    for run in runs:
        told: Mapping[str, str] = {}
        if isinstance(run, ProfileRun):
            told = run.profile.definition
        elif isinstance(run, CalibrationRun):
            told = {SITE: run.table.definition}
        elif isinstance(run, CheckpointRun):
            told = {f"checkpoint: {key}": str(v) for key, v in run.content["definitions"].items()}
        for measure, definition in told.items():
            found.setdefault((measure, definition), {})[names.of(run)] = None
        if isinstance(run, SweepRun):
            record = run.results.record
            for model, about in record["models"].items():
                for key, definition in record.get("definitions", {}).items():
                    found.setdefault((f"sweep: {key}", definition), {})[names.of(run, model)] = None
                for evaluation, data in about["evaluations"].items():
                    settings = ", ".join(f"{k}: {v}" for k, v in data["settings"].items())
                    found.setdefault((evaluation, settings), {})[names.of(run, model)] = None
    rows = [(measure, text, ", ".join(models)) for (measure, text), models in found.items()]
    return pd.DataFrame(rows, columns=["measure", "definition", "models"])


def _profile(run: ProfileRun) -> Iterator[Row]:
    profile = run.profile
    yield {
        "name": models_of(run)[0],
        "what": profile.detail,
        **_seen(profile.model, profile.data),
        "state": "partial" if profile.partial else "whole",
        "versions": _versions(profile.versions),
        "command": profile.command,
    }


def _calibration(run: CalibrationRun) -> Iterator[Row]:
    table = run.table
    yield {
        "name": models_of(run)[0],
        "what": "ranges",
        **_seen(table.model, table.data),
        "state": "partial" if table.partial else "whole",
        "versions": _versions(table.versions),
        "command": table.command,
    }


def _checkpoint(run: CheckpointRun) -> Iterator[Row]:
    content = run.content
    measured = content.get("measured") or {}
    schemes = [scheme_in_words(Scheme(**entry)) for entry in content["schemes"]]
    calibration = content.get("calibration") or {}
    seen, cut = calibration.get("data"), ", cut short" if calibration.get("partial") else ""
    versions = {k: v for k, v in content["reference"].items() if k in _LIBRARIES}
    yield {
        "name": models_of(run)[0],
        "what": content["export"]["format"],
        "dtype": content["export"]["dtype"],
        "device": content["reference"].get("device"),
        "data": measured.get("data"),
        "fingerprint": measured.get("fingerprint"),
        "tokens": measured.get("tokens"),
        "sequence_length": measured.get("sequence_length"),
        "state": run.verification,
        "scheme": "; ".join(schemes) or None,
        "calibrated_on": f"static ranges on {_text(seen)}{cut}" if seen else None,
        "versions": _versions(versions | content.get("packages", {})),
        "command": content.get("command") or None,
    }


def _sweep(run: SweepRun) -> Iterator[Row]:
    record = run.results.record
    for model, about in record["models"].items():
        for evaluation, data in about["evaluations"].items():
            mine = [r for r in run.results.rows if (r["model"], r["eval"]) == (model, evaluation)]
            settings = data["settings"]
            yield {
                "name": model,
                "what": evaluation,
                "dtype": about["dtype"],
                "device": about["device"],
                "attention": about["attention"],
                "data": data["source"],
                "fingerprint": data["data"],
                "tokens": settings.get("tokens"),
                "sequence_length": settings.get("seq_len"),
                "state": _state(run, mine),
                "scheme": "; ".join(_schemes(run, model, evaluation)) or None,
                "calibrated_on": _calibrated_on(about, mine),
                "versions": _versions(record["versions"]),
                "command": "; ".join(record["commands"]) or None,
            }


def _state(run: SweepRun, mine: list[Row]) -> str:
    failed = len({row["cell"] for row in mine if row["status"] != "ok"})
    parts = [f"{failed} cells failed"] if failed else []
    if run.results.missing:
        parts.append(f"{run.results.missing} cells of the sweep are not done")
    return ", ".join(parts) or "whole"


def _schemes(run: SweepRun, model: str, evaluation: str) -> list[str]:
    """Schemes with their widths, in order."""
    found: dict[str, dict[int, None]] = {}
    for measure in measures(run.results):
        if measure.evaluation != evaluation:
            continue
        for line in lines(run.results, measure):
            if line.model == model:
                for bits in line.points:
                    way = "not quantized" if bits == 16 else way_label(line.way)
                    found.setdefault(way, {})[bits] = None
    return [f"{way}: {', '.join(map(str, widths))} bits" for way, widths in found.items()]


def _calibrated_on(about: Mapping[str, Any], mine: list[Row]) -> str | None:
    """What static ranges and remedies saw, where cells of an evaluation used any.

    Args:
        about: the model's entry in `sweep.json`.
        mine: the cells.
    """
    options = [row["options"] for row in mine]
    used = {
        "calibration": any("calibration" in one for one in options),
        "remedies": any("remedy" in one and remedy(one["remedy"]).reads for one in options),
    }
    told = [
        f"{what} on {_text((about.get(entry) or {})['data'])}"
        for entry, what in _CALIBRATED.items()
        if used[entry] and (about.get(entry) or {}).get("data")
    ]
    return "; ".join(told) or None


def _text(data: Mapping[str, Any]) -> str:
    """The data of a calibration, in words."""
    source = literal(data.get("source") or "a batch")
    tokens = f"{data['tokens']:,} tokens of " if "tokens" in data else ""
    return f"{tokens}{source} ({fingerprint(data.get('fingerprint'))})"


def _seen(model: Mapping[str, Any], data: Mapping[str, Any]) -> Row:
    return {
        "dtype": model.get("dtype"),
        "data": data.get("source"),
        "fingerprint": data.get("fingerprint"),
        "tokens": data.get("tokens"),
        "sequence_length": data.get("sequence_length"),
    }


def _versions(versions: Mapping[str, str]) -> str | None:
    return ", ".join(f"{name} {version}" for name, version in versions.items()) or None


_COLUMNS = (
    "model", "name", "kind", "folder", "what", "dtype", "device", "attention", "data",
    "fingerprint", "tokens", "sequence_length", "state", "scheme", "calibrated_on", "versions",
    "command",
)  # fmt: skip
_WHOLE = dict.fromkeys(("tokens", "sequence_length"), "Int64")

_CALIBRATED = {"calibration": "static ranges", "remedies": "remedies"}

_LIBRARIES = ("quantdiff", "torch", "transformers", "numpy")

_ROWS: dict[type, Any] = {
    ProfileRun: _profile, SweepRun: _sweep, CheckpointRun: _checkpoint,
    CalibrationRun: _calibration,
}  # fmt: skip
