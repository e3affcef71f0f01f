"""Heat map of a model's heads: the largest attention logit of each layer and head."""

from typing import Any, TypeAlias

import numpy as np
import pandas as pd
from matplotlib.ticker import FixedLocator, FuncFormatter

from quantdiff.analysis.style import heat_map

__all__ = ["draw_heads"]

Axes: TypeAlias = Any  # matplotlib's Axes, which are untyped here


def draw_heads(ax: Axes, data: pd.DataFrame, largest: float | None = None) -> Any:
    """Draw the heads of one model, one branch above the other if all layers agree on the branches.

    Args:
        ax: the panel.
        data: one row per layer and head with `branch` and `absmax`, as from `figure_data`; with one
            module per layer, see `by_module`.
        largest: upper end of the colour scale, which starts at 0; None for the largest value.

    Returns:
        The mappable for a colour bar.
    """
    table = data.pivot(index="head", columns="layer", values="absmax")
    by_head = data.groupby("head")["branch"]
    agreed = bool(by_head.nunique(dropna=False).eq(1).all())
    branches: list[int | None] = [None] * len(table)
    if agreed:
        # One branch above the other, whichever heads the layout pairs.
        kinds = by_head.first().sort_values(kind="stable", na_position="first")
        table = table.loc[kinds.index]
        branches = [None if pd.isna(branch) else int(branch) for branch in kinds]
    ax.set_facecolor("0.85")  # heads that a layer does not have
    mesh = ax.pcolormesh(
        np.ma.masked_invalid(table.to_numpy()), cmap=heat_map(), vmin=0, vmax=largest,
        edgecolors="face", linewidth=0.1,
    )  # fmt: skip
    for branch in sorted({branch for branch in branches if branch is not None}):
        rows = [row for row, other in enumerate(branches) if other == branch]
        if rows[0]:
            ax.axhline(rows[0], color="white", linewidth=2)
        ax.text(
            1.01, rows[0] + len(rows) / 2, f"branch {branch}", transform=ax.get_yaxis_transform(),
            rotation=270, ha="left", va="center", fontsize=7,
        )  # fmt: skip
    if not agreed:
        ax.text(
            1.01, 0.5, "branches differ\nby layer", transform=ax.transAxes, rotation=270, ha="left",
            va="center", fontsize=7,
        )  # fmt: skip
    width, height = ax.bbox.width / ax.figure.dpi, ax.bbox.height / ax.figure.dpi
    _cell_ticks(ax.xaxis, table.columns, width, 0.2)
    _cell_ticks(ax.yaxis, table.index, height, 0.12)
    ax.set_xlabel("layer")
    ax.set_ylabel("head")
    return mesh


def _cell_ticks(axis: Any, names: pd.Index, inches: float, apart: float) -> None:
    """Label every cell of a heat map, or every n-th where they would touch."""
    need = apart * len(names) / max(inches, 0.1)
    step = next(n for n in (1, 2, 4, 5, 8, 10, 16, 20, 32, 64, 128, len(names)) if n >= need)
    places = range(0, len(names), step)
    axis.set_major_locator(FixedLocator([place + 0.5 for place in places]))
    axis.set_major_formatter(FuncFormatter(lambda at, _: str(names[int(at)])))
