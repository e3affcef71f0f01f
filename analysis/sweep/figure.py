"""The figures of a sweep: metrics against bits, a line a model, and ranges by granularity."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from quantdiff.analysis.published import FIGURE_8
from quantdiff.analysis.style import (
    DOUBLE,
    SINGLE,
    Page,
    legend_below,
    model_colors,
    save_page,
    set_title,
    style,
)
from quantdiff.analysis.sweep.lines import (
    NO_WAY,
    Line,
    lines,
    measures,
    model_labels,
    way_label,
)
from quantdiff.analysis.sweep.loaded import SweepResults
from quantdiff.analysis.sweep.panels import Panel, first_way, panels, sweep_figure_data
from quantdiff.analysis.text import literal, shorten, slug
from quantdiff.files import write_bytes
from quantdiff.quantization.scheme import SITES

__all__ = ["has_accuracy", "plot_sweep", "save_sweep_figures"]

Axes: TypeAlias = Any  # of matplotlib, which has no types here

_ROW = 1.75  # inches of a row of panels
_AROUND = 0.45  # inches of the title
_LETTERS = 14  # to an inch
_APART = 0.06  # of the step between two widths, so that error bars do not lie on each other
_SPREAD = 0.36  # of that step at most for all lines together
_DASHED = ", asymmetric"
_RATIO = 10  # of largest to smallest, from which on an axis is logarithmic
_DECADES = 2.5  # on an axis, up to which 2 and 5 are labelled beside 1
_MARKERS = "osD^vP*X"
_NAME = 40  # characters of a name in a legend
_BARS = "bars are ± 1 standard error"
_PUBLISHED = {model: f"{model}, published" for model in FIGURE_8}


def plot_sweep(
    results: SweepResults,
    kind: str = "bits",
    *,
    evaluation: str | None = None,
    metric: str | None = None,
    model: str | None = None,
    way: Mapping[str, Any] | None = None,
    published: bool = False,
    names: Mapping[str, str] | None = None,
    ax: Axes | None = None,
) -> Any:
    """Draw a figure of a sweep; bars are one standard error to either side.

    Args:
        results: of a sweep.
        kind: "bits": a panel a metric, a line a model, all quantized in one way (the layout of
            the paper's Figure 8). For one model, with the main metric of each evaluation: "ranges":
            one site, a panel a granularity, a line a range; "sites": a line a site.
        evaluation, metric: draw these alone.
        model: the one; the first by default.
        way: what to draw of `site`, `range`, `granularity` and `symmetric`. Where one way or one
            site is drawn, it is the first that fits.
        published: whether the paper's accuracies stand beside measured ones of attention logits,
            dashed.
        names: what models are called, by their names in the sweep; by default short ones.
        ax: draw the first panel here, and not in a new figure.

    Returns:
        The new matplotlib Figure (outside of pyplot; notebooks show it, `savefig` writes it), or
        `ax`.

    Raises:
        UsageError: an unknown kind or model, or nothing to draw.
    """
    rows = panels(results, kind, evaluation, metric, model, way)
    called = model_labels(results.models) if names is None else names
    if ax is not None:
        panel = rows[0][0]
        looks = _looks(results, kind, [name for name, _ in panel.curves], called)
        with style():
            _draw(ax, panel, looks, _scale(ax, [panel]), published=published)
            for text in ax.legend().get_texts():
                text.set_parse_math(False)
        return ax
    with style():
        columns = max(map(len, rows))
        page = Page(DOUBLE if columns > 1 else SINGLE, _AROUND + _ROW * len(rows))
        set_title(page, *_title(kind, rows, called))
        grid = page.subplots(len(rows), columns, squeeze=False)
        drawn_names = dict.fromkeys(name for row in rows for p in row for name, _ in p.curves)
        looks = _looks(results, kind, list(drawn_names), called)
        drawn: list[tuple[Axes, Panel]] = []
        for axes, row in zip(grid, rows, strict=True):
            drawn += zip(axes, row, strict=False)
            for empty in axes[len(row) :]:
                empty.set_axis_off()
        for place, panel in drawn:
            shared = [p for _, p in drawn if kind == "ranges" and p.measure == panel.measure]
            logarithmic = _scale(place, shared or [panel])
            _draw(place, panel, looks, logarithmic, published=published)
        if kind == "ranges":
            _share(drawn)
        _legend(page, grid)
        return page


def save_sweep_figures(
    results: SweepResults, folder: str | Path, *, published: bool = False
) -> list[Path]:
    """Write the figures of a sweep as PNG and SVG, and their numbers as CSV.

    There is "bits" for every site, "sites" for a model with several sites, and "ranges" for a model
    and site with several ways; the files are named after model and site where there are several.

    Returns:
        The files; none where no cell has succeeded.
    """
    found = measures(results)
    if not found:
        return []
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    every = [line for measure in found for line in lines(results, measure)]
    # Schemes together have one point each, which "sites" shows side by side.
    seen = dict.fromkeys(line.way[0] for line in every)
    sites = [site for site in seen if site is not None and site in SITES]
    figures: list[tuple[str, dict[str, Any]]] = []
    if not sites:
        figures.append(("bits", {"kind": "bits"}))
    for site in sites:
        name = f"bits-{site}" if len(sites) > 1 else "bits"
        figures.append((name, {"kind": "bits", "way": {"site": site}}))
    for number, model in enumerate(results.models, start=1):
        mine = {line.way for line in every if line.model == model and line.way != NO_WAY}
        told = f"-{number}-{slug(model)}" if len(results.models) > 1 else ""
        if len({(way.site, way.schemes) for way in mine}) > 1:
            figures.append((f"sites{told}", {"kind": "sites", "model": model}))
        for site in sites:
            if len([way for way in mine if way[0] == site]) > 1:
                name = f"ranges{told}-{site}" if len(sites) > 1 else f"ranges{told}"
                figures.append((name, {"kind": "ranges", "model": model, "way": {"site": site}}))
    written = []
    for name, which in figures:
        also = published and which["kind"] == "bits"
        written += save_page(plot_sweep(results, **which, published=also), folder / name)
        written.append(folder / f"{name}.csv")
        table = sweep_figure_data(results, **which).to_csv(index=False, lineterminator="\n")
        write_bytes(written[-1], table.encode())
    return written


def has_accuracy(results: SweepResults) -> bool:
    """Whether anything was measured that the published Figure 8 can stand beside."""
    return any(measure.is_accuracy for measure in measures(results))


def _title(
    kind: str, rows: Sequence[Sequence[Panel]], called: Mapping[str, str]
) -> tuple[str, str]:
    drawn = [line for row in rows for panel in row for _, line in panel.curves]
    models = list(dict.fromkeys(line.model for line in drawn))
    name = literal(called[models[0]]) if len(models) == 1 else f"{len(models)} models"
    way = first_way(drawn)
    if kind != "bits":
        what = f"{way[0]}, range by granularity" if kind == "ranges" else "site by site"
        return name, f"{what.replace('_', ' ')}\n{_BARS}"
    return name, f"{'not quantized' if way == NO_WAY else way_label(way)}\n{_BARS}"


def _looks(
    results: SweepResults, kind: str, names: Sequence[str], called: Mapping[str, str]
) -> dict[str, dict[str, Any]]:
    """How each line is drawn, by its name; both grids of a range share a colour."""
    labels = called if kind == "bits" else {name: name for name in names}
    kinds = {name: name if kind == "bits" else name.removesuffix(_DASHED) for name in names}
    colors = model_colors(results.models if kind == "bits" else kinds.values())
    places = list(dict.fromkeys(kinds.values()))
    return {
        name: {
            "color": colors[alike],
            "marker": _MARKERS[places.index(alike) % len(_MARKERS)],
            "linestyle": "-" if name == alike else "--",
            "label": shorten(literal(labels[name]), _NAME),
        }
        for name, alike in kinds.items()
    }


def _draw(
    ax: Axes,
    panel: Panel,
    looks: Mapping[str, dict[str, Any]],
    logarithmic: bool,
    *,
    published: bool,
) -> None:
    # The paper quantized the logits alone.
    comparable = first_way([line for _, line in panel.curves]).site in (None, "attention_logits")
    paper = FIGURE_8 if published and panel.measure.is_accuracy and comparable else {}
    widths = {bits for _, line in panel.curves for bits in line.points}
    widths |= {bits for values in paper.values() for bits in values}
    places = {bits: place for place, bits in enumerate(sorted(widths, reverse=True))}
    for name, line in panel.curves:
        shift = min(_APART, _SPREAD / len(looks)) * (list(looks).index(name) - (len(looks) - 1) / 2)
        x, y, error = _points(line, places)
        y[logarithmic & (y <= 0)] = np.nan
        ax.errorbar(
            x + shift, y, yerr=error, elinewidth=0.8, capsize=1.5, capthick=0.8, **looks[name]
        )  # fmt: skip
    for shade, (name, values) in zip(("0.35", "0.6"), paper.items(), strict=False):
        ax.plot(
            [places[bits] for bits in values], list(values.values()), color=shade, linestyle="--",
            linewidth=1, label=_PUBLISHED[name],
        )  # fmt: skip
    ax.set_xticks(list(places.values()), [str(bits) for bits in places])
    ax.set_xlim(-0.35, len(places) - 0.65)
    ax.set_xlabel("bits")
    ax.set_ylabel(panel.label, parse_math=False)
    room = int(ax.bbox.width / ax.figure.dpi * _LETTERS)
    ax.set_title(shorten(literal(panel.title), room), parse_math=False)


def _points(line: Line, places: Mapping[int, int]) -> tuple[Any, Any, Any]:
    """Where a line's points stand, their values, and their errors; NaN where there is none."""
    x = np.array([float(places[bits]) for bits in line.points])
    y, error = (
        np.array([np.nan if row[entry] is None else row[entry] for row in line.points.values()])
        for entry in ("value", "stderr")
    )
    return x, y, error


def _scale(ax: Axes, alike: Sequence[Panel]) -> bool:
    """Make an axis logarithmic where the values of some panels span more than a decade.

    Returns:
        Whether they do; then it has no place for a divergence of 0.
    """
    points = [point for p in alike for _, line in p.curves for point in line.points.values()]
    values = [point["value"] for point in points if point["value"] is not None]
    positive = [value for value in values if value > 0]
    if not positive or min(values) < 0 or max(positive) <= _RATIO * min(positive):
        return False
    wide = math.log10(max(positive) / min(positive)) > _DECADES
    ax.set_yscale("log", nonpositive="clip")
    ax.yaxis.set_major_locator(LogLocator(subs=(1,) if wide else (1, 2, 5)))
    ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    ax.yaxis.set_minor_formatter(NullFormatter())
    return True


def _share(drawn: Sequence[tuple[Axes, Panel]]) -> None:
    """Give the panels of a measure one vertical axis, labelled at the left."""
    for measure in {panel.measure for _, panel in drawn}:
        axes = [ax for ax, panel in drawn if panel.measure == measure]
        low = min(ax.get_ylim()[0] for ax in axes)
        high = max(ax.get_ylim()[1] for ax in axes)
        for ax in axes:
            ax.set_ylim(low, high)
            if not ax.get_subplotspec().is_first_col():
                ax.set_ylabel("")


def _legend(page: Page, grid: Any) -> None:
    """One legend for all panels, in a strip of its own that is added to the page."""
    found: dict[str, Any] = {}
    for ax in grid.flat:
        for handle, label in zip(*ax.get_legend_handles_labels(), strict=True):
            found.setdefault(label, handle)
    if len(found) > 1:
        legend_below(page, sorted(found.items(), key=lambda entry: entry[0] in _PUBLISHED.values()))
