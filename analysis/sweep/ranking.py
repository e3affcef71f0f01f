"""Layers and heads ranked by what it costs to quantize them: tables and figures."""

import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from matplotlib.colors import LogNorm, SymLogNorm
from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from quantdiff.analysis.heads import draw_heads
from quantdiff.analysis.sensitivity import Sensitivity
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
from quantdiff.analysis.sweep.lines import model_labels
from quantdiff.analysis.sweep.saved import remove_others
from quantdiff.analysis.sweep.sensitivities import sensitivity_name
from quantdiff.analysis.text import four_digits, literal
from quantdiff.files import write_bytes

__all__ = [
    "plot_sensitivity",
    "ranking_table",
    "ranking_told",
    "save_sensitivity_figures",
    "scale_costs",
]

_ROWS = 32  # of a terminal table, at most
_PANEL = 2.2  # inches of a panel's height
_CELL = 0.12  # inches of a head's height in a heat map, at least


def ranking_table(one: Sensitivity) -> RenderableType:
    """One row per layer or head, most sensitive at the fewest bits first; one column per width."""
    order = one.ranking(one.bits[-1])
    name = literal(model_labels([one.model])[one.model])
    title = Text(f"{name} · {sensitivity_name(one)} · {literal(one.cost)}", style="bold")
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    for word in ("layer", "head") if one.of_heads else ("layer",):
        table.add_column(word, justify="right")
    for bits in one.bits:
        table.add_column(f"{bits} bits", justify="right")
    for place in order[:_ROWS]:
        told = place if isinstance(place, tuple) else (place,)
        costs = (four_digits(one.costs[place][bits]) for bits in one.bits)
        table.add_row(*map(str, told), *costs)
    more = f"the first {_ROWS} of {len(order)}; all are in the figures' CSV\n"
    return Group(title, table, *[Text(more, style="dim")] * (len(order) > _ROWS))


def ranking_told(one: Sensitivity) -> dict[str, Any]:
    """A ranking as JSON values: places in order by width, and their costs."""
    return {
        "model": one.model,
        "what": sensitivity_name(one),
        "cost": one.cost,
        "ranking": {bits: one.ranking(bits) for bits in one.bits},
        "costs": {
            bits: [one.costs[place][bits] for place in one.ranking(bits)] for bits in one.bits
        },
    }


def plot_sensitivity(one: Sensitivity) -> Any:
    """Draw the cost by layer, one line per width, or a heat map of layers and heads per width.

    Returns:
        A matplotlib Figure, outside pyplot.
    """
    rows = len(one.bits) if one.of_heads else 1
    with style():
        frame = one.frame()
        height = _PANEL
        if one.of_heads:
            height = max(0.7 + _CELL * (int(frame["head"].max()) + 1), 1.5)
        page = Page(DOUBLE if one.of_heads else SINGLE, 0.4 + height * rows)
        name = literal(model_labels([one.model])[one.model])
        set_title(page, name, f"{sensitivity_name(one)}")
        panels = page.subplots(rows, 1, squeeze=False)[:, 0]
        if not one.of_heads:
            lines = _draw_layers(panels[0], one)
            if len(lines) > 1:
                legend_below(page, lines)
            return page
        for ax, bits in zip(panels, one.bits, strict=True):
            data = frame[frame["bits"] == bits].rename(columns={"cost": "absmax"})
            mesh = draw_heads(ax, data.assign(branch=None))
            least, most = data["absmax"].min(), data["absmax"].max()
            linear = _linear(data["absmax"])
            if linear == 0:  # heads are decades apart
                mesh.set_norm(LogNorm(least, most))
            elif linear is not None:
                mesh.set_norm(SymLogNorm(linear, vmin=least, vmax=most, base=10))
            else:
                mesh.set_clim(least, most)
            bar = page.colorbar(mesh, ax=ax, pad=0.015, fraction=0.05)
            bar.outline.set_visible(False)
            bar.set_label(literal(one.cost), parse_math=False)
            ax.set_title(f"{bits} bits")
        return page


def save_sensitivity_figures(every: Sequence[Sensitivity], folder: str | Path) -> list[Path]:
    """Write the figures of some sensitivities as PNG and SVG, and their numbers as CSV.

    Figures of layers, or of heads, that an earlier call left in the folder are removed if this one
    writes any.

    Returns:
        The files: `layers.png`, `heads.png` and so on, numbered where there are several.
    """
    folder = Path(folder)
    if every:
        folder.mkdir(parents=True, exist_ok=True)
    written = []
    for number, one in enumerate(every, start=1):
        kind = "heads" if one.of_heads else "layers"
        stem = folder / (f"{kind}-{number}" if len(every) > 1 else kind)
        written += [*save_page(plot_sensitivity(one), stem), stem.with_name(f"{stem.name}.csv")]
        frame = one.frame().assign(model=one.model, what=sensitivity_name(one), measure=one.cost)
        write_bytes(written[-1], frame.to_csv(index=False, lineterminator="\n").encode())
    for kind in {"heads" if one.of_heads else "layers" for one in every}:
        remove_others(folder, rf"{kind}(-\d+)?", written)
    return written


def scale_costs(ax: Any, costs: Iterable[float]) -> None:
    """Make a vertical axis of costs logarithmic, but linear around 0 if some are not positive."""
    linear = _linear(costs)
    if linear == 0:
        ax.set_yscale("log")
    elif linear is not None:
        ax.set_yscale("symlog", linthresh=linear)


def _linear(costs: Iterable[float]) -> float | None:
    """The magnitude up to which a scale for some costs is linear; beyond it, it is logarithmic.

    Returns:
        0 if all are positive; else about the least positive one, or as far as costs fall below 0 if
        that is more, as less than that is noise; None if none reaches further.
    """
    every = list(costs)
    positive = [cost for cost in every if cost > 0]
    if not positive or len(positive) == len(every):
        return 0.0 if positive else None
    # A power of ten, as the axis has ticks from there on.
    linear = float(10 ** math.ceil(math.log10(max(-min(every), min(positive)))))
    return linear if linear < max(positive) else None


def _draw_layers(ax: Any, one: Sensitivity) -> list[tuple[str, Any]]:
    """Draw one line per width, and return the lines with their names."""
    lines = []
    colors = model_colors([str(bits) for bits in one.bits])
    layers = list(one.costs)
    for bits in one.bits:
        costs = [one.costs[layer][bits] for layer in layers]
        (line,) = ax.plot(layers, costs, marker="o", color=colors[str(bits)])
        lines.append((f"{bits} bits", line))
    scale_costs(ax, [cost for by in one.costs.values() for cost in by.values()])
    ax.set_xlabel("layer that is quantized")
    ax.set_ylabel(literal(one.cost), parse_math=False)
    ax.xaxis.get_major_locator().set_params(integer=True)
    return lines
