"""Checks that refuse an export before any work is done."""

import re
from pathlib import Path
from typing import Any

from quantdiff.errors import UsageError
from quantdiff.export.ranges import calibration_of
from quantdiff.export.sidecar import SIDECAR
from quantdiff.models import describe
from quantdiff.quantization.table import Table

__all__ = ["check_out", "check_shard_size", "check_source", "check_table"]


def check_out(out: Path, overwrite: bool) -> None:
    """Refuse a folder whose files an export must not replace.

    Raises:
        UsageError: it is not empty, and either `overwrite` is False or it holds no export.
    """
    if not out.is_dir() or all(path.name.startswith(".staged-") for path in out.iterdir()):
        return  # new, or what a killed run left behind
    if not overwrite:
        raise UsageError(f"{out} exists and is not empty; choose another --out or pass --overwrite")
    # An export killed while its files were moved one by one has it here or still in the stage.
    if not any((folder / SIDECAR).is_file() for folder in (out, *out.glob(".staged-*"))):
        raise UsageError(
            f"{out} holds files but no export that could be replaced (no {SIDECAR}); choose "
            "another --out"
        )


def check_source(out: Path, model: Any) -> None:
    """Refuse to write over the folder that a model was loaded from.

    Raises:
        UsageError: `out` is that folder.
    """
    source = getattr(model.config, "name_or_path", "")
    # A hub id may be spelled like a folder; where such a folder exists, it means the folder.
    if source and Path(source).is_dir() and Path(source).resolve() == out.resolve():
        raise UsageError(f"{out} is the source itself; choose another --out")


def check_shard_size(size: str | int) -> None:
    """Refuse what is not a file size.

    Raises:
        UsageError: it is neither a number of bytes above 0 nor a size with a unit.
    """
    if isinstance(size, str):
        found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*[KMGT]B\s*", size, re.ASCII | re.IGNORECASE)
        good = found is not None and float(found[1]) > 0
    else:
        good = size > 0
    if not good:
        raise UsageError(f"--max-shard-size takes a size such as 500MB or 5GB, and not {size!r}")


def check_table(table: Table, model: Any) -> None:
    """Refuse a table that was calibrated on another model, if it records its model.

    The quantizer compares names and heads of attention sites, which many models have in common.

    Raises:
        UsageError: family or number of parameters differ.
    """
    calibration, told = calibration_of(table), describe(model)
    known = told if calibration is None else calibration["model"]
    for entry in ("family", "parameters"):
        if known.get(entry, told[entry]) != told[entry]:
            raise UsageError(
                f"the table was calibrated on another model ({known.get('name')}: {entry} "
                f"{known[entry]}, and not {told[entry]}): calibrate {told['name']}"
            )
