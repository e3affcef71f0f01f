"""Checkpoints and calibrations as tables, grouped by the data that they were measured on."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd

from quantdiff.analysis.compare.alike import Fact, Facts, Group, groups
from quantdiff.analysis.compare.recorded import fingerprint
from quantdiff.analysis.compare.runs import CalibrationRun, CheckpointRun, Names, Run, place_of
from quantdiff.analysis.ranges import reaches
from quantdiff.analysis.text import literal
from quantdiff.export.card import scheme_in_words
from quantdiff.quantization import Scheme

__all__ = ["calibration_groups", "calibrations", "checkpoint_groups", "checkpoints"]


def checkpoint_groups(runs: Sequence[Run]) -> list[Group[CheckpointRun]]:
    """Group the checkpoints of some runs by the data that their loss was measured on."""
    return groups([run for run in runs if isinstance(run, CheckpointRun)], _measured_on)


def _measured_on(run: CheckpointRun) -> Facts:
    measured = run.content.get("measured") or {}
    told = literal(measured.get("data") or "nothing")
    return {"data": Fact(measured.get("fingerprint") or told, told)}


def checkpoints(group: Group[CheckpointRun], names: Names) -> pd.DataFrame:
    """Size and loss of exported checkpoints.

    Returns:
        One row per checkpoint: `model` (the source), `folder`, `format`, `schemes` (what is
        quantized besides the weights), `megabytes` (10⁶ bytes of the model's safetensors files),
        `bits_per_weight`, `perplexity`, `source_perplexity`, `kl` (nats per token, from the
        source), `agreement` (share of top-1 tokens) and `verification`; NaN where nothing was
        measured.
    """
    rows = []
    for run in group.members:
        content = run.content
        measured = content.get("measured") or {}
        schemes = [scheme_in_words(Scheme(**entry)) for entry in content["schemes"]]
        rows.append({
            "model": names.of(run),
            "folder": place_of(run),
            "format": content["export"]["format"],
            "schemes": "; ".join(schemes) or "none",
            "megabytes": content["size"]["bytes"] / 1e6,
            "bits_per_weight": content["size"]["bits_per_weight"],
            "perplexity": measured.get("perplexity", np.nan),
            "source_perplexity": measured.get("source", {}).get("perplexity", np.nan),
            "kl": measured.get("kl", np.nan),
            "agreement": measured.get("agreement", np.nan),
            "verification": run.verification,
        })  # fmt: skip
    return pd.DataFrame(rows)


def calibration_groups(runs: Sequence[Run]) -> list[Group[CalibrationRun]]:
    """Group the calibrations of some runs by the data that they saw."""
    return groups([run for run in runs if isinstance(run, CalibrationRun)], _calibrated_on)


def _calibrated_on(run: CalibrationRun) -> Facts:
    table = run.table
    data: dict[str, Any] = table.data
    source, mark = literal(data.get("source") or "unnamed data"), data.get("fingerprint")
    return {
        "data": Fact(mark or f"{source}, unmarked", f"{source} {fingerprint(mark)}"),
        "tokens": Fact(data["tokens"], f"{data['tokens']:,}"),
        "sequence length": Fact(data["sequence_length"], f"{data['sequence_length']:,}"),
        "definition": Fact(table.definition),
        "dtype": Fact(table.model.get("dtype"), str(table.model.get("dtype"))),
        "completeness": Fact(table.partial, "partial" if table.partial else "whole"),
    }


def calibrations(group: Group[CalibrationRun], names: Names) -> pd.DataFrame:
    """How far each observer's symmetric range of a layer reaches, and whether it has settled.

    Returns:
        One row per calibration and observer: `model`, `folder`, `observer`, `largest` and `median`
        range over the layers, `moved_median` and `moved_largest`, its relative movement
        over the last part of the data; NaN where that is not known.
    """
    rows = []
    for run in group.members:
        moved = run.table.convergence()
        for observer, ranges in reaches(run.table).items():
            rows.append({
                "model": names.of(run),
                "folder": place_of(run),
                "observer": observer,
                "largest": float(ranges.max()),
                "median": float(ranges.median()),
                "moved_median": moved.get(str(observer), {}).get("median", np.nan),
                "moved_largest": moved.get(str(observer), {}).get("largest", np.nan),
            })  # fmt: skip
    return pd.DataFrame(rows)
