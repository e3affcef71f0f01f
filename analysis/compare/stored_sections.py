"""The sections on checkpoints, calibrations, and where everything comes from."""

from collections.abc import Sequence

import pandas as pd

from quantdiff.analysis.compare.alike import Group, apart
from quantdiff.analysis.compare.parts import Keys, table, warned
from quantdiff.analysis.compare.provenance import definitions, provenance
from quantdiff.analysis.compare.recorded import fingerprint
from quantdiff.analysis.compare.runs import CalibrationRun, CheckpointRun, Names, Run
from quantdiff.analysis.compare.stored import calibrations, checkpoints
from quantdiff.analysis.report.content import Part, Section
from quantdiff.analysis.text import literal

__all__ = ["calibration_section", "checkpoint_section", "provenance_section"]

_CHECKPOINTS = (
    "MB are 10⁶ bytes of the model's safetensors files, bits per weight 8 times these bytes over "
    "the parameters. Verified are the folder's files, its tensors, and the logits of the reloaded "
    "model against those from before it was saved"
)
_CALIBRATIONS = (
    "Range of a layer: the largest magnitude that a symmetric grid over its heads reaches; largest "
    "and median over layers. Moved: its relative change over the last part of the data"
)

_OF_SWEEPS = ("device", "attention", "calibrated_on")  # columns that some kinds of run leave empty


def checkpoint_section(some: Sequence[Group[CheckpointRun]], names: Names, keys: Keys) -> Section:
    """Exported checkpoints, one table per text that the loss was measured on."""
    parts: list[Part] = []
    parts += warned(apart("Losses", some, names.of))
    for group in some:
        measured = group.members[0].content.get("measured")
        told = "No loss was measured"
        if measured:
            told = (
                f"Perplexity, KL from the source and top-1 agreement on {literal(measured['data'])}"
            )
            told += f" (data {fingerprint(measured.get('fingerprint'))})"
        frame = checkpoints(group, names)
        if not measured:
            frame = frame.drop(columns=["perplexity", "source_perplexity", "kl", "agreement"])
        parts.append(
            table(keys("checkpoints"), "Exported checkpoints", frame, f"{told}. {_CHECKPOINTS}.")
        )
        parts += warned(
            f"The checkpoint in {literal(run.folder)} is {run.verification}: quantdiff verify "
            "checks it."
            for run in group.members
            if run.verification != "passed"
        )
    return Section("checkpoints", "Checkpoints", tuple(parts))


def calibration_section(some: Sequence[Group[CalibrationRun]], names: Names, keys: Keys) -> Section:
    """Ranges of calibrations, and whether they have settled."""
    parts: list[Part] = []
    parts += warned(apart("Calibrations", some, names.of))
    for group in some:
        data = group.members[0].table.data
        caption = (
            f"Calibrated on {data['tokens']:,} tokens of {literal(data['source'] or 'a batch')} "
            f"(data {fingerprint(data.get('fingerprint'))}). {_CALIBRATIONS}."
        )
        frame = calibrations(group, names)
        parts.append(table(keys("calibrations"), "Ranges of attention logits", frame, caption))
        for run in group.members:
            warning = run.table.warning()
            parts += warned([f"{names.of(run)}: {warning}."] if warning else [])
    return Section("calibrations", "Calibrations", tuple(parts))


def provenance_section(runs: Sequence[Run], names: Names, keys: Keys) -> Section:
    """Every run with its data, schemes, versions and command, and what was counted."""
    frame = provenance(runs, names)
    data = frame[
        ["model", "kind", "what", "dtype", "device", "attention", "data", "fingerprint", "tokens",
         "sequence_length", "state", "scheme", "calibrated_on"]
    ]  # fmt: skip
    data = data.drop(columns=[name for name in _OF_SWEEPS if data[name].isna().all()])
    made: pd.DataFrame = frame[["model", "name", "kind", "folder", "versions", "command"]]
    made = made.drop_duplicates(ignore_index=True)
    parts = (
        table(
            keys("runs"), "Runs and their data", data,
            "What each run saw. Fingerprints are SHA-256 of the data, shown to twelve digits.",
        ),
        table(
            keys("commands"), "How the runs were made", made,
            "Name: of the model, as the run has it. A command is missing where a run was made in "
            "Python.",
        ),
        table(
            keys("definitions"), "What was counted", definitions(runs, names),
            "In the words of the runs.",
        ),
    )  # fmt: skip
    return Section("provenance", "Provenance", parts)
