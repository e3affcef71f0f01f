"""Sweeps side by side: evaluations on the same data as if one sweep had made them."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quantdiff.analysis.compare.alike import Fact, Facts, Group, apart, groups
from quantdiff.analysis.compare.recorded import fingerprint
from quantdiff.analysis.compare.runs import Names, Run, SweepRun, place_of
from quantdiff.analysis.sweep.identity import deciding_versions
from quantdiff.analysis.sweep.lines import evaluation_labels, of_some
from quantdiff.analysis.sweep.loaded import SweepResults
from quantdiff.analysis.sweep.results import Row
from quantdiff.analysis.text import literal
from quantdiff.quantization.remedy import remedy

__all__ = ["Measured", "data_of", "measured_groups"]

_SHOWN = ("tokens", "questions", "seq_len")  # settings whose values are stated where they differ
_OF_MODEL = ("generation",)  # settings that may differ between models, as weights do
_MADE_BY = ("dtype", "device", "attention")  # a model's entries, which `sweep` itself compares too
# Entries of a model that record the data of a calibration -> what was calibrated.
_CALIBRATED = {"calibration": "Static ranges", "remedies": "Remedies"}


@dataclass(frozen=True, eq=False)
class _Evaluated:
    """One evaluation of one model in one sweep; `source` is as in `Measured`."""

    run: SweepRun
    model: str
    label: str
    evaluation: str
    source: str

    @property
    def about(self) -> dict[str, Any]:
        """The model's entry in `sweep.json`."""
        told: dict[str, Any] = self.run.results.record["models"][self.model]
        return told

    @property
    def data(self) -> dict[str, Any]:
        """The evaluation's entry in it: source, data, settings."""
        told: dict[str, Any] = self.about["evaluations"][self.evaluation]
        return told

    @property
    def rows(self) -> list[Row]:
        """The evaluation's rows."""
        return [
            row
            for row in self.run.results.rows
            if (row["model"], row["eval"]) == (self.model, self.evaluation)
        ]

    def calibrations(self, row: Row) -> dict[str, str | None]:
        """The calibrations behind a row: entries of the model, and their fingerprints.

        That of the remedies is recorded only with the model, as all in a folder see one text.
        """
        options = row["options"]
        found: dict[str, str | None] = {}
        if "calibration" in options:
            found["calibration"] = options["calibration"]
        if "remedy" in options and remedy(options["remedy"]).reads:
            found["remedies"] = (self.about.get("remedies") or {}).get("fingerprint")
        return found

    def text(self, entry: str) -> str | None:
        """Fingerprint of the text behind an entry of `calibrations`, if it is known."""
        data = (self.about.get(entry) or {}).get("data") or {}
        mark: str | None = data.get("fingerprint")
        return mark


@dataclass(frozen=True, eq=False)
class Measured:
    """One evaluation of several models, all on the same data.

    Attributes:
        evaluation: its name in the first sweep.
        source: its name with the shortest end of its file's path that tells it apart from others.
        data: `source`, `data` (the fingerprint) and `settings`, as in `sweep.json`.
        dtype: of the models.
        results: as if from one sweep, whose models are all labels of the comparison.
        folders: label and cell that succeeded -> the folder that holds its items.
        labels: of the models that were measured.
        warnings: what a reader must know, one sentence each.
    """

    evaluation: str
    source: str
    data: dict[str, Any]
    dtype: str
    results: SweepResults
    folders: dict[tuple[str, str], Path]
    labels: tuple[str, ...]
    warnings: tuple[str, ...]


def measured_groups(runs: Sequence[Run], names: Names) -> tuple[list[Measured], list[str]]:
    """Merge the evaluations of some runs that share their data, and list what must not be compared.

    Args:
        runs: of all kinds.
        names: of their models.

    Returns:
        The evaluations in the order of their first runs, and a sentence for each that shares its
        name with another but differs in data, settings, dtype, device, attention or versions.
    """
    found = groups(_evaluated(runs, names), _facts)
    by_name: dict[str, list[Group[_Evaluated]]] = {}
    for group in found:
        by_name.setdefault(group.members[0].source, []).append(group)
    sentences = [
        sentence
        for source, alike in by_name.items()
        for sentence in apart(f"Results of {literal(source)}", alike, lambda one: one.label)
    ]
    sentences += [
        f"The sweep in {place_of(run)} is not finished: {run.results.missing:,} of "
        f"{len(run.results.record['cells']):,} cells are missing."
        for run in runs
        if isinstance(run, SweepRun) and run.results.missing
    ]
    sentences += [
        f"{place_of(run)} holds cells of some layers or heads, which are no accuracy at a width "
        "and stand in no table here: quantdiff sweep ranks them."
        for run in runs
        if isinstance(run, SweepRun) and any(map(of_some, run.results.rows))
    ]
    return [_merged(group, names) for group in found], sentences


def data_of(measured: Measured) -> str:
    """What was measured on what, as a sentence for captions."""
    settings, source = measured.data["settings"], literal(measured.data["source"])
    if "tokens" in settings:
        told = (
            f"{literal(measured.source)} over {settings['tokens']:,} tokens of {source} in windows "
            f"of {settings['seq_len']:,}"
        )
    elif "questions" in settings:
        told = f"{literal(measured.source)}, {settings['questions']:,} questions"
    else:
        told = f"{literal(measured.source)} on {source}"
    return f"{told} (data {fingerprint(measured.data['data'])}); models in {measured.dtype}."


def _evaluated(runs: Sequence[Run], names: Names) -> list[_Evaluated]:
    every = [
        (run, model, evaluation, (*evaluation_labels([evaluation]).values(), data["data"]))
        for run in runs
        if isinstance(run, SweepRun)
        for model, about in run.results.record["models"].items()
        for evaluation, data in about["evaluations"].items()
    ]
    # Files of the same name and content are one evaluation, wherever they were.
    first = {content: evaluation for _, _, evaluation, content in reversed(every)}
    labels = evaluation_labels(first.values())
    return [
        _Evaluated(run, model, names.of(run, model), evaluation, labels[first[content]])
        for run, model, evaluation, content in every
    ]


def _facts(one: _Evaluated) -> Facts:
    data, settings = one.data, one.data["settings"]
    versions = one.run.results.record["versions"]
    told = f"{literal(data['source'])} {fingerprint(data['data'])}"
    shown = {name: settings[name] for name in _SHOWN if name in settings}
    rest = {
        name: value
        for name, value in settings.items()
        if name not in shown and name not in _OF_MODEL
    }
    return {
        "evaluation": Fact(one.evaluation.partition(":")[0]),
        "data": Fact(data["data"], told),
        **{name: Fact(value, f"{value:,}") for name, value in shown.items()},
        "settings": Fact(json.dumps(rest, sort_keys=True)),
        **{name: Fact(one.about[name], str(one.about[name])) for name in _MADE_BY},
        **{name: Fact(versions.get(name), str(versions.get(name))) for name in deciding_versions()},
    }


def _merged(group: Group[_Evaluated], names: Names) -> Measured:
    """Merge into one sweep; what was measured twice, differently, is shown once, with a warning."""
    first = group.members[0]
    rows: list[Row] = []
    folders: dict[tuple[str, str], Path] = {}
    owners: dict[tuple[str, str], tuple[SweepRun, str]] = {}
    calibrations: dict[tuple[str, str], dict[str, str | None]] = {}  # of each line of a figure
    texts: dict[str, dict[str, dict[str | None, None]]] = {entry: {} for entry in _CALIBRATED}
    models: dict[str, Any] = {
        label: {"evaluations": {}, "calibration": None} for label in names.labels
    }
    sentences: list[str] = []
    # A failure is shown once, and only where there is no result.
    seen = {
        (one.label, _way(row)) for one in group.members for row in one.rows if row["status"] == "ok"
    }
    for one in group.members:
        models[one.label] = one.about | {"evaluations": {first.evaluation: one.data}}
        twice = failed = 0
        for row in one.rows:
            place = one.label, _way(row)
            if row["status"] != "ok":
                if place not in seen:
                    seen.add(place)
                    failed += 1
                    rows.append(row | {"model": one.label, "eval": first.evaluation})
                continue
            # A cell's id depends on the weights, not on their name: a copy of them has the same id.
            cell = one.label, row["cell"]
            if cell in folders and folders[cell] != one.run.folder:
                continue  # the same cell, in another folder
            owner, first_cell = owners.get(place, (one.run, row["cell"]))
            if owner is one.run and first_cell != row["cell"]:
                continue  # its file was named differently
            known = one.calibrations(row)
            if (
                calibrations.setdefault((one.label, _way(row, bits=False)), known) != known
                or owners.setdefault(place, (one.run, row["cell"]))[0] is not one.run
            ):
                twice += 1
                continue
            for entry in known:
                texts[entry].setdefault(one.label, {})[one.text(entry)] = None
            folders[cell] = one.run.folder
            rows.append(row | {"model": one.label, "eval": first.evaluation})
        if twice:
            sentences.append(
                f"{one.label} was measured a second time with {literal(one.source)} in "
                f"{place_of(one.run)}: what stands here is the first."
            )
        if failed:
            sentences.append(
                f"{one.label}: {failed} cell{'s' * (failed > 1)} of {literal(one.source)} failed."
            )
    record = {
        "models": models,
        "cells": list(dict.fromkeys(row["cell"] for row in rows)),
        "versions": first.run.results.record["versions"],
        "commands": [],
    }
    sentences += _apart(texts)
    return Measured(
        evaluation=first.evaluation,
        source=first.source,
        data=first.data,
        dtype=str(first.about["dtype"]),
        results=SweepResults(
            first.run.folder, record, rows, labels={first.evaluation: first.source}
        ),
        folders=folders,
        labels=tuple(dict.fromkeys(one.label for one in group.members)),
        warnings=tuple(dict.fromkeys(sentences)),
    )


def _way(row: Row, *, bits: bool = True) -> str:
    """Everything that sets a row's cell, or its line over bits, apart from others of its model."""
    options = {name: value for name, value in row["options"].items() if name != "calibration"}
    # The options list the schemes of a combination.
    parts = [row["site"], row["range"], row["granularity"], options]
    return json.dumps([*parts, row["bits"]] if bits else parts, sort_keys=True)


def _apart(texts: dict[str, dict[str, dict[str | None, None]]]) -> list[str]:
    """One sentence for each thing that was calibrated on more than one text, with the models."""
    sentences = []
    for entry, by_label in texts.items():
        if len({mark for marks in by_label.values() for mark in marks}) > 1:
            told = ", ".join(
                f"{label} on {' and '.join(fingerprint(mark) for mark in marks)}"
                for label, marks in by_label.items()
            )
            sentences.append(f"{_CALIBRATED[entry]} were calibrated on different texts: {told}.")
    return sentences
