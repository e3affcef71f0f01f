"""The figures of outliers for several models: by layer, by head, and their distributions."""

import math
from collections.abc import Mapping
from typing import Any, TypeAlias

import numpy as np
import pandas as pd
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from quantdiff.analysis.compare.alike import Group
from quantdiff.analysis.compare.outliers import curves
from quantdiff.analysis.compare.recorded import Recorded
from quantdiff.analysis.frames import ACTIVATIONS, MAGNITUDE
from quantdiff.analysis.heads import draw_heads
from quantdiff.analysis.modules import by_module
from quantdiff.analysis.style import DOUBLE, SINGLE, Page, legend_below, set_title, style
from quantdiff.analysis.text import shorten_apart

__all__ = [
    "PANELS",
    "branch_entries",
    "draw_panel",
    "heads_page",
    "lines_page",
    "model_entries",
    "told_apart",
]

Axes: TypeAlias = Any  # matplotlib's, which has no types here
Colors: TypeAlias = Mapping[str, Any]

_HEIGHT = 2.3  # inches per row of panels
_CELL = 0.08  # inches per layer of a heat map, at least
_MARGIN = 0.55  # inches beside a heat map
_BAR = 0.65  # inches of the colour bar
_TALLEST = 9.0  # inches of a page
_DECADES = 2  # a wider range than this needs a logarithmic axis
_LEFT_OUT = 0.1  # per cent of the smallest magnitudes, whose long tail says nothing about outliers
_NOTHING = 1e-30  # a share that is drawn below every axis
_NAME = 40  # characters of a name in a legend
_LETTERS = 14  # characters per inch


def lines_page(group: Group[Recorded], kind: str, colors: Colors) -> Page:
    """One panel per activation, one line per model and branch.

    Args:
        group: profiles, at least one of which has what is drawn.
        kind: `layers`, the largest magnitude of each layer, or `magnitudes`, their distribution.
        colors: of the models.
    """
    data = curves(group, kind)
    shown = [name for name in ACTIVATIONS if _drawable(data, name)]
    with style():
        page = Page(DOUBLE if len(shown) > 1 else SINGLE, _HEIGHT)
        set_title(page, *_title(group, data))
        for ax, activation in zip(
            page.subplots(1, len(shown), squeeze=False)[0], shown, strict=True
        ):
            PANELS[kind](ax, group, data, activation, colors)
        legend_below(page, told_apart(model_entries(data, colors) + branch_entries(data)))
        return page


def draw_panel(
    ax: Axes, group: Group[Recorded], kind: str, activation: str, colors: Colors
) -> Axes:
    """Draw one panel of `lines_page` into existing axes, with its own legend."""
    data = curves(group, kind)
    with style():
        PANELS[kind](ax, group, data, activation, colors)
        entries = model_entries(data, colors) + branch_entries(data)
        legend = ax.legend([handle for _, handle in entries], [name for name, _ in entries])
        for text in legend.get_texts():
            text.set_parse_math(False)
        return ax


def heads_page(group: Group[Recorded], colors: Colors) -> Page:
    """The largest attention logit of each layer and head, on one scale.

    One panel per model, or per attention module where a layer holds several.
    """
    data = curves(group, "heads")
    several = data["model"].nunique() > 1
    panels = {
        " ".join([str(model)] * several + ([] if module is None else [module])): (str(model), part)
        for model, rows in data.groupby("model", sort=False)
        for module, part in by_module(rows)
    }
    layers = data.groupby("model")["layer"].nunique().max()
    heads = int(data["head"].max()) + 1
    fit = max(int((DOUBLE - _BAR) / (_CELL * layers + _MARGIN)), 1)
    rows = math.ceil(len(panels) / min(fit, len(panels)))
    columns = math.ceil(len(panels) / rows)
    width = min(_BAR + columns * (_MARGIN + 0.22 * layers), DOUBLE)
    cell = min(max((width - _BAR) / columns - _MARGIN, 0.1) / layers, 0.2)
    height = rows * (0.6 + max(cell, 0.1) * heads)
    with style():
        page = Page(max(width, SINGLE), min(max(0.35 + height, 2.0), _TALLEST))
        set_title(page, *_title(group, data))
        grid = page.subplots(rows, columns, squeeze=False, sharey=False)
        mesh: Any = None
        for ax, (title, (model, part)) in zip(grid.flat, panels.items(), strict=False):
            mesh = draw_heads(ax, part, float(data["absmax"].max()))
            if len(panels) > 1:
                short = shorten_apart(panels, int(ax.bbox.width / page.dpi * _LETTERS))
                ax.set_title(short[title], parse_math=False, color=colors[model])
            if not ax.get_subplotspec().is_last_row() and rows * columns == len(panels):
                ax.set_xlabel("")
            if not ax.get_subplotspec().is_first_col():
                ax.set_ylabel("")
        for empty in list(grid.flat)[len(panels) :]:
            empty.set_axis_off()
        bar = page.colorbar(mesh, ax=grid, pad=0.015, fraction=0.05, aspect=page.bbox.height / 8)
        bar.outline.set_visible(False)
        bar.set_label(f"largest {MAGNITUDE['attention_logits']}")
        return page


def model_entries(data: pd.DataFrame, colors: Colors) -> list[tuple[str, Any]]:
    """Legend entries of the models, in their order."""
    short = shorten_apart(dict.fromkeys(data["model"]), _NAME)
    return [(name, Line2D([], [], color=colors[model])) for model, name in short.items()]


def told_apart(entries: list[tuple[str, Any]]) -> list[tuple[str, Any]]:
    """No entries for a single line, which the figure's title names."""
    return entries if len(entries) > 1 else []


def branch_entries(data: pd.DataFrame) -> list[tuple[str, Any]]:
    """Legend entries of the branches, whose lines have their model's colour."""
    return [
        (f"branch {branch}", Line2D([], [], color="0.4", **_line(branch)))
        for branch in sorted(data["branch"].dropna().unique())
    ]


def _drawable(data: pd.DataFrame, activation: str) -> bool:
    mine = data[data["activation"] == activation]
    return bool((mine["absmax"] if "absmax" in mine else mine["count"]).gt(0).any())


def _title(group: Group[Recorded], data: pd.DataFrame) -> tuple[str, str]:
    models = list(dict.fromkeys(data["model"]))
    name = models[0] if len(models) == 1 else f"{len(models)} models"
    profile = group.members[0].profile
    rest = f"{profile.data['tokens']:,} tokens"
    return name, f"{rest} · partial" if profile.partial else rest


def _line(branch: Any) -> dict[str, Any]:
    return {"linestyle": "--" if branch == 2 else "-"}


def _curves(data: pd.DataFrame, activation: str) -> Any:
    """Each model's lines: its name, branch or NA, and rows."""
    data = data[data["activation"] == activation]
    return (
        (model, branch, line)
        for (model, branch), line in data.groupby(["model", "branch"], dropna=False, sort=False)
    )


def _layers(
    ax: Axes, group: Group[Recorded], data: pd.DataFrame, activation: str, colors: Colors
) -> None:
    seen = data[(data["activation"] == activation) & (data["absmax"] > 0)]
    for model, branch, line in _curves(seen, activation):
        second = not pd.isna(branch) and branch == 2
        ax.plot(
            line["layer"], line["absmax"], color=colors[model], marker="o",
            markerfacecolor="white" if second else colors[model], linestyle="--" if second else "-",
        )  # fmt: skip
    largest = seen["absmax"].max()
    if largest > 10**_DECADES * seen["absmax"].min():
        ax.set_yscale("log")
    else:
        ax.set_ylim(0, largest * 1.08)
    ax.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    ax.set_xlabel("layer")
    ax.set_ylabel(f"largest {MAGNITUDE[activation]}")


def _magnitudes(
    ax: Axes, group: Group[Recorded], data: pd.DataFrame, activation: str, colors: Colors
) -> None:
    data = data[data["high"] > 0]
    for model, branch, line in _curves(data, activation):
        edges = np.append(line["low"], line["high"].iloc[-1])
        # An empty bin lies far below the axis, so that a lone bin beside it reaches the axis.
        shares = line["share_per_octave"].replace(0, _NOTHING).to_numpy(float)
        second = not pd.isna(branch) and branch == 2
        ax.stairs(
            shares, edges, baseline=_NOTHING, color=colors[model],
            linestyle="--" if second else "-",
        )  # fmt: skip
    ax.set_xscale("log")
    ax.set_yscale("log")
    parts = [getattr(recorded.profile, activation) for recorded in group.members]
    starts = [part.percentile(_LEFT_OUT) for part in parts if part.count]
    seen = data[(data["activation"] == activation) & (data["count"] > 0)]
    left = max(min(start for start in starts if start is not None), float(seen["low"].min()))
    shares = seen[seen["high"] > left]["share_per_octave"]
    ax.set_xlim(left, float(seen["high"].max()) * 1.3)
    ax.set_ylim(shares.min() / 3, shares.max() * 3)
    ax.set_xlabel(MAGNITUDE[activation])
    ax.set_ylabel("share of values per octave")


PANELS = {"layers": _layers, "magnitudes": _magnitudes}
