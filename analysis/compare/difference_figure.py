"""The figure of paired differences: how far each model is from the first, width by width."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd

from quantdiff.analysis.compare.outlier_figures import model_entries
from quantdiff.analysis.style import DOUBLE, SINGLE, Page, legend_below, style
from quantdiff.analysis.text import shorten

__all__ = ["difference_data", "difference_page"]

_HEIGHT = 2.2  # inches per row of panels
_APART = 0.1  # of the step between two widths, so that intervals do not overlap
_SPREAD = 0.6  # of that step, at most, for all models together
_COLUMNS = 3
_TITLE = 60  # characters


def difference_data(frame: pd.DataFrame) -> pd.DataFrame:
    """The part of `differences.Differences.models` that is drawn: the first scheme, and 16 bits."""
    schemes = [scheme for scheme in dict.fromkeys(frame["scheme"]) if scheme != "not quantized"]
    wanted = {"not quantized", *schemes[:1]}
    return frame[frame["scheme"].isin(wanted)].reset_index(drop=True)


def difference_page(data: pd.DataFrame, colors: Mapping[str, Any]) -> Page:
    """One panel per metric, one line per model, and bars for the 95 % intervals.

    Args:
        data: from `difference_data`, with at least one row.
        colors: of the models.
    """
    metrics = list(dict.fromkeys(data["metric"]))
    models = list(dict.fromkeys(data["model"]))
    widths = sorted(data["bits"].unique(), reverse=True)
    columns = min(len(metrics), _COLUMNS)
    rows = -(-len(metrics) // columns)
    with style():
        page = Page(DOUBLE if columns > 1 else SINGLE, _HEIGHT * rows)
        told = ", ".join(name for name in dict.fromkeys(data["scheme"]) if name != "not quantized")
        title = f"difference from {shorten(data['baseline'].iloc[0], _TITLE // 2)}, 95 % intervals"
        page.suptitle(f"{title}\n{shorten(told, _TITLE)}" if told else title, parse_math=False)
        grid = page.subplots(rows, columns, squeeze=False)
        for ax, metric in zip(grid.flat, metrics, strict=False):
            ax.axhline(0, color="0.4", linewidth=0.6, linestyle=":")
            for place, model in enumerate(models):
                mine = data[(data["metric"] == metric) & (data["model"] == model)]
                mine = mine.sort_values("bits", ascending=False)
                apart = min(_APART, _SPREAD / len(models))
                shift = apart * (place - (len(models) - 1) / 2)
                x = np.array([widths.index(bits) for bits in mine["bits"]]) + shift
                color = colors[model]
                ax.plot(x, mine["difference"], color=color, marker="o")
                # No error bars: an interval need not contain the difference.
                ax.vlines(x, mine["low"], mine["high"], color=color, linewidth=0.8)
            ax.set_xticks(range(len(widths)), [str(bits) for bits in widths])
            ax.set_xlim(-0.35, len(widths) - 0.65)
            ax.set_xlabel("bits")
            ax.set_ylabel(f"Δ {shorten(metric, 24)}", parse_math=False)
        for empty in list(grid.flat)[len(metrics) :]:
            empty.set_axis_off()
        legend_below(page, model_entries(data, colors))
        return page
