"""What a sweep has to do: every model is opened once, before the first cell is computed."""

import gc
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import nn

from quantdiff.analysis.evaluation import Evaluation, Text, evaluation
from quantdiff.analysis.sweep.entries import Entry, each_one
from quantdiff.analysis.sweep.grid import Cell
from quantdiff.analysis.sweep.identity import cell_id, model_fingerprint
from quantdiff.analysis.sweep.own_code import quantizer_versions
from quantdiff.analysis.sweep.ranges import (
    Ranges,
    Tables,
    calibrated,
    check_text,
    data_of,
    folder_of,
    source_of,
    training_windows,
)
from quantdiff.calibration.running import model_device
from quantdiff.calibration.text import TextWindows
from quantdiff.models import describe, load
from quantdiff.quantization.remedy import NONE

__all__ = ["Model", "Opened", "Request", "Shelf"]

# A name that `quantdiff.load` accepts, or a model in memory: itself, its tokenizer, a name.
Model: TypeAlias = str | Path | tuple[nn.Module, Any, str]


@dataclass(frozen=True)
class Request:
    """What is requested of a sweep; see the arguments of `sweep`."""

    models: tuple[Model, ...]
    entries: tuple[Entry, ...]
    evaluations: tuple[str, ...]
    out: Path
    text: Text
    calibration_tokens: int
    batch_size: int
    loading: dict[str, Any]
    each: str | None
    note: Callable[[str], None]
    stop: Callable[[], bool]

    @property
    def names(self) -> list[str]:
        """The models' names."""
        return [str(model[2] if isinstance(model, tuple) else model) for model in self.models]


@dataclass
class Opened:
    """A model in memory, with everything its cells need.

    Attributes:
        name: name of the model.
        model: the model itself.
        fingerprint: that of the model and its tokenizer.
        evaluations: those built for the model, by name.
        ranges: its static ranges; None if no scheme needs them.
        windows: the text that remedies see; None if none reads text.
        cells: those of the model, by evaluation.
    """

    name: str
    model: nn.Module
    fingerprint: str
    evaluations: dict[str, Evaluation]
    ranges: Ranges | None
    windows: TextWindows | None
    cells: dict[str, list[Cell]]

    def about(self, text: Text) -> dict[str, Any]:
        """What `sweep.json` records about the model."""
        told = describe(self.model)
        attention = getattr(getattr(self.model, "config", None), "_attn_implementation", None)
        quantizers = quantizer_versions(self.model)
        return {
            "fingerprint": self.fingerprint,
            "family": told["family"],
            "parameters": told["parameters"],
            "dtype": told["dtype"],
            "device": model_device(self.model).type,
            "attention": attention,
            "evaluations": {
                name: {
                    "source": source_of(made, text),
                    "data": made.data,
                    # As it will be read back: JSON has no tuples.
                    "settings": json.loads(json.dumps(made.settings)),
                }
                for name, made in self.evaluations.items()
            },
            "calibration": self.ranges
            and {"fingerprint": self.ranges.fingerprint, "data": self.ranges.data},
            "remedies": self.windows
            and {"fingerprint": self.windows.fingerprint, "data": data_of(self.windows)},
        } | ({"quantizers": quantizers} if quantizers else {})


class Shelf:
    """The models of a sweep, one in memory at a time (besides those given in memory).

    Attributes:
        tables: the calibration tables that the user gave.
    """

    def __init__(self, request: Request, tables: Tables) -> None:
        self._request, self.tables = request, tables
        self._at: int | None = None
        self._opened: Opened | None = None

    def open(self, number: int) -> Opened:
        """Open a model with its evaluations and cells, releasing the previous one.

        Raises:
            UsageError: it cannot be opened, or does not fit the evaluations or the ranges.
        """
        if self._at != number:
            self._release()
            self._opened, self._at = self._open(number), number
        assert self._opened is not None
        return self._opened

    def _release(self) -> None:
        """Free the model that is held, before the next takes its memory."""
        held, self._opened, self._at = self._opened is not None, None, None
        if held:
            gc.collect()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()

    def _open(self, number: int) -> Opened:
        request = self._request
        source, name = request.models[number], request.names[number]
        if isinstance(source, tuple):
            model, tokenizer, _ = source
        else:
            model, tokenizer = load(source, **request.loading)
        fingerprint = model_fingerprint(model, tokenizer)
        evaluations = {
            wanted: evaluation(wanted, model, tokenizer, request.text)
            for wanted in request.evaluations
        }
        ranges = None
        sites = {s.site: None for entry in request.entries for s in entry.schemes if s.static}
        if sites:
            ranges = self.tables.find(name, model, sites, request.note) or calibrated(
                name, model, tokenizer, sites=list(sites), tokens=request.calibration_tokens,
                seq_len=request.text.seq_len, folder=folder_of(request.out, name, fingerprint),
                batch_size=request.batch_size, note=request.note, stop=request.stop,
            )  # fmt: skip
            for made in evaluations.values():
                check_text(made, request.text, tokenizer, ranges.data, "the static ranges")
        windows = None
        if any(entry.remedy.reads for entry in request.entries):
            windows = training_windows(
                model, tokenizer, request.calibration_tokens, request.text.seq_len
            )
            for made in evaluations.values():
                check_text(made, request.text, tokenizer, data_of(windows), "the remedies")
        entries = request.entries
        if request.each is not None:
            entries = each_one(entries, model, request.each)
        device = model_device(model).type
        cells: dict[str, list[Cell]] = {}
        seen: set[str] = set()
        for wanted, made in evaluations.items():
            own = [
                _cell(name, fingerprint, device, wanted, made, entry, ranges, windows)
                for entry in entries
            ]
            # A file may be named in two ways but is evaluated once.
            cells[wanted] = [cell for cell in own if cell.id not in seen]
            seen |= {cell.id for cell in own}
        return Opened(name, model, fingerprint, evaluations, ranges, windows, cells)


def _cell(
    name: str,
    fingerprint: str,
    device: str,
    wanted: str,
    made: Evaluation,
    entry: Entry,
    ranges: Ranges | None,
    windows: TextWindows | None,
) -> Cell:
    schemes, remedy = entry
    static = any(scheme.static for scheme in schemes)
    calibration = ranges.fingerprint if static and ranges is not None else None
    seen = windows.fingerprint if remedy.reads and windows is not None else None
    identity = cell_id(
        model=fingerprint, device=device, evaluation=wanted, data=made.data,
        settings=made.settings, schemes=schemes, calibration=calibration,
        remedy=None if remedy == NONE else (remedy.name, seen),
    )  # fmt: skip
    return Cell(identity, name, wanted, schemes, made.data, calibration, remedy)
