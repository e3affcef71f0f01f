"""Where a model's static ranges come from: a given table, or the sweep's own calibration."""

import fcntl
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from quantdiff.analysis.evaluation import Evaluation, Stopped, Text
from quantdiff.analysis.evaluation.reading import split_limit
from quantdiff.analysis.sweep.identity import table_fingerprint
from quantdiff.analysis.sweep.once import once
from quantdiff.analysis.text import slug
from quantdiff.calibration.calibrating import calibrate
from quantdiff.calibration.sources import CORPUS
from quantdiff.calibration.table import SITE, CalibrationTable
from quantdiff.calibration.text import TextWindows, text_windows
from quantdiff.errors import QuantizationError, RecordingError, UsageError
from quantdiff.models import context_length, describe
from quantdiff.quantization import Scheme, fake_quantize

__all__ = [
    "FOLDER",
    "Ranges",
    "Tables",
    "calibrated",
    "check_text",
    "data_of",
    "folder_of",
    "source_of",
    "training_windows",
]

FOLDER = "calibration"

_TEXT = "corpus:train"

Note = Callable[[str], None]


@dataclass
class Ranges:
    """Static ranges of one model.

    Attributes:
        fingerprint: that of everything they depend on besides the model. For the sweep's own
            calibration it is that of its text, so that cells are known before anything is computed.
        data: what the calibration sees, as in `CalibrationTable.data`.
        table: returns the table, computing it if this has not been done; may raise what
            `quantdiff.calibrate` does, and `Stopped`.
    """

    fingerprint: str
    data: dict[str, Any]
    table: Callable[[], CalibrationTable]


class Tables:
    """The tables given by a user, each for one of the models."""

    def __init__(self, tables: Sequence[str | Path | CalibrationTable], names: Collection[str]):
        self._tables = [
            (f"the table of {table.model.get('name')}", table)
            if isinstance(table, CalibrationTable)
            else (str(table), CalibrationTable.load(table))
            for table in tables
        ]
        self._names, self._used = names, set[int]()

    def __len__(self) -> int:
        return len(self._tables)

    def find(self, name: str, model: nn.Module, sites: Iterable[str], note: Note) -> Ranges | None:
        """Find the table of a model, with ranges of some sites; None if it has none.

        Tables are found by name, since models of one architecture cannot be distinguished
        otherwise; a table under another name, such as that of a folder that was moved, is used if
        it is the only one that fits.

        Raises:
            UsageError: several tables fit, or the one that does lacks a site.
            QuantizationError, RecordingError: the model cannot be quantized.
        """
        fitting = [number for number, (_, table) in enumerate(self._tables) if _fits(table, model)]
        known = name, describe(model)["name"]
        named = [n for n in fitting if self._tables[n][1].model.get("name") in known]
        others = [n for n in fitting if self._tables[n][1].model.get("name") not in self._names]
        chosen = named or others
        if not chosen:
            return None
        if len(chosen) > 1:
            told = " and ".join(self._tables[number][0] for number in chosen)
            raise UsageError(f"{told} both fit {name}: give one table for a model")
        place, table = self._tables[chosen[0]]
        if not named:
            note(f"{place} was calibrated on {table.model.get('name')} and is used for {name}")
        for site in sites:
            table.check_site(site)
        self._used.add(chosen[0])
        return Ranges(table_fingerprint(table), table.data, lambda: table)

    def check_used(self) -> None:
        """Refuse tables that were not used.

        Raises:
            UsageError: there are any; names the first.
        """
        for number, (place, table) in enumerate(self._tables):
            if number not in self._used:
                raise UsageError(
                    f"{place} fits none of the models: it was calibrated on "
                    f"{table.model.get('name')}"
                )


def calibrated(
    name: str,
    model: nn.Module,
    tokenizer: Any,
    *,
    sites: Sequence[str],
    tokens: int,
    seq_len: int | None,
    folder: Path,
    batch_size: int,
    note: Note,
    stop: Callable[[], bool],
) -> Ranges:
    """Ranges from a calibration on the shipped training text, kept for the next run.

    Args:
        name: of the model.
        model, tokenizer: in memory.
        sites: those to find ranges for.
        tokens: tokens of text.
        seq_len: tokens per window; None for 2,048 or the model's context, whichever is less.
        folder: for this model's calibration alone; created when needed.
        batch_size: windows per forward pass; changes ranges only by the rounding of fp32 sums.
        note: called with what a user should know about the table.
        stop: called after each pass; True ends the calibration.

    Raises:
        UsageError: the model's context or the text is too short for the windows.
    """
    windows = training_windows(model, tokenizer, tokens, seq_len)
    more = [site for site in sites if site != SITE]

    def make() -> CalibrationTable:
        with _alone(folder):
            table = _kept(folder, windows, more)
            if table is None:
                table = calibrate(model, windows, batch_size=batch_size, sites=more, stop=stop)
                if table.partial:
                    raise Stopped
                table.save(folder)
                warning = table.warning()
                if warning is not None:
                    note(f"{name}: {warning}")
        return table

    return Ranges(windows.fingerprint, data_of(windows), once(make))


def training_windows(
    model: nn.Module, tokenizer: Any, tokens: int, seq_len: int | None
) -> TextWindows:
    """Windows of the shipped training text; of 2,048 tokens or the model's context by default.

    Raises:
        UsageError: the model's context or the text is too short for the windows.
    """
    seq_len = seq_len or min(2048, context_length(model) or 2048)
    return text_windows(_TEXT, tokenizer, tokens=tokens, seq_len=seq_len)


def data_of(windows: TextWindows) -> dict[str, Any]:
    """What is recorded about the text of a calibration, as in `CalibrationTable.data`."""
    return {
        "source": windows.source,
        "tokens": windows.tokens,
        "sequence_length": windows.seq_len,
        "fingerprint": windows.fingerprint,
    }


def folder_of(out: Path, name: str, fingerprint: str) -> Path:
    """Where a sweep keeps a model's calibration."""
    return out / FOLDER / f"{slug(name)}-{fingerprint[:8]}"


def check_text(
    evaluation: Evaluation, text: Text, tokenizer: Any, data: dict[str, Any], what: str
) -> None:
    """Refuse to evaluate on the text that ranges, or remedies, were calibrated on.

    A text is recognized by its name, and under another name by its first windows, as calibrations
    and evaluations both take the beginning of their text.

    Args:
        evaluation: built for the model.
        text: the text of the evaluations that run on text.
        tokenizer: that of the model.
        data: that of the calibration, as in `Ranges.data`.
        what: what was calibrated, such as `the static ranges`.

    Raises:
        UsageError: the text is the same; names the evaluation and what was calibrated.
    """
    source = source_of(evaluation, text)
    for part in data.get("parts", [data]):
        same = _place(str(part.get("source", ""))) == _place(source)
        if same or _begins_with(source, tokenizer, part):
            raise UsageError(
                f"{evaluation.name} would run on the text that {what} were calibrated on "
                f"({source}): evaluate on another --data"
            )


def source_of(evaluation: Evaluation, text: Text) -> str:
    """What an evaluation reads: the text of its needles, its own file or task, or `text`."""
    if "haystack" in evaluation.settings:
        return str(evaluation.settings["haystack"])
    return split_limit(evaluation.name.partition(":")[2])[0] or text.source


def _begins_with(source: str, tokenizer: Any, part: dict[str, Any]) -> bool:
    """Whether a text, cut as a calibration cut its own, gives the same windows."""
    try:
        windows = text_windows(
            source, tokenizer, tokens=part["tokens"], seq_len=part["sequence_length"]
        )
    except UsageError:  # questions and tasks are not text
        return False
    return windows.fingerprint == part.get("fingerprint")


def _place(source: str) -> str:
    """A source in a form in which the same text has the same name."""
    if source in CORPUS:
        return source
    if source.startswith("hub:"):
        return ":".join(source.split(":")[:3])  # whatever the column
    return str(Path(source).resolve())


def _kept(folder: Path, windows: TextWindows, sites: Iterable[str]) -> CalibrationTable | None:
    try:
        table = CalibrationTable.load(folder)
        for site in sites:
            table.check_site(site)
    except UsageError:  # none yet, a kill left half of one, or it was made for other sites
        return None
    return table if table.data.get("fingerprint") == windows.fingerprint else None


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Lock a folder for one process at a time."""
    folder.mkdir(parents=True, exist_ok=True)
    file = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
    finally:
        os.close(file)


def _fits(table: CalibrationTable, model: nn.Module) -> bool:
    told = describe(model)
    if any(table.model.get(entry) != told[entry] for entry in ("family", "parameters")):
        return False
    try:
        fake_quantize(model, Scheme(SITE, 8, "absmax"), table=table)
    except (QuantizationError, RecordingError):
        raise
    except UsageError:
        return False
    return True
