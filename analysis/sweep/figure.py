"""The figures of a sweep: metrics against bits, one line per model, and ranges by granularity."""

import math
import textwrap
from collections.abc import Collection, Mapping, Sequence
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
    set_title,
    style,
)
from quantdiff.analysis.sweep.lines import (
    NO_WAY,
    WAYS,
    Line,
    measures,
    model_labels,
    same_in,
    way_label,
)
from quantdiff.analysis.sweep.loaded import SweepResults
from quantdiff.analysis.sweep.panels import Panel, panels
from quantdiff.analysis.text import literal, shorten_apart

__all__ = ["has_accuracy", "plot_sweep"]

Axes: TypeAlias = Any  # matplotlib's Axes, which are untyped here

_ROW = 1.75  # inches per row of panels
_AROUND = 0.45  # inches for the title
_UNDER = 0.15  # inches per line beneath a panel's title
_LETTERS = 14  # per inch
_BESIDE = 0.6  # inches of a panel that its axis takes
_APART = 0.06  # of the step between two widths, so that error bars do not overlap
_SPREAD = 0.36  # of that step, at most, for all lines together
_DASHED = ", asymmetric"
_RATIO = 10  # of largest to smallest value, above which an axis is logarithmic
_DECADES = 2.5  # on an axis, up to which 2 and 5 are labelled as well as 1
_MARKERS = "osD^vP*X"
_NAME = 40  # characters of a name in a legend
_BARS = "bars are ± 1 standard error"
_PUBLISHED = {model: f"{model}, HellaSwag, published" for model in FIGURE_8}
_FEW = 2  # missing models, at most, that a panel names


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
        kind: "bits": one panel per metric, one line per model, all quantized in one way (the
            layout of the paper's Figure 8); a panel states which models were not. For one model,
            with the main metric of each evaluation: "ranges": one site, one panel per granularity,
            one line per range; "sites": one line per site.
        evaluation, metric: draw only these.
        model: the one model; by default the first.
        way: which `site`, `range`, `granularity` and `symmetric` to draw. Where one way or one site
            is drawn, it is the first that fits.
        published: whether to show the paper's accuracies beside measured ones of attention logits,
            dashed.
        names: how to label models, by their names in the sweep; by default with short names.
        ax: draw the first panel here instead of in a new figure.

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
            lacking = _wrapped(_left_out(panel, called), ax.bbox.width / ax.figure.dpi)
            _draw(ax, panel, [panel], looks, _scale(ax, [panel]), lacking, published=published)
            for text in ax.legend().get_texts():
                text.set_parse_math(False)
        return ax
    with style():
        columns = max(map(len, rows))
        same = same_in(panel.way for row in rows for panel in row)
        width = DOUBLE if columns > 1 else SINGLE
        under = {
            id(panel): _wrapped(
                [*_own_way(kind, panel, rows, same), *_left_out(panel, called)],
                width / columns - _BESIDE,
            )
            for row in rows
            for panel in row
        }
        room = _UNDER * max(map(len, under.values()))
        page = Page(width, _AROUND + (_ROW + room) * len(rows))
        set_title(page, *_title(kind, rows, called, same))
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
            _draw(
                place, panel, [p for _, p in drawn], looks, logarithmic, under[id(panel)],
                published=published,
            )  # fmt: skip
        if kind == "ranges":
            _share(drawn)
        _legend(page, drawn, looks)
        return page


def has_accuracy(results: SweepResults) -> bool:
    """Whether anything was measured that the published Figure 8 can be shown beside."""
    return any(measure.is_accuracy for measure in measures(results))


def _title(
    kind: str, rows: Sequence[Sequence[Panel]], called: Mapping[str, str], same: Collection[str]
) -> tuple[str, str]:
    """The one model, or the number of models, and what all panels have in common.

    Args:
        same: which of `WAYS` are the same in the ways of the panels.
    """
    drawn = [panel for row in rows for panel in row]
    of_all = [line for panel in drawn for _, line in panel.curves]
    models = list(dict.fromkeys(line.model for line in of_all))
    name = literal(called[models[0]]) if len(models) == 1 else f"{len(models)} models"
    way = next((panel.way for panel in drawn if panel.way != NO_WAY), NO_WAY)
    if kind == "sites":
        same = set(same_in(line.way for line in of_all)) - {"site"}
    elif kind == "ranges":
        same = {"site"} & set(same)
    told = "not quantized" if way == NO_WAY else way_label(way, set(WAYS) - set(same))
    what = {"bits": "", "sites": "site by site", "ranges": "range by granularity"}[kind]
    words = (what, told) if kind == "sites" else (told, what)
    return name, "\n".join(filter(None, (", ".join(filter(None, words)), _BARS)))


def _own_way(
    kind: str, panel: Panel, rows: Sequence[Sequence[Panel]], same: Collection[str]
) -> list[str]:
    """What the figure's title leaves out about a panel's way.

    Args:
        same: which of `WAYS` are the same in the ways of the panels.
    """
    if kind == "sites":
        return []
    if panel.way == NO_WAY:
        alone = all(other.way == NO_WAY for row in rows for other in row)
        return [] if alone else ["not quantized"]
    said = set(same) if kind == "bits" else set(same) | (set(WAYS) - {"site"})
    return [told for told in [way_label(panel.way, said)] if told]


def _left_out(panel: Panel, called: Mapping[str, str]) -> list[str]:
    """Which models are not in a panel because they were not quantized in its way."""
    if not panel.left_out:
        return []
    short = shorten_apart((literal(called[model]) for model in panel.left_out), _NAME)
    names = list(short.values())
    who = " and ".join(names) if len(names) <= _FEW else f"{len(names)} models"
    return [f"without {who}, not quantized so"]


def _wrapped(sentences: Sequence[str], inches: float) -> list[str]:
    """Lines that fit above a panel of some width."""
    return [line for told in sentences for line in textwrap.wrap(told, int(inches * _LETTERS))]


def _looks(
    results: SweepResults, kind: str, names: Sequence[str], called: Mapping[str, str]
) -> dict[str, dict[str, Any]]:
    """How each line is drawn, by its name; both grids of a range share a colour."""
    labels = called if kind == "bits" else {name: name for name in names}
    kinds = {name: name if kind == "bits" else name.removesuffix(_DASHED) for name in names}
    colors = model_colors(results.models if kind == "bits" else kinds.values())
    places = list(dict.fromkeys(kinds.values()))
    short = shorten_apart((literal(labels[name]) for name in names), _NAME)
    return {
        name: {
            "color": colors[alike],
            "marker": _MARKERS[places.index(alike) % len(_MARKERS)],
            "linestyle": "-" if name == alike else "--",
            "label": short[literal(labels[name])],
        }
        for name, alike in kinds.items()
    }


def _draw(
    ax: Axes,
    panel: Panel,
    every: Sequence[Panel],
    looks: Mapping[str, dict[str, Any]],
    logarithmic: bool,
    under: Sequence[str],
    *,
    published: bool,
) -> None:
    """Draw one panel of `every`; the lines of `under` go beneath its title."""
    # The paper quantized only the logits.
    comparable = panel.way.site in (None, "attention_logits")
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
    titles = shorten_apart((literal(one.title) for one in every), room)
    ax.set_title("\n".join([titles[literal(panel.title)], *under]), parse_math=False)


def _points(line: Line, places: Mapping[int, int]) -> tuple[Any, Any, Any]:
    """The positions, values and errors of a line's points; NaN where there is none."""
    x = np.array([float(places[bits]) for bits in line.points])
    y, error = (
        np.array([np.nan if row[entry] is None else row[entry] for row in line.points.values()])
        for entry in ("value", "stderr")
    )
    return x, y, error


def _scale(ax: Axes, alike: Sequence[Panel]) -> bool:
    """Make an axis logarithmic if the values of some panels span more than a decade.

    Returns:
        Whether it is logarithmic, so that it cannot show a divergence of 0.
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
    """Give the panels of a measure the same vertical axis, labelled at the left."""
    for measure in {panel.measure for _, panel in drawn}:
        axes = [ax for ax, panel in drawn if panel.measure == measure]
        low = min(ax.get_ylim()[0] for ax in axes)
        high = max(ax.get_ylim()[1] for ax in axes)
        for ax in axes:
            ax.set_ylim(low, high)
            if not ax.get_subplotspec().is_first_col():
                ax.set_ylabel("")


def _legend(
    page: Page, drawn: Sequence[tuple[Axes, Panel]], looks: Mapping[str, dict[str, Any]]
) -> None:
    """Add a legend for all panels to the page, in a strip of its own."""
    found: dict[str, Any] = {}
    paper: dict[str, Any] = {}
    for ax, panel in drawn:
        # By name, as two names may have the same label.
        for (name, _), bars in zip(panel.curves, ax.containers, strict=True):
            found.setdefault(name, bars)
        paper |= {line.get_label(): line for line in ax.lines}
    entries = [(looks[name]["label"], bars) for name, bars in found.items()]
    entries += [(label, paper[label]) for label in _PUBLISHED.values() if label in paper]
    if len(entries) > 1:
        legend_below(page, entries)
