"""`sweep.json`: what the results in a folder belong to, so that no others are mixed in."""

import errno
import fcntl
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from quantdiff.analysis.sweep.identity import deciding_versions
from quantdiff.analysis.sweep.ranges import FOLDER
from quantdiff.analysis.sweep.results import ITEMS, RESULTS
from quantdiff.errors import UsageError
from quantdiff.files import write_json
from quantdiff.quantization.definitions import DEFINITIONS
from quantdiff.statistics.storage import read_content
from quantdiff.versions import versions

__all__ = [
    "REFERENCE",
    "Record",
    "clear",
    "exclusive",
    "extended",
    "read_record",
    "write_record",
    "writing",
]

FORMAT, VERSION = "quantdiff.sweep", 1
RECORD = "sweep.json"
REFERENCE = ".reference-"  # prefix of the folders of references that evaluations compare with

Record = dict[str, Any]

# Patterns of partly written files; see `files.write_bytes`.
_HALF = (f".{RECORD}.*", f"{ITEMS}/.*.npz.*", "figures/.*", f"{FOLDER}/*/.calibration.*")
_OWNED = (
    f"{ITEMS}/*.npz",
    "figures/bits*",
    "figures/ranges*",
    "figures/sites*",
    "figures/layers*",
    "figures/heads*",
    "figures/mixed*",
    f"{FOLDER}/*/calibration.*",
)
_REMEDY = "choose another --out or pass --overwrite"


def read_record(folder: Path) -> Record:
    """Read what a folder's results belong to.

    Raises:
        UsageError: the folder holds no sweep, or one that cannot be read.
    """
    return read_content(folder / RECORD, FORMAT, VERSION, "sweep")


def write_record(folder: Path, record: Record) -> None:
    """Write `sweep.json`."""
    write_json(folder / RECORD, record)


def extended(
    folder: Path, models: dict[str, Any], cells: Sequence[str], *, command: str | None
) -> Record:
    """The record of a folder with some models and cells added.

    Args:
        folder: may hold an earlier sweep.
        models: by name, as from `planning.Opened.about`.
        cells: ids, in the order in which results are shown.
        command: the command line that requests them, if any.

    Returns:
        `models`; `cells`, all ids in order; `asked`, the ids of the last request; `definitions`,
        `versions` and `commands`; `requests`, those so far that had something to compute: the
        `command` of each, and its `conditions.conditions`, which folders of earlier versions lack.

    Raises:
        UsageError: the folder holds results that are incompatible with these.
    """
    if (folder / RECORD).exists():
        old = read_record(folder)
        _check(folder, old, models)
    elif (folder / RESULTS).exists():
        raise UsageError(f"{folder} holds {RESULTS} of something else, without {RECORD}; {_REMEDY}")
    else:
        old = {"models": {}, "cells": [], "commands": []}
    together = dict(old["models"])
    for name, told in models.items():
        known = together.get(name, {"evaluations": {}, "calibration": None})
        together[name] = told | {
            "evaluations": known["evaluations"] | told["evaluations"],
            "calibration": told["calibration"] or known["calibration"],
            "remedies": told.get("remedies") or known.get("remedies"),
        }
    commands = list(old["commands"])
    if command is not None and command not in commands:
        commands.append(command)
    return {
        "format": f"{FORMAT}/{VERSION}",
        "models": together,
        "cells": list(dict.fromkeys([*old["cells"], *cells])),
        "asked": list(cells),
        "definitions": DEFINITIONS,
        "versions": versions(),
        "commands": commands,
        "requests": old.get("requests", _unrecorded(old)),
    }


def _unrecorded(old: Record) -> list[dict[str, Any]]:
    """The requests of a folder that predates the recording of their conditions."""
    return [{"command": one} for one in old["commands"] or [None]] if old["cells"] else []


def _check(folder: Path, old: Record, models: dict[str, Any]) -> None:
    start = f"{folder} holds results"
    now = deciding_versions()
    for name, version in now.items():
        if old["versions"].get(name) != version:
            raise UsageError(
                f"{start} of {name} {old['versions'].get(name)}, and this is {version}; {_REMEDY}"
            )
    for name, told in models.items():
        known = old["models"].get(name)
        if known is None:
            for other, of_other in old["models"].items():
                if of_other["fingerprint"] == told["fingerprint"]:
                    raise UsageError(
                        f"{start} of {name} under the name {other}: name it so; or {_REMEDY}"
                    )
            continue
        for entry in ("dtype", "device", "attention"):
            if known[entry] != told[entry]:
                raise UsageError(
                    f"{start} of {name} with {entry} {known[entry]}, and now it is {told[entry]}; "
                    f"{_REMEDY}"
                )
        if known["fingerprint"] != told["fingerprint"]:
            raise UsageError(
                f"{start} of another {name}: its weights, its config, its code or the library "
                f"that computes with its quantized weights have changed; {_REMEDY}"
            )
        for evaluation, data in told["evaluations"].items():
            before = known["evaluations"].get(evaluation, data)
            if before["data"] != data["data"]:
                raise UsageError(
                    f"{start} of {evaluation} on other data, or on more or less of them; {_REMEDY}"
                )
            if before["settings"] != data["settings"]:
                raise UsageError(f"{start} of {evaluation} with other settings; {_REMEDY}")
        for entry, what in (("calibration", "ranges"), ("remedies", "remedies")):
            both = known.get(entry), told.get(entry)
            if None not in both and both[0]["fingerprint"] != both[1]["fingerprint"]:
                raise UsageError(f"{start} of {name} with {what} of another calibration; {_REMEDY}")


def clear(folder: Path, *, everything: bool) -> None:
    """Remove what a killed sweep left behind, or everything that sweeps write.

    Args:
        folder: the folder of the sweep.
        everything: also remove results, items, figures and calibrations.
    """
    for left in folder.glob(f"{REFERENCE}*"):
        shutil.rmtree(left, ignore_errors=True)
    for pattern in _HALF:
        for file in folder.glob(pattern):
            file.unlink()
    if not everything:
        return
    # Without its record the folder holds no sweep, so a reader never finds half of one.
    (folder / RECORD).unlink(missing_ok=True)
    (folder / RESULTS).unlink(missing_ok=True)
    for pattern in _OWNED:
        for file in folder.glob(pattern):
            file.unlink()


@contextmanager
def exclusive(folder: Path) -> Iterator[None]:
    """Lock a folder for one sweep at a time; create it, and remove it again if it stays empty.

    Raises:
        UsageError: another sweep is running there, or the folder cannot be written.
    """
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise _refusal(folder, error) from None
    try:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UsageError(
                f"another sweep is running in {folder}; wait for it or stop it"
            ) from None
        except OSError as error:
            if error.errno not in (errno.ENOLCK, errno.ENOTSUP):
                raise
        yield
    finally:
        os.close(file)
        for path in made:
            try:
                path.rmdir()
            except OSError:
                break


@contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Report in one sentence that a folder cannot be written.

    Raises:
        UsageError: in place of an OSError.
    """
    try:
        yield
    except OSError as error:
        raise _refusal(folder, error) from None


def _refusal(folder: Path, error: OSError) -> UsageError:
    return UsageError(f"{folder} cannot be written: {error.strerror}; choose another --out")
