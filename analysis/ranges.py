"""A calibration table as a figure: how far the ranges of each observer reach, layer by layer."""

from typing import Any, TypeAlias

import pandas as pd
from matplotlib.ticker import MaxNLocator

from quantdiff.analysis.style import SINGLE, Page, legend_below, model_colors, set_title, style
from quantdiff.analysis.text import literal
from quantdiff.calibration.table import CalibrationTable

__all__ = ["plot_ranges", "reaches"]

Axes: TypeAlias = Any  # matplotlib's Axes, which are untyped here

_HEIGHT = 2.1  # inches without the legend
_DECADES = 2  # a wider range than this needs a logarithmic axis


def reaches(table: CalibrationTable) -> pd.DataFrame:
    """The reach of a symmetric grid over all heads: one row per layer, one column per observer.

    If a layer has several attention modules, that of the one that reaches farthest.
    """
    frame = table.to_frame()
    frame["reach"] = frame[["least", "most"]].abs().max(axis=1)
    return frame.groupby(["layer", "observer"], sort=False)["reach"].max().unstack("observer")


def plot_ranges(table: CalibrationTable, *, ax: Axes | None = None) -> Any:
    """Draw the ranges of the attention logits, one line per observer.

    Args:
        table: the table.
        ax: draw here instead of in a new figure.

    Returns:
        The new matplotlib Figure (outside of pyplot; notebooks show it, `savefig` writes it), or
        `ax`.
    """
    with style():
        if ax is not None:
            _draw(ax, table)
            ax.legend()
            return ax
        page = Page(SINGLE, _HEIGHT)
        set_title(page, literal(table.model.get("name")), f"{table.data['tokens']:,} tokens")
        panel = page.subplots()
        _draw(panel, table)
        handles, names = panel.get_legend_handles_labels()
        legend_below(page, list(zip(names, handles, strict=True)))
        return page


def _draw(ax: Axes, table: CalibrationTable) -> None:
    data = reaches(table)
    for name, color in model_colors(map(str, data.columns)).items():
        ax.plot(data.index, data[name], marker="o", color=color, label=name)
    values = data.to_numpy(float)
    smallest, largest = values.min(), values.max()
    if smallest > 0 and largest > 10**_DECADES * smallest:
        ax.set_yscale("log")
    else:
        ax.set_ylim(0, largest * 1.08 or 1)
    ax.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    ax.set_xlabel("layer")
    ax.set_ylabel("range, |attention logit|")
