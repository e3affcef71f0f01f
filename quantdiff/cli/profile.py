"""`quantdiff profile`: the largest attention logits and hidden states of a model on text."""

import json
import sys
from contextlib import ExitStack
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from quantdiff.cli import common

if TYPE_CHECKING:
    from quantdiff.statistics.profile import Profile

EPILOG = """
Examples:

  quantdiff profile smollm2-135m --tokens 16384 --seq-len 1024 --out runs/smollm2

  quantdiff profile kajuma/DiffLlama-0.3B-handcut --data hub:allenai/c4/en:validation
  --tokens 400000 --seq-len 2048 --dtype bfloat16 --out runs/diffllama

  quantdiff profile ./my-model --data notes.txt --detail extremes --json

  quantdiff profile ./my-diff-model --maps --out runs/maps

  quantdiff profile smollm2-135m --sites linear_inputs,keys,values --out runs/sites
"""


TOKENS = 16384
OWNED = (
    "profile.safetensors", "figures/layers.*", "figures/heads.*", "figures/magnitudes.*",
    "figures/maps.*", "figures/channels.*",
)  # fmt: skip


class Detail(StrEnum):
    """How much is kept."""

    FULL = "full"
    EXTREMES = "extremes"


@common.app.command(epilog=EPILOG)
def profile(
    model: common.Model,
    data: common.Data = "corpus",
    tokens: Annotated[int, typer.Option("--tokens", help="Tokens of text to record.")] = TOKENS,
    seq_len: Annotated[
        int | None,
        typer.Option("--seq-len", help="Tokens per window. Default: 2048, or the model's context."),
    ] = None,
    batch_size: Annotated[
        int,
        typer.Option(
            "--batch-size", min=1, help="Windows in one pass; moves results by rounding alone."
        ),
    ] = 1,
    out: Annotated[
        Path | None,
        typer.Option("--out", help="Folder for profile.json, profile.safetensors and figures."),
    ] = None,
    overwrite: common.Overwrite = False,
    detail: Annotated[
        Detail,
        typer.Option("--detail", help="full, or extremes: counts, maxima and minima alone."),
    ] = Detail.FULL,
    top: Annotated[
        int, typer.Option("--top", min=0, help="Largest magnitudes kept with their coordinates.")
    ] = 100,
    maps: Annotated[
        bool,
        typer.Option("--maps", help="Measure the attention maps too: sinks, negative mass, …."),
    ] = False,
    sites: Annotated[
        list[str],
        typer.Option(
            "--sites",
            help="Record the outliers of other sites too, by channel and token: linear_inputs, "
            "keys, values, hidden_states, or all. Lists have commas.",
            show_default=False,
        ),
    ] = [],  # noqa: B006  (typer copies it)
    passages: Annotated[
        Path | None,
        typer.Option(
            "--passages",
            help="In place of --data, a .jsonl of text and answer: the attention on the answer. "
            "Implies --maps.",
        ),
    ] = None,
    layout: Annotated[
        str | None,
        typer.Option(
            "--layout",
            help="Head layout of a model that quantdiff does not know: none, halves, "
            "adjacent, adjacent_shared or grouped:R.",
        ),
    ] = None,
    attention: common.Attention = None,
    dtype: common.Dtype = None,
    device: common.Device = None,
    trust_remote_code: common.TrustRemoteCode = False,
    as_json: common.Json = False,
) -> None:
    """Profile a model: how large its attention logits and hidden states get, and where."""
    from quantdiff.analysis import profiling
    from quantdiff.calibration.passages import read_passages
    from quantdiff.calibration.text import text_windows
    from quantdiff.errors import UsageError
    from quantdiff.files import staged_folder
    from quantdiff.models import context_length, load
    from quantdiff.statistics.storage import save_profile, to_json

    if passages is not None and (data != "corpus" or tokens != TOKENS):
        raise UsageError("--passages stands in place of --data and --tokens: leave them out")
    if layout is not None:
        profiling.check_layout(layout)
    asked = common.sites_of(sites)
    if as_json:
        common.silence_libraries()
    with ExitStack() as stack:
        # The folder first: an output that cannot be written must not waste a recording.
        stage = None
        if out is not None:
            stage = stack.enter_context(
                staged_folder(out, marker="profile.json", owned=OWNED, overwrite=overwrite)
            )
        loaded, tokenizer = load(
            model, dtype=dtype, device=device, attention=attention,
            trust_remote_code=trust_remote_code,
        )  # fmt: skip
        if seq_len is None:
            seq_len = min(2048, context_length(loaded) or 2048)
        profiling.check_length(loaded, seq_len)
        spans: list[tuple[int, int]] = []
        if passages is not None:
            windows, spans = read_passages(passages, tokenizer, seq_len=seq_len)
        else:
            windows = text_windows(data, tokenizer, tokens=tokens, seq_len=seq_len)
        if (
            passages is None and windows.tokens < tokens - 1
        ):  # a last window of one token is dropped
            sys.stderr.write(
                f"note: {data} holds {windows.tokens:,} tokens, not the {tokens:,} asked for\n"
            )
        with (
            common.interruptible() as stop,
            common.token_progress("recording", windows.tokens, quiet=as_json) as progress,
        ):
            recorded = profiling.profile_text(
                loaded, windows, batch_size=batch_size, top_k=top, detail=detail.value,
                layout=layout, maps=maps or bool(spans), spans=spans, sites=asked,
                progress=progress, stop=stop,
            )  # fmt: skip
        recorded.command = common.command_line()
        if stage is not None:
            from quantdiff.analysis.figures import save_figures

            save_profile(recorded, stage)
            save_figures(recorded, stage / "figures")
    if as_json:
        print(json.dumps(to_json(recorded), ensure_ascii=False, allow_nan=False))
    else:
        _print(recorded, out)
    if recorded.partial:
        raise typer.Exit(130)


def _print(recorded: "Profile", out: Path | None) -> None:
    from rich.console import Console

    from quantdiff.analysis import tables

    console = Console()
    for part in tables.profile_report(recorded):
        console.print(part)
    if out is not None:
        console.print(f"written to {out}", markup=False, highlight=False, soft_wrap=True)
