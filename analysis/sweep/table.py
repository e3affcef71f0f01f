"""A sweep as tables for a terminal, and for a notebook."""

from collections.abc import Collection

import pandas as pd
from rich import box
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from quantdiff.analysis.published import FIGURE_8, FIGURE_8_SOURCE, FIGURE_8_UNSAID
from quantdiff.analysis.sweep.blocks import MOVED, computed_otherwise, of_attention
from quantdiff.analysis.sweep.grid import where
from quantdiff.analysis.sweep.lines import (
    NO_WAY,
    WAYS,
    Line,
    Measure,
    Way,
    lines,
    measures,
    model_labels,
    of_some,
    same_in,
    way_label,
)
from quantdiff.analysis.sweep.loaded import SweepResults
from quantdiff.analysis.sweep.results import Row
from quantdiff.analysis.text import UNKNOWN, four_digits, literal, shorten_apart, two_digits

__all__ = ["failures_table", "figure_8_table", "pivot", "sweep_report"]

_NAME = 24  # characters of a model's name
_HEADS = {"symmetric": "grid"}


def sweep_report(results: SweepResults) -> list[RenderableType]:
    """All that a terminal shows of a sweep: heading, a table per metric, published table, failures.

    A sweep by layers or heads alone has no metrics at several widths to show.
    """
    found = measures(results)
    if any(of_some(row) for row in results.rows):
        found = [m for m in found if any(line.way != NO_WAY for line in lines(results, m))]
    ways = {line.way for measure in measures(results) for line in lines(results, measure)}
    told = same_in(ways)
    parts: list[RenderableType] = [_heading(results, ways, told)]
    parts += [_MetricTable(results, measure, told) for measure in found]
    if any(measure.is_accuracy for measure in found):
        parts.append(figure_8_table())
    if results.failed:
        parts.append(failures_table(results))
    return parts


def pivot(results: SweepResults) -> list[tuple[str, pd.DataFrame]]:
    """For each metric its title and a table: one row per line, one column per width."""
    tables = []
    for measure in measures(results):
        of_one = lines(results, measure)
        index = pd.MultiIndex.from_tuples(
            [(line.model, *line.way) for line in of_one], names=["model", *WAYS]
        )
        values = [{bits: row["value"] for bits, row in line.points.items()} for line in of_one]
        table = pd.DataFrame(values, index=index, columns=_widths(of_one), dtype=float)
        tables.append((measure.label, table))
    return tables


def failures_table(results: SweepResults) -> Table:
    """The cells that failed, and why."""
    table = _empty("failed; the next start that asks for them tries again")
    for word in ("model", "evaluation", "scheme", "reason"):
        table.add_column(word, overflow="fold")
    for row in results.failed:
        scheme = row["scheme"]
        if row["range"] is not None:
            scheme += f" {row['range']} {row['granularity']}"
        scheme += where(row["options"])
        table.add_row(
            *(literal(word) for word in (row["model"], row["eval"], scheme, row["error"]))
        )
    return table


def figure_8_table() -> Table:
    """The paper's own Figure 8, to show beneath a measured one."""
    table = _empty(None)
    table.add_column("published")
    widths = list(next(iter(FIGURE_8.values())))
    for bits in widths:
        table.add_column(f"{bits} bits", justify="right")
    for model, values in FIGURE_8.items():
        table.add_row(model, *(f"{values[bits]:.3f}" for bits in widths))
    table.caption = f"{FIGURE_8_SOURCE}. {FIGURE_8_UNSAID}"
    table.caption_justify = "left"
    return table


def _heading(results: SweepResults, ways: Collection[Way], same: Collection[str]) -> Text:
    done = len({row["cell"] for row in results.rows if row["status"] == "ok"})
    total = len(results.record["cells"])
    text = Text(", ".join(map(literal, results.models)), style="bold")
    text.append(f"\n{done:,} of {total:,} cells", style="not bold")
    if results.failed:
        text.append(f", {len(results.failed):,} failed", style="not bold red")
    if same:
        way = next(way for way in ways if way != NO_WAY)
        told = way_label(way, [name for name in WAYS if name not in same])
        text.append(f"; {told}", style="not bold")
    return text


class _MetricTable:
    """One row per line of a metric, on as many terminal lines as the width requires.

    With several models and several ways, the ways of each model are listed under its name. What all
    ways have in common is in the title, except `told`, which the heading states for all tables.
    """

    def __init__(self, results: SweepResults, measure: Measure, told: Collection[str]) -> None:
        self._lines = lines(results, measure)
        self._title = _title(results, measure, self._lines, told)
        self._caption = _caption(results, measure, self._lines)
        names = {model: literal(name) for model, name in model_labels(results.models).items()}
        short = shorten_apart(names.values(), _NAME)
        self._names = {model: short[name] for model, name in names.items()}

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        wide = options.update_width(10_000)
        for between in ((" ", ", "), ("\n", ", "), ("\n", ",\n")):
            table = self._table(*between)
            if Measurement.get(console, wide, table).maximum <= options.max_width:
                break
        yield table

    def _table(self, before_error: str, between_words: str) -> Table:
        of_one, same = self._lines, same_in(line.way for line in self._lines)
        widths = _widths(of_one)
        models = list(dict.fromkeys(line.model for line in of_one))
        alike = len({line.way for line in of_one} - {NO_WAY}) < 2
        head = ", ".join(_HEADS.get(name, name) for name in WAYS if name not in same)
        table = _empty(self._title)
        table.caption, table.caption_justify = self._caption, "left"
        table.add_column("model" if alike else head.replace(", ", between_words), no_wrap=True)
        for bits in widths:
            table.add_column(f"{bits} bits", justify="right", no_wrap=True)
        for model in models:
            name = self._names[model]
            if not alike and len(models) > 1:
                table.add_row(Text(name, style="bold"))
            for line in (line for line in of_one if line.model == model):
                way = "not quantized" if line.way == NO_WAY else way_label(line.way, same)
                start = name if alike else (way or "symmetric").replace(", ", between_words)
                cells = (_cell(line.points.get(bits), before_error) for bits in widths)
                table.add_row(Text(start), *cells)
        return table


def _title(
    results: SweepResults, measure: Measure, of_one: list[Line], told: Collection[str]
) -> str:
    """The metric, what the heading leaves out about its ways, its text, and the sample count.

    Args:
        told: which of `WAYS` the heading states.
    """
    parts = [measure.label]
    ways = [line.way for line in of_one if line.way != NO_WAY]
    own = set(same_in(ways)) - set(told)
    parts += [way_label(way, set(WAYS) - own) for way in ways[:1] if own]
    if ":" not in measure.evaluation:
        abouts = [about["evaluations"] for about in results.record["models"].values()]
        known = [of_one[measure.evaluation] for of_one in abouts if measure.evaluation in of_one]
        parts += [str(about["source"]) for about in known[:1]]
    counts = {row["count"] for line in of_one for row in line.points.values() if row["count"]}
    if len(counts) == 1:
        parts.append(f"n = {counts.pop():,}")
    return literal(" · ".join(filter(None, parts)))


def _caption(results: SweepResults, measure: Measure, of_one: list[Line]) -> str | None:
    """What changes the metric besides the grid, if anything does."""
    if measure.metric not in MOVED:
        return None
    rows = [row for line in of_one for row in line.points.values() if row["site"]]
    moved = [row for row in rows if of_attention(row["site"].split("+"))]
    models = results.record["models"]
    told = computed_otherwise(models[row["model"]].get("dtype") for row in moved)
    return told and told[0].upper() + told[1:]


def _widths(of_one: list[Line]) -> list[int]:
    return sorted({bits for line in of_one for bits in line.points}, reverse=True)


def _cell(row: Row | None, before_error: str) -> Text:
    """A value with its standard error."""
    if row is None:
        return Text(UNKNOWN)
    if row["status"] != "ok":
        return Text("failed", style="red")
    text = Text(four_digits(row["value"]))
    if row["stderr"]:
        text.append(f"{before_error}±{two_digits(row['stderr'])}", style="dim")
    return text


def _empty(title: str | None) -> Table:
    return Table(
        box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True, title=title,
        title_justify="left", title_style="bold",
    )  # fmt: skip
