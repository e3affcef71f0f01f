"""Where a model's static ranges come from: a table that was given, or a calibration of our own."""

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
        fingerprint: of all that they depend on beside the model. Of a calibration of our own it is
            that of its text, so that cells are known before anything is computed.
        data: what the calibration sees, as in `CalibrationTable.data`.
        table: gives the table, which is computed then if it was not yet; may raise what
            `quantdiff.calibrate` does, and `Stopped`.
    """

    fingerprint: str
    data: dict[str, Any]
    table: Callable[[], CalibrationTable]


class Tables:
    """The tables that a user gave, each for one of the models."""

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
        """The table of a model, with ranges of some sites; None if it has none.

        By name, since models of one architecture cannot be told apart otherwise; a table under
        another name, such as that of a folder that was moved, is taken if it alone fits.

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
        """Refuse tables that were of no use.

        Raises:
            UsageError: names the first.
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
        model, tokenizer: live.
        sites: whose ranges are wanted.
        tokens: of text.
        seq_len: tokens a window; None for 2,048 or the model's context, whichever is less.
        folder: of this model's calibration alone; made when it is needed.
        batch_size: windows in one forward pass; moves ranges by the rounding of fp32 sums alone.
        note: told what a user should know of the table.
        stop: asked after each pass.

    Raises:
        UsageError: windows that the model or the text is too short for.
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
        UsageError: windows that the model or the text is too short for.
    """
    seq_len = seq_len or min(2048, context_length(model) or 2048)
    return text_windows(_TEXT, tokenizer, tokens=tokens, seq_len=seq_len)


def data_of(windows: TextWindows) -> dict[str, Any]:
    """What is recorded of the text of a calibration, as in `CalibrationTable.data`."""
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
    """Refuse to evaluate on what ranges, or remedies, were calibrated on.

    A text is known again by its name, and under another name by its first windows, for a
    calibration takes the beginning of its text, and so does an evaluation.

    Args:
        evaluation: made for the model.
        text: of the evaluations that run on text.
        tokenizer: of the model.
        data: of the calibration, as in `Ranges.data`.
        what: was calibrated.

    Raises:
        UsageError: names both.
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
    except UsageError:  # questions and tasks are no text
        return False
    return windows.fingerprint == part.get("fingerprint")


def _place(source: str) -> str:
    """A source without what names the same text in two ways."""
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
    """Let one process after the other into a folder."""
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
