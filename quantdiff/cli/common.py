"""What the commands share: the app, options that mean the same everywhere, progress, interrupts."""

import shlex
import signal
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import typer

__all__ = [
    "Attention",
    "Data",
    "Device",
    "Dtype",
    "Json",
    "Model",
    "Overwrite",
    "TrustRemoteCode",
    "app",
    "command_line",
    "interruptible",
    "listed",
    "report_step",
    "silence_libraries",
    "sites_of",
    "token_progress",
    "warnings_as_notes",
]

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    help="How large a model's activations get, what that costs at low bits, and how much "
    "differential attention saves.",
)


@app.callback()
def _root() -> None:
    """Keep `quantdiff COMMAND` even if there is only one command."""


Model = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="smollm2-135m, zoo:transformer, a hub id, a folder, or a .gguf file.",
        show_default=False,
    ),
]
Data = Annotated[
    str,
    typer.Option(
        "--data",
        help="corpus (shipped held-out text), corpus:train, a .txt, .jsonl, .parquet or .xz file, "
        "or hub:ID[:split[:column]].",
    ),
]
Dtype = Annotated[
    str | None,
    typer.Option("--dtype", help="float32, bfloat16, float16 or auto (the checkpoint's). "
                 "Default: the checkpoint's on a GPU, float32 on a CPU."),
]  # fmt: skip
Device = Annotated[
    str | None,
    typer.Option("--device", help="cpu, cuda, cuda:1, …. Default: a GPU if there is one."),
]
Attention = Annotated[
    str | None,
    typer.Option("--attention", help="eager, sdpa, flex_attention or flash_attention_2/3/4."),
]
TrustRemoteCode = Annotated[
    bool,
    typer.Option(
        "--trust-remote-code", help="Run the model code that the checkpoint brings along."
    ),
]
Overwrite = Annotated[
    bool, typer.Option("--overwrite", help="Replace the files of an earlier run in --out.")
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON to stdout and no tables.")]


def command_line() -> str:
    """The command line, for the record; starts with `quantdiff` even after `python -m`."""
    return shlex.join(["quantdiff", *sys.argv[1:]])


def listed(values: list[str]) -> list[str]:
    """The entries, each once, of an option that takes comma-separated lists and may repeat."""
    entries = [entry.strip() for value in values for entry in value.split(",")]
    return list(dict.fromkeys(entry for entry in entries if entry))


def sites_of(values: list[str]) -> list[str]:
    """The sites that `--sites` requests; `all` is every site that is recorded on request.

    Raises:
        UsageError: an unknown site.
    """
    from quantdiff.errors import UsageError
    from quantdiff.statistics.activations import RECORDED

    asked = listed(values)
    for site in asked:
        if site not in (*RECORDED, "all"):
            raise UsageError(f"unknown site {site!r} of --sites; known: {', '.join(RECORDED)}, all")
    return list(RECORDED) if "all" in asked else asked


def report_step(step: str) -> None:
    """Report the current step on stderr."""
    sys.stderr.write(f"{step}\n")


def silence_libraries() -> None:
    """Keep the progress bars of transformers off stderr."""
    from transformers.utils import logging

    logging.disable_progress_bar()


@contextmanager
def warnings_as_notes() -> Iterator[None]:
    """Print quantdiff's own warnings as one line each."""
    from quantdiff.errors import (
        CutWarning,
        LeftAloneWarning,
        SchemesLeftOutWarning,
        UnknownLayoutWarning,
    )

    own = CutWarning, LeftAloneWarning, SchemesLeftOutWarning, UnknownLayoutWarning
    with warnings.catch_warnings():
        for kind in own:
            warnings.simplefilter("once", kind)
        shown: Any = warnings.showwarning

        def show(message: Any, category: Any, *rest: Any, **options: Any) -> None:
            if issubclass(category, own):
                sys.stderr.write(f"note: {message}\n")
            else:
                shown(message, category, *rest, **options)

        warnings.showwarning = show  # catch_warnings restores the old one
        yield


@contextmanager
def interruptible() -> Iterator[Callable[[], bool]]:
    """Make Ctrl-C end the work at the next safe point; a second Ctrl-C ends it at once.

    Yields:
        A function that returns whether Ctrl-C was pressed.
    """
    pressed = False

    def handler(number: int, frame: Any) -> None:
        nonlocal pressed
        if pressed:
            raise KeyboardInterrupt
        pressed = True
        sys.stderr.write("\nstopping after this batch; press Ctrl-C again to stop at once\n")

    before = signal.signal(signal.SIGINT, handler)
    try:
        yield lambda: pressed
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def token_progress(description: str, total: int, *, quiet: bool) -> Iterator[Callable[[int], None]]:
    """A progress bar over tokens with tokens/s and time left, on stderr.

    Yields:
        A function that takes the number of tokens done since its last call.
    """
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        ProgressColumn,
        Task,
        TextColumn,
        TimeRemainingColumn,
    )
    from rich.text import Text

    class Speed(ProgressColumn):
        """Tokens per second."""

        def render(self, task: Task) -> Text:
            speed = task.finished_speed or task.speed
            return Text("" if speed is None else f"{speed:,.0f} tokens/s")

    columns = (
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), Speed(),
        TimeRemainingColumn(),
    )  # fmt: skip
    console = Console(stderr=True)
    if not quiet and not console.is_terminal:  # a log gets one line instead of a bar
        console.print(f"{description}: {total:,} tokens")
    with Progress(*columns, console=console, disable=quiet or not console.is_terminal) as bar:
        task = bar.add_task(description, total=total)
        yield lambda tokens: bar.advance(task, tokens)
