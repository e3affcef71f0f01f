"""`quantdiff compare`: any models side by side, as tables, figures and one page."""

import json
import re
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from quantdiff.cli import common

if TYPE_CHECKING:
    import pandas as pd
    from rich.table import Table as Shown

    from quantdiff.analysis.compare import Comparison
    from quantdiff.analysis.report import Table

EPILOG = """
Examples:

  quantdiff compare runs/profile-plain runs/profile-diff runs/sweep --out runs/report

  quantdiff compare runs/demo --published --out runs/report --overwrite

  quantdiff compare runs/profile-plain runs/profile-diff --json
"""

WORD = 10  # minimum width of a column, in characters, unless its content is narrower
# Tables that a terminal shows; the page has all of them.
MAIN = ("outliers", "table-5", "bits-", "figure-8", "branches", "checkpoints")


@common.app.command(epilog=EPILOG)
def compare(
    runs: Annotated[
        list[Path],
        typer.Argument(
            metavar="RUN…",
            help="Folders that profile, sweep, export or calibrate wrote, in any mix, or a folder "
            "of such folders, up to two levels down. Others are compared with the first model.",
            show_default=False,
        ),
    ],
    out: Annotated[
        Path | None,
        typer.Option("--out", help="Folder for report.html, tables and figures."),
    ] = None,
    published: Annotated[
        bool,
        typer.Option("--published", help="Draw the paper's Figure 8 beside measured accuracies."),
    ] = False,
    overwrite: common.Overwrite = False,
    as_json: common.Json = False,
) -> None:
    """Compare models: outliers, accuracy against bits, checkpoints, and their provenance."""
    from quantdiff.analysis.compare import Comparison
    from quantdiff.analysis.report.writing import REPORT, write_report
    from quantdiff.files import staged_folder

    with ExitStack() as stack:
        # The folder first: an output that cannot be written must not waste the reading.
        stage = None
        if out is not None:
            _check_out(out)
            stage = stack.enter_context(
                staged_folder(out, marker=REPORT, owned=owned(out), overwrite=overwrite)
            )
        comparison = Comparison(runs, published=published, command=common.command_line())
        if stage is not None:
            if not as_json:
                sys.stderr.write(f"drawing the figures of {len(comparison.names)} models\n")
            write_report(comparison.report(), stage)
    page = None if out is None else out / REPORT
    if as_json:
        print(json.dumps(_content(comparison, page), ensure_ascii=False, allow_nan=False))
    else:
        show_comparison(comparison, page)


def _check_out(out: Path) -> None:
    """Refuse the folder of a run, whose figures have the same names as a report's."""
    from quantdiff.analysis.compare.reading import markers
    from quantdiff.errors import UsageError

    if out.is_dir() and markers(out):
        raise UsageError(f"{out} holds a run ({markers(out)[0]}): choose another --out")


def owned(out: Path) -> list[str]:
    """The files that an earlier report left, from its lists of tables and figures."""
    owned = []
    for part, suffixes in (("tables", "csv md tex"), ("figures", "csv png svg")):
        try:
            keys = json.loads((out / part / "dtypes.json").read_bytes())
        except (OSError, ValueError):
            continue
        owned.append(f"{part}/dtypes.json")
        owned += [
            f"{part}/{key}.{suffix}"
            for key in keys
            if re.fullmatch(r"[a-z0-9-]+", key)
            for suffix in suffixes.split()
        ]
    return owned


def _content(comparison: "Comparison", page: Path | None) -> dict[str, Any]:
    return {
        "report": None if page is None else str(page),
        "models": comparison.names,
        "warnings": comparison.warnings,
        "frames": {name: _records(frame) for name, frame in comparison.frames().items()},
    }


def _records(frame: "pd.DataFrame") -> list[dict[str, Any]]:
    """The rows of a frame for JSON, which has neither NaN nor NumPy's numbers."""
    plain = frame.astype(object).where(frame.notna(), None)
    return [
        {
            str(name): getattr(value, "item", lambda value=value: value)()
            for name, value in row.items()
        }
        for row in plain.to_dict("records")
    ]


def show_comparison(comparison: "Comparison", page: Path | None) -> None:
    """Print the main tables, the warnings on stderr, and the path of the page."""
    from rich.console import Console
    from rich.measure import Measurement
    from rich.text import Text

    console = Console()
    for warning in comparison.warnings:
        sys.stderr.write(f"note: {warning}\n")
    for part in comparison.tables().tables:
        if part.key.startswith(MAIN):
            shown = _shown(part)
            # Wider than a narrow terminal if necessary: no digit may be lost.
            least = Measurement.get(console, console.options, shown).minimum
            console.print(shown, width=max(console.width, least), crop=False)
            console.print(Text(f"{part.caption}\n", style="dim"))
    if page is not None:
        console.print(f"written to {page}", markup=False, highlight=False, soft_wrap=True)


def _shown(table: "Table") -> "Shown":
    """A table of the report for a terminal."""
    from rich import box
    from rich.table import Table as Shown
    from rich.text import Text

    from quantdiff.analysis.report.cells import PUBLISHED, columns

    title = f"{table.title} ({PUBLISHED})" if table.published else table.title
    shown = Shown(
        box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True, title=Text(title),
        title_justify="left", title_style="bold",
    )  # fmt: skip
    parts = columns(table)
    for column in parts:
        longest = max(map(len, [column.heading, *column.cells]))
        shown.add_column(
            Text(column.heading), justify="right" if column.numeric else "left",
            no_wrap=column.numeric, overflow="fold", min_width=min(WORD, longest),
        )  # fmt: skip
    for cells in zip(*(column.cells for column in parts), strict=True):
        shown.add_row(*map(Text, cells))
    return shown
