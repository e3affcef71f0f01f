"""`quantdiff sweep`: what low bit widths cost, for a grid of models, schemes and evaluations."""

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from quantdiff.cli import common

if TYPE_CHECKING:
    from quantdiff.analysis.sweep import Progress, SweepResults
    from quantdiff.quantization import Scheme

EPILOG = """
Examples:

  quantdiff sweep smollm2-135m --bits 16,8,6,4 --eval perplexity --out runs/sweep

  quantdiff sweep smollm2-135m --bits 16,8,6,5,4,3
  --range dynamic,absmax,percentile:99.9,mse,entropy --granularity tensor,head,row
  --eval perplexity --eval divergence --tokens 16384 --seq-len 1024 --out runs/ranges

  quantdiff sweep runs/plain runs/diff --bits 16,8,6,4 --eval choice:questions.jsonl
  --eval lm-eval:hellaswag --published --out runs/figure-8

  quantdiff sweep smollm2-135m --scheme W8A8,W4g64A16,KV8,KV4,W8A8+KV8+L6 --eval divergence
  --out runs/deployed

  torchrun --nproc-per-node 8 -m quantdiff sweep my/model --eval perplexity --out runs/many
"""


@common.app.command(epilog=EPILOG)
def sweep(
    models: Annotated[
        list[str],
        typer.Argument(
            metavar="MODEL…",
            help="smollm2-135m, hub ids, folders, or .gguf files; each is opened by itself.",
            show_default=False,
        ),
    ],
    out: Annotated[
        Path,
        typer.Option(
            "--out",
            help="Folder for results.jsonl, items and figures. A sweep that was stopped there goes "
            "on; one that was finished may be extended.",
        ),
    ],
    evaluations: Annotated[
        list[str],
        typer.Option(
            "--eval",
            help="perplexity, divergence, choice:FILE.jsonl, lm-eval:TASK, needles or "
            "order:FILE.jsonl; may repeat.",
            show_default=False,
        ),
    ],
    bits: Annotated[
        list[str],
        typer.Option(
            "--bits",
            help="2 to 8; 16 is the model as it is. Lists have commas. Default: 16,8,6,4, or 16 "
            "with --scheme.",
            show_default=False,
        ),
    ] = [],  # noqa: B006  (typer copies it)
    together: Annotated[
        list[str],
        typer.Option(
            "--scheme",
            help="Sites together, by a short name: W8A8, W4g64A16+KV4, W8A8+L6. W weights, A "
            "linear inputs, KV keys and values, L logits, P maps, H hidden states.",
            show_default=False,
        ),
    ] = [],  # noqa: B006
    sites: Annotated[
        list[str],
        typer.Option(
            "--site",
            help="What is quantized, one at a time: attention_logits, attention_maps, keys, "
            "values, linear_inputs, hidden_states or weights.",
        ),
    ] = ["attention_logits"],  # noqa: B006
    ranges: Annotated[
        list[str],
        typer.Option(
            "--range",
            help="dynamic, or static for attention_logits: absmax, percentile[:P], mse, entropy.",
        ),
    ] = ["dynamic"],  # noqa: B006
    granularities: Annotated[
        list[str],
        typer.Option(
            "--granularity",
            help="tensor, head or row of logits and maps; token, channel or group:N elsewhere. "
            "Default: the site's own, tensor of logits.",
            show_default=False,
        ),
    ] = [],  # noqa: B006
    asymmetric: Annotated[
        bool, typer.Option("--asymmetric", help="Asymmetric grids too, beside the symmetric ones.")
    ] = False,
    data: common.Data = "corpus",
    tokens: Annotated[
        int, typer.Option("--tokens", help="Tokens of text for perplexity and divergence.")
    ] = 16384,
    seq_len: Annotated[
        int | None,
        typer.Option("--seq-len", help="Tokens a window. Default: 2048, or the model's context."),
    ] = None,
    tables: Annotated[
        list[Path],
        typer.Option(
            "--table",
            help="A folder that quantdiff calibrate wrote, for static ranges; may repeat, one a "
            "model. Default: calibrate on corpus:train.",
            show_default=False,
        ),
    ] = [],  # noqa: B006
    calibration_tokens: Annotated[
        int,
        typer.Option("--calibration-tokens", help="Tokens to calibrate on without --table."),
    ] = 16384,
    batch_size: Annotated[
        int, typer.Option("--batch-size", min=1, help="Sequences in a pass; changes no result.")
    ] = 1,
    overwrite: common.Overwrite = False,
    published: Annotated[
        bool,
        typer.Option("--published", help="Draw the paper's Figure 8 beside measured accuracies."),
    ] = False,
    attention: common.Attention = None,
    dtype: common.Dtype = None,
    device: common.Device = None,
    trust_remote_code: common.TrustRemoteCode = False,
    as_json: common.Json = False,
) -> None:
    """Evaluate models at low bit widths: a grid of cells that goes on where it was stopped."""
    from quantdiff.analysis.evaluation import Stopped, Text
    from quantdiff.analysis.sweep import SweepResults, make_grid
    from quantdiff.analysis.sweep import sweep as run
    from quantdiff.analysis.sweep.distributed import is_first
    from quantdiff.quantization import schemes

    named = [schemes(name) for name in _listed(together)]
    widths = _listed(bits or ["16" if named else "16,8,6,4"])
    grid = make_grid(
        bits=_whole_numbers(widths), ranges=_listed(ranges),
        granularities=_listed(granularities) or [""], sites=_listed(sites),
        symmetric=(True, False) if asymmetric else (True,),
    )  # fmt: skip
    first = is_first()
    quiet = as_json or not first
    if quiet:
        common.silence_libraries()
    if first:
        for sentence in grid.notes:
            _note(sentence)
        for name, together_ in zip(_listed(together), named, strict=True):
            _note(f"{name}: {'; '.join(map(_in_words, together_)) or 'not quantized'}")
    stopped = False
    with (
        common.warnings_as_notes(),
        common.interruptible() as stop,
        _cell_progress(quiet=quiet) as progress,
    ):
        try:
            results = run(
                models, [*grid.schemes, *named], evaluations, out=out,
                text=Text(data, tokens, seq_len), tables=tables,
                calibration_tokens=calibration_tokens, batch_size=batch_size, overwrite=overwrite,
                dtype=dtype, device=device, attention=attention,
                trust_remote_code=trust_remote_code, command=common.command_line(),
                note=_note, progress=progress, stop=stop,
            )  # fmt: skip
        except Stopped:
            stopped = True
    if not first:
        raise typer.Exit(130 if stopped else 0)
    if stopped:
        if not (out / "sweep.json").exists():  # stopped before the first cell
            raise typer.Exit(130)
        results = SweepResults.load(out)
    _show(results, published=published, as_json=as_json)
    if stopped:
        raise typer.Exit(130)
    asked = set(results.record["asked"])
    if any(row["cell"] in asked for row in results.failed):
        raise typer.Exit(1)


def _listed(values: list[str]) -> list[str]:
    """The entries of an option that takes lists with commas and may repeat, each once."""
    entries = [entry.strip() for value in values for entry in value.split(",")]
    return list(dict.fromkeys(entry for entry in entries if entry))


def _whole_numbers(entries: list[str]) -> list[int]:
    from quantdiff.errors import UsageError

    for entry in entries:
        if not entry.isdecimal():
            raise UsageError(f"--bits takes whole numbers, such as 16,8,6,4, and not {entry!r}")
    return [int(entry) for entry in entries]


def _in_words(scheme: "Scheme") -> str:
    """What stands behind a part of a short name."""
    grid = "symmetric" if scheme.symmetric else "asymmetric"
    return f"{scheme.site} {scheme.bits} bits, {scheme.range}, {scheme.granularity}, {grid}"


def _note(sentence: str) -> None:
    sys.stderr.write(f"note: {sentence}\n")


def _show(results: "SweepResults", *, published: bool, as_json: bool) -> None:
    """Write the figures, and print the tables or JSON."""
    from rich.console import Console

    from quantdiff.analysis.sweep import save_sweep_figures, sweep_report
    from quantdiff.analysis.sweep.figure import has_accuracy

    if published and not has_accuracy(results):
        _note("no accuracy was measured that the published Figure 8 could be drawn beside")
    save_sweep_figures(results, results.folder / "figures", published=published)
    if as_json:
        content = {
            "folder": str(results.folder),
            "models": results.record["models"],
            "cells": len(results.record["cells"]),
            "missing": results.missing,
            "results": results.rows,
        }
        print(json.dumps(content, ensure_ascii=False, allow_nan=False))
        return
    console = Console()
    for part in sweep_report(results):
        console.print(part)
    console.print(f"written to {results.folder}", markup=False, highlight=False, soft_wrap=True)


@contextmanager
def _cell_progress(*, quiet: bool) -> Iterator[Callable[["Progress"], None]]:
    """A bar over cells with the time left, on stderr; in a log, a line a finished cell.

    Yields:
        A function to be told where the sweep stands.
    """
    from rich.console import Console
    from rich.progress import BarColumn, ProgressColumn, Task, TextColumn
    from rich.progress import Progress as Bar
    from rich.text import Text

    class Left(ProgressColumn):
        """Time left, as the sweep reckons it: cells of different kinds take different times."""

        def render(self, task: Task) -> Text:
            return Text(task.fields["left"], style="progress.remaining")

    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}", markup=False), BarColumn(bar_width=20),
        TextColumn("{task.fields[cells]}"), Left(),
    )  # fmt: skip
    on_screen = console.is_terminal and not quiet
    told = -1
    with Bar(*columns, console=console, disable=not on_screen) as bar:
        task = bar.add_task("opening the models", total=None, cells="", left="")

        def tell(now: "Progress") -> None:
            nonlocal told
            cells, left = f"{int(now.done):,} of {now.total:,} cells", _duration(now.left)
            bar.update(
                task, total=now.total, completed=now.done, description=now.doing, cells=cells,
                left=left,
            )  # fmt: skip
            if not quiet and not on_screen and int(now.done) > told:
                told = int(now.done)
                console.print(f"{cells}, {left}: {now.doing}", markup=False, soft_wrap=True)

        yield tell


def _duration(seconds: float | None) -> str:
    if seconds is None:
        return "time left unknown"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02} left"
