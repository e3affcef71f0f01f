"""`quantdiff calibrate`: ranges for static quantization, from one pass over text."""

import json
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from quantdiff.cli import common

if TYPE_CHECKING:
    from rich.table import Table

    from quantdiff.calibration import CalibrationTable

EPILOG = """
Examples:

  quantdiff calibrate smollm2-135m --tokens 16384 --seq-len 1024 --out runs/calibration

  quantdiff calibrate ./my-model --data train.jsonl --tokens 100000 --batch-size 4 --out runs/mine

  quantdiff calibrate ./my-model --data notes.txt --json

  quantdiff calibrate smollm2-135m --sites linear_inputs,keys,values --out runs/sites
"""

OWNED = ("calibration.safetensors",)


@common.app.command(epilog=EPILOG)
def calibrate(
    model: common.Model,
    data: common.Data = "corpus:train",
    tokens: Annotated[
        int, typer.Option("--tokens", help="Tokens of text to calibrate on.")
    ] = 16384,
    seq_len: Annotated[
        int | None,
        typer.Option("--seq-len", help="Tokens per window. Default: 2048, or the model's context."),
    ] = None,
    batch_size: Annotated[
        int, typer.Option("--batch-size", min=1, help="Windows in one pass; changes no range.")
    ] = 1,
    out: Annotated[
        Path | None,
        typer.Option("--out", help="Folder for calibration.json and calibration.safetensors."),
    ] = None,
    overwrite: common.Overwrite = False,
    layout: Annotated[
        str | None,
        typer.Option(
            "--layout",
            help="Head layout of a model that quantdiff does not know: none, halves, "
            "adjacent, adjacent_shared or grouped:R.",
        ),
    ] = None,
    sites: Annotated[
        list[str],
        typer.Option(
            "--sites",
            help="Whose ranges to keep beside those of the logits: linear_inputs, keys, values, "
            "hidden_states, or all. Lists have commas.",
            show_default=False,
        ),
    ] = [],  # noqa: B006  (typer copies it)
    attention: common.Attention = None,
    dtype: common.Dtype = None,
    device: common.Device = None,
    trust_remote_code: common.TrustRemoteCode = False,
    as_json: common.Json = False,
) -> None:
    """Calibrate a model: record its activations once, for every observer and bit width."""
    from quantdiff.analysis.profiling import check_length
    from quantdiff.calibration import calibrate as run
    from quantdiff.calibration import text_windows
    from quantdiff.calibration.saved import to_json
    from quantdiff.files import staged_folder
    from quantdiff.models import context_length, load

    asked = common.sites_of(sites)
    if as_json:
        common.silence_libraries()
    with ExitStack() as stack:
        # The folder first: an output that cannot be written must not waste a calibration.
        stage = None
        if out is not None:
            stage = stack.enter_context(
                staged_folder(out, marker="calibration.json", owned=OWNED, overwrite=overwrite)
            )
        loaded, tokenizer = load(
            model, dtype=dtype, device=device, attention=attention,
            trust_remote_code=trust_remote_code,
        )  # fmt: skip
        if seq_len is None:
            seq_len = min(2048, context_length(loaded) or 2048)
        check_length(loaded, seq_len)
        windows = text_windows(data, tokenizer, tokens=tokens, seq_len=seq_len)
        if windows.tokens < tokens - 1:  # a last window of one token is dropped
            sys.stderr.write(
                f"note: {data} holds {windows.tokens:,} tokens, not the {tokens:,} asked for\n"
            )
        with (
            common.interruptible() as stop,
            common.token_progress("calibrating", windows.tokens, quiet=as_json) as progress,
        ):
            table = run(
                loaded, windows, batch_size=batch_size, layout=layout, sites=asked,
                progress=progress, stop=stop,
            )  # fmt: skip
        table.command = common.command_line()
        if stage is not None:
            table.save(stage)
    if as_json:
        print(json.dumps(to_json(table), ensure_ascii=False, allow_nan=False))
    else:
        _print(table, out)
    warning = table.warning()
    if warning is not None:
        sys.stderr.write(f"warning: {warning}\n")
    if table.partial:
        raise typer.Exit(130)


def _print(table: "CalibrationTable", out: Path | None) -> None:
    from rich.console import Console
    from rich.text import Text

    from quantdiff.analysis.text import literal

    console = Console()
    data = table.data
    head = Text(literal(table.model.get("name")), style="bold")
    head.append(
        f"\n{literal(data['source'])}: {data['tokens']:,} tokens in {data['sequences']:,} "
        f"sequence{'s' * (data['sequences'] != 1)} of up to {data['sequence_length']:,}"
        f"{'; partial' if table.partial else ''}",
        style="not bold",
    )
    console.print(head)
    console.print(_ranges(table))
    for kind, part in table.more.items():
        held = f"ranges of the {kind.replace('_', ' ')} of {len(part.sites)} modules are kept too"
        console.print(held, highlight=False, soft_wrap=True)
    for line in _movement(table):
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    if out is not None:
        console.print(f"written to {out}", markup=False, highlight=False, soft_wrap=True)


def _ranges(table: "CalibrationTable") -> "Table":
    """One row per attention site: how far a symmetric grid over all of its heads would reach."""
    import numpy as np
    from rich import box
    from rich.table import Table

    from quantdiff.analysis.text import number
    from quantdiff.calibration.table import SHOWN

    shown = Table(
        box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True, title_justify="left",
        title="ranges of the attention logits, by layer: ± what stands here", title_style="bold",
    )  # fmt: skip
    shown.add_column("layer", justify="right", no_wrap=True)
    for word in SHOWN:
        shown.add_column(word, justify="right", no_wrap=True)
    for site in table.sites:
        ends = [table.range(scheme, site.name) for scheme in SHOWN.values()]
        cells = [number(float(np.abs(end).max())) for end in ends]
        shown.add_row(str(site.layer), *cells)
    return shown


def _movement(table: "CalibrationTable") -> list[str]:
    """One line on how much the ranges still moved."""
    moved = table.convergence()
    if not moved:
        return []
    share = 1 - table.data["earlier_tokens"] / table.data["tokens"]
    each = ", ".join(f"{name} {m['median']:.1%} ({m['largest']:.1%})" for name, m in moved.items())
    return [f"moved over the last {share:.0%} of the data, median layer (largest): {each}"]
