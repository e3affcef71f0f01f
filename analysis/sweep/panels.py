"""What each panel of a sweep's figures shows."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pandas as pd

from quantdiff.analysis.sweep.lines import (
    NO_WAY,
    WAYS,
    Line,
    Measure,
    Way,
    lines,
    measures,
    same_in,
    way_label,
)
from quantdiff.analysis.sweep.loaded import SweepResults
from quantdiff.analysis.text import literal, shorten_apart
from quantdiff.errors import UsageError

__all__ = ["KINDS", "Panel", "panels", "sweep_figure_data"]

KINDS = ("bits", "ranges", "sites")

_COLUMNS = 3  # panels side by side, at most
_LABEL = 20  # characters along a vertical axis


@dataclass(frozen=True)
class Panel:
    """One set of axes.

    Attributes:
        title: above it.
        label: of its vertical axis.
        measure: what is drawn.
        curves: the lines with their names in the legend.
        left_out: models that have lines, but none for the panel's way of quantizing.
    """

    title: str
    label: str
    measure: Measure
    curves: tuple[tuple[str, Line], ...]
    left_out: tuple[str, ...] = ()

    @property
    def way(self) -> Way:
        """The first way of quantizing that is drawn; `NO_WAY` if there is none."""
        return _first_way([line for _, line in self.curves])


def panels(
    results: SweepResults,
    kind: str,
    evaluation: str | None,
    metric: str | None,
    model: str | None,
    way: Mapping[str, Any] | None,
) -> list[list[Panel]]:
    """Rows of panels.

    Raises:
        UsageError: an unknown kind or model, or nothing to draw.
    """
    if kind not in KINDS:
        raise UsageError(f"there is no figure {kind!r}; choose one of {', '.join(KINDS)}")
    if model is not None and model not in results.models:
        raise UsageError(
            f"there is no model {model!r} in this sweep; there are {', '.join(results.models)}"
        )
    wanted = [
        measure
        for measure in measures(results)
        if evaluation in (None, measure.evaluation) and metric in (None, measure.metric)
    ]
    every = {measure: lines(results, measure) for measure in wanted}
    found = {measure: _chosen(of_one, way or {}) for measure, of_one in every.items()}
    found = {measure: of_one for measure, of_one in found.items() if of_one}
    if not found:
        raise UsageError("there is nothing to draw: no finished cell is what was asked for")
    if kind == "bits":
        row = [_bits_panel(measure, of_one, every[measure]) for measure, of_one in found.items()]
        return _wrapped(row)
    if metric is None:  # the main one of each evaluation
        first = {measure.evaluation: measure for measure in reversed(found)}
        found = {measure: found[measure] for measure in found if measure in first.values()}
    model = model or results.models[0]
    mine = {
        measure: [line for line in of_one if line.model == model and line.way != NO_WAY]
        for measure, of_one in found.items()
    }
    mine = {measure: of_one for measure, of_one in mine.items() if of_one}
    if not mine:
        raise UsageError(f"there is nothing to draw: {model} was not quantized")
    if kind == "sites":
        chosen = {measure: _sites(of_one) for measure, of_one in mine.items()}
        same = same_in(line.way for of_one in chosen.values() for line in of_one)
        return _wrapped([_sites_panel(measure, of_one, same) for measure, of_one in chosen.items()])
    short = shorten_apart((literal(measure.source) for measure in mine), _LABEL)
    rows = [
        _range_panels(measure, of_one, short[literal(measure.source)])
        for measure, of_one in mine.items()
    ]
    return [part for row in rows for part in _wrapped(row)]


def _wrapped(row: list[Panel]) -> list[list[Panel]]:
    """Split panels into rows that fit on a page; four become two rows of two."""
    columns = math.ceil(len(row) / math.ceil(len(row) / _COLUMNS))
    return [row[i : i + columns] for i in range(0, len(row), columns)]


def _chosen(of_one: list[Line], way: Mapping[str, Any]) -> list[Line]:
    """Lines of a way, and models that were only evaluated unquantized."""
    unknown = set(way) - set(WAYS)
    if unknown:
        raise UsageError(f"a way has no {unknown.pop()!r}; it has {', '.join(WAYS)}")
    return [
        line
        for line in of_one
        if line.way[0] is None
        or all(line.way[WAYS.index(name)] == value for name, value in way.items())
    ]


def _bits_panel(measure: Measure, of_one: list[Line], every: list[Line]) -> Panel:
    first = _first_way(of_one)
    curves = tuple((line.model, line) for line in of_one if line.way in (first, NO_WAY))
    drawn = {model for model, _ in curves}
    left_out = dict.fromkeys(line.model for line in every if line.model not in drawn)
    return Panel(measure.source, measure.metric, measure, curves, tuple(left_out))


def _sites(of_one: list[Line]) -> list[Line]:
    """The first line of each combination of site, schemes and remedy."""
    first = {(line.way.site, line.way.schemes, line.way.remedy): line for line in reversed(of_one)}
    return [line for line in of_one if line in first.values()]


def _sites_panel(measure: Measure, of_one: list[Line], same: list[str]) -> Panel:
    """A panel whose lines are named by their site and by what differs in any panel."""
    curves = tuple((way_label(line.way, {*same} - {"site"}), line) for line in of_one)
    return Panel(measure.source, measure.metric, measure, curves)


def _range_panels(measure: Measure, of_one: list[Line], source: str) -> list[Panel]:
    """One panel per granularity of the first site; `source` is shown along the axis."""
    curves: dict[str, list[tuple[str, Line]]] = {}
    for line in of_one:
        if line.way.site == of_one[0].way.site:
            name = way_label(line.way, ("site", "granularity"))
            curves.setdefault(str(line.way.granularity), []).append((name, line))
    label = measure.metric
    if label != measure.source:
        label = f"{literal(label)}\n{source}"
    return [Panel(title, label, measure, tuple(of_panel)) for title, of_panel in curves.items()]


def _first_way(of_one: list[Line]) -> Way:
    return next((line.way for line in of_one if line.way != NO_WAY), NO_WAY)


def sweep_figure_data(
    results: SweepResults,
    kind: str = "bits",
    *,
    evaluation: str | None = None,
    metric: str | None = None,
    model: str | None = None,
    way: Mapping[str, Any] | None = None,
) -> pd.DataFrame:
    """The numbers that `plot_sweep` draws, one row per point; see there for the arguments.

    Raises:
        UsageError: as `plot_sweep`.
    """
    rows = [
        {"evaluation": panel.measure.evaluation, "metric": panel.measure.metric}
        | {"model": line.model, **dict(zip(WAYS, line.way, strict=True)), "bits": bits}
        | {name: point[name] for name in ("value", "stderr", "count")}
        for row in panels(results, kind, evaluation, metric, model, way)
        for panel in row
        for _, line in panel.curves
        for bits, point in line.points.items()
        if point["value"] is not None
    ]
    columns = ["evaluation", "metric", "model", *WAYS, "bits", "value", "stderr", "count"]
    return pd.DataFrame(rows, columns=columns).astype({"count": "Int64"})
