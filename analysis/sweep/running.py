"""`sweep`: every cell of a grid, each written as it finishes, so that a killed sweep can resume."""

from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch

from quantdiff.analysis.evaluation import Stopped, Text
from quantdiff.analysis.sweep.blocks import computed_otherwise, of_attention
from quantdiff.analysis.sweep.conditions import conditions, elsewhere
from quantdiff.analysis.sweep.distributed import Processes
from quantdiff.analysis.sweep.entries import check_each, entries_of
from quantdiff.analysis.sweep.grid import Cell
from quantdiff.analysis.sweep.loaded import SweepResults
from quantdiff.analysis.sweep.planning import Model, Request, Shelf
from quantdiff.analysis.sweep.progress import Progress
from quantdiff.analysis.sweep.ranges import Tables
from quantdiff.analysis.sweep.record import (
    clear,
    exclusive,
    extended,
    write_record,
    writing,
)
from quantdiff.analysis.sweep.results import ResultsFile
from quantdiff.analysis.sweep.working import Work
from quantdiff.calibration.running import model_device
from quantdiff.calibration.table import CalibrationTable
from quantdiff.errors import UsageError
from quantdiff.quantization import Scheme
from quantdiff.quantization.remedy import remedy

__all__ = ["CALIBRATION_TOKENS", "sweep"]

CALIBRATION_TOKENS = 16384


def sweep(
    models: Iterable[Model],
    schemes: Iterable[Scheme | Iterable[Scheme]],
    evaluations: Iterable[str],
    *,
    out: str | Path,
    text: Text | None = None,
    tables: Sequence[str | Path | CalibrationTable] = (),
    calibration_tokens: int = CALIBRATION_TOKENS,
    remedies: Iterable[str] = ("none",),
    each: str | None = None,
    batch_size: int = 1,
    overwrite: bool = False,
    dtype: str | torch.dtype | None = None,
    device: str | torch.device | None = None,
    attention: str | None = None,
    trust_remote_code: bool = False,
    command: str | None = None,
    note: Callable[[str], None] | None = None,
    progress: Callable[[Progress], None] | None = None,
    stop: Callable[[], bool] | None = None,
) -> SweepResults:
    """Evaluate models under quantization, resuming what an earlier call left unfinished.

    Every model is opened once before the first cell is computed, so that what cannot be done is
    refused at the start; after that, a cell that fails is recorded as failed, and the others go on.
    A folder holds one sweep, which further schemes, models and evaluations may extend. If started
    by torchrun, the processes share the cells.

    Args:
        models: names that `quantdiff.load` accepts, opened one after the other, or models in memory
            as (model, tokenizer, name).
        schemes: single ones, such as those of `make_grid`, or several used together, such as
            `quantdiff.quantization.schemes("W8A8")`; an empty group, or a scheme of 16 bits, stands
            for the unquantized model.
        evaluations: such as `perplexity`; see `quantdiff.analysis.evaluation.EVALUATIONS`.
        out: folder for the results.
        text: for the evaluations that run on text.
        tables: calibrations for static ranges, or their folders, each for one of the models. A
            model without one is calibrated on the shipped training text.
        calibration_tokens: tokens of that text, which remedies see too.
        remedies: such as `none`, `smooth:0.5`, `rotate+gptq`; see `quantization.remedy.remedy`.
            Every scheme runs with each compatible remedy.
        each: `layer` or `head`, to try every scheme on one of a model's layers, or on one head of a
            layer, at a time; see `quantdiff.analysis.sensitivity.Sensitivity.of`.
        batch_size: sequences per forward pass; changes results only by rounding: without
            quantization, in fp32, by 1e-5 at most, while a quantized value may move across a
            rounding boundary.
        overwrite: start over if `out` holds results.
        dtype, device, attention, trust_remote_code: as in `quantdiff.load`, for named models.
        command: the command line, for the record.
        note: called with what a user should know, one sentence at a time.
        progress: called with the state of the sweep after each forward pass.
        stop: called after each forward pass; True ends the sweep.

    Returns:
        All results in `out`.

    Raises:
        UsageError: nothing is requested, something requested is unknown or incompatible, or `out`
            holds results of other models, data or versions.
        Stopped: `stop` returned True; what is finished is in `out`.
    """
    processes = Processes()
    said: set[str] = set()

    def tell(sentence: str) -> None:
        if note is not None and sentence not in said:
            said.add(sentence)
            note(sentence)

    entries, left_out = entries_of(schemes, [remedy(name) for name in dict.fromkeys(remedies)])
    request = Request(
        models=tuple(models),
        entries=entries,
        evaluations=tuple(dict.fromkeys(evaluations)),
        out=Path(out),
        text=text or Text(),
        calibration_tokens=calibration_tokens,
        batch_size=batch_size,
        loading={
            "dtype": dtype,
            "device": processes.device if device in (None, "cuda") and processes.device else device,
            "attention": attention,
            "trust_remote_code": trust_remote_code,
        },
        each=each,
        note=tell,
        stop=stop or (lambda: False),
    )
    _check(request, tables, left_out)
    if processes.first:
        for sentence in left_out:
            tell(sentence)
    alone = exclusive(request.out) if processes.first else nullcontext()
    with processes.together(), alone:
        shelf = Shelf(request, Tables(tables, request.names))
        plan, about, devices = _planned(request, shelf)
        if processes.first:
            with writing(request.out):
                _begin(request, about, plan, devices, overwrite=overwrite, command=command)
        processes.meet("recorded", request.stop)
        work = Work(request, shelf, plan, processes, progress or (lambda _: None))
        # Before any process appends; otherwise not all would see the same cells finished.
        processes.meet("read", request.stop)
        work.do()
        processes.meet("done", request.stop)
        return SweepResults.load(request.out)


def _check(request: Request, tables: Sequence[Any], left_out: Sequence[str]) -> None:
    """Refuse what can be refused before a model is opened."""
    if not request.models:
        raise UsageError("there is no model to sweep: name at least one")
    if not request.entries:
        why = f" ({left_out[0]})" if left_out else ""
        raise UsageError(f"the grid is empty: there is no scheme in it{why}")
    if not request.evaluations:
        raise UsageError("there is nothing to measure: name at least one evaluation")
    if request.batch_size < 1:
        raise UsageError(f"a batch of {request.batch_size} sequences is none: use at least 1")
    for name in request.names:
        if request.names.count(name) > 1:
            raise UsageError(f"{name} is named twice: give each model once, under its own name")
    if request.each is not None:
        check_each(request.entries, request.each)
    noise = [name for name in request.evaluations if name.partition(":")[0] == "noise"]
    if noise and any(entry.remedy.rotates for entry in request.entries):
        raise UsageError(
            f"{noise[0]} compares hidden states with the plain model's, and a rotation turns them: "
            "leave one of the two out"
        )
    if tables and not any(one.static for entry in request.entries for one in entry.schemes):
        raise UsageError(
            "a calibration table is for static ranges, and all ranges asked for are dynamic"
        )


def _planned(
    request: Request, shelf: Shelf
) -> tuple[list[dict[str, list[Cell]]], dict[str, Any], set[torch.device]]:
    """Open every model.

    Returns:
        The cells of each by evaluation, in order; what is recorded about each, by name; the devices
        of all.
    """
    plan: list[dict[str, list[Cell]]] = []
    about: dict[str, Any] = {}
    devices = set()
    # From last to first: the first is needed next and is then in memory.
    for number, name in reversed(list(enumerate(request.names))):
        plan.insert(0, shelf.open(number).cells)
        about[name] = shelf.open(number).about(request.text)
        devices.add(model_device(shelf.open(number).model))
        for other, told in about.items():
            if other != name and told["fingerprint"] == about[name]["fingerprint"]:
                raise UsageError(f"{name} and {other} are the same model: name it once")
        if request.stop():
            raise Stopped
    shelf.tables.check_used()
    return plan, {name: about[name] for name in request.names}, devices


def _begin(
    request: Request,
    about: dict[str, Any],
    plan: list[dict[str, list[Cell]]],
    devices: set[torch.device],
    *,
    overwrite: bool,
    command: str | None,
) -> None:
    """Set the folder up for this sweep, or refuse to; note what its numbers do not show."""
    out, notes = request.out, _of_blocks(request, about)
    ids = [cell.id for of_model in plan for of_one in of_model.values() for cell in of_one]
    if overwrite:
        clear(out, everything=True)
    record = extended(out, about, ids, command=command)
    if not ResultsFile(out).finished() >= set(ids):
        now = conditions(devices, request.batch_size)
        notes.append(elsewhere(record["requests"], now))
        told = {"command": command, **now}
        if told not in record["requests"]:
            record["requests"].append(told)
    clear(out, everything=False)
    write_record(out, record)
    ResultsFile(out).mend()
    for sentence in filter(None, notes):
        request.note(sentence)


def _of_blocks(request: Request, about: dict[str, Any]) -> list[str | None]:
    """Notes on the attention of each model that is compared with its unquantized self."""
    sites = {scheme.site for entry in request.entries for scheme in entry.schemes}
    if "divergence" not in request.evaluations or not of_attention(sites):
        return []
    found = {name: computed_otherwise([told["dtype"]]) for name, told in about.items()}
    return [told and f"{name}: {told}" for name, told in found.items()]
