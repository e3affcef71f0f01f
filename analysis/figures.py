"""The figures of one profile: extremes by layer and by head, and the spread of the magnitudes."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pandas as pd
from matplotlib.ticker import MaxNLocator

from quantdiff.analysis.channels import channel_kinds, plot_channels
from quantdiff.analysis.frames import KINDS, MAGNITUDE, activations_of, figure_data
from quantdiff.analysis.heads import draw_heads
from quantdiff.analysis.maps import plot_maps
from quantdiff.analysis.modules import by_module
from quantdiff.analysis.style import (
    DOUBLE,
    SINGLE,
    Page,
    model_colors,
    save_page,
    set_title,
    style,
)
from quantdiff.analysis.text import literal, number
from quantdiff.errors import UsageError
from quantdiff.files import write_bytes
from quantdiff.statistics.profile import Profile

__all__ = ["plot", "save_figures"]

Axes: TypeAlias = Any  # matplotlib's Axes, which are untyped here

_HEIGHT = 2.3  # inches, of figures other than the heat map
_DECADES = 2  # a wider range than this needs a logarithmic axis
_NOTHING = 1e-30  # drawn in place of a share of 0, far below every axis
_LEFT_OUT = 0.1  # percentile below which the long tail says nothing about outliers


def plot(
    profile: Profile, kind: str = "layers", *, activation: str | None = None, ax: Axes | None = None
) -> Any:
    """Draw a figure of a profile.

    Args:
        profile: what was recorded.
        kind: "layers": the largest attention logit and hidden state of each layer; "heads": the
            largest attention logit of each layer and head, as a heat map, or one for each attention
            module of a layer; "magnitudes": the distribution of magnitudes; "maps": sinks, negative
            mass (entropy for softmax) and context RMS of the attention maps by layer, if they were
            measured; "channels": the channels of linear inputs, keys, values and hidden states by
            their largest magnitude, if they were recorded.
        activation: "attention_logits" or "hidden_states"; None draws a panel for each or, if
            `ax` is given, the attention logits.
        ax: draw one panel here instead of in a new figure.

    Returns:
        The new matplotlib Figure (outside of pyplot; notebooks show it, `savefig` writes it), or
        `ax`.

    Raises:
        UsageError: an unknown kind or activation, heads of hidden states, magnitudes of a
            recording that kept only extremes, maps or channels that were not measured, or `ax` for
            several panels.
    """
    if kind in _WHOLE:
        if ax is not None or activation is not None:
            raise UsageError(f"the figure of the {kind} has panels of its own: give kind alone")
        return _WHOLE[kind](profile)
    data = figure_data(profile, kind)
    shown = activations_of(profile, activation)
    if kind == "heads":
        if activation == "hidden_states":
            raise UsageError("hidden states have no heads; draw them with kind='layers'")
        shown = shown[:1]
    draw = _PANELS[kind]
    parts: list[tuple[str | None, pd.DataFrame]] = [(None, data)]
    if kind == "heads":
        parts = by_module(data)
    if ax is not None and len(parts) > 1:
        raise UsageError(
            f"the layers hold {len(parts)} attention modules each, whose heads have panels of "
            "their own: leave ax out"
        )
    with style():
        name, rest = literal(profile.model.get("name")), _about(profile)
        if ax is not None:
            draw(ax, profile, data, shown[0])
            set_title(ax, name, rest)
            return ax
        page = Page(*_size(kind, data, len(shown)))
        # Before the panels: the layout is fitted around it.
        set_title(page, name, rest)
        grid = page.subplots(len(parts), len(shown), squeeze=False)
        for (module, part), row in zip(parts, grid, strict=True):
            for panel, which in zip(row, shown, strict=True):
                draw(panel, profile, part, which)
                if module is not None:
                    panel.set_title(module, parse_math=False)
        return page


def save_figures(profile: Profile, folder: str | Path) -> list[Path]:
    """Write every figure of a profile as PNG and SVG, and its numbers as CSV.

    The same profile gives the same bytes. A profile with only extremes has no figure of magnitudes,
    and one without maps or channels has no figure of those.

    Returns:
        The files: `layers.png`, `layers.svg`, `layers.csv`, and so on.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for kind in KINDS:
        if kind == "magnitudes" and profile.detail == "extremes":
            continue
        if kind == "maps" and not profile.maps:
            continue
        if kind == "channels" and not channel_kinds(profile):
            continue
        written += save_page(plot(profile, kind), folder / kind)
        written.append(folder / f"{kind}.csv")
        table = figure_data(profile, kind).to_csv(index=False, lineterminator="\n")
        write_bytes(written[-1], table.encode())
    return written


def _about(profile: Profile) -> str:
    tokens = f"{profile.data['tokens']:,} tokens"
    return f"{tokens} · partial" if profile.partial else tokens


def _size(kind: str, data: pd.DataFrame, panels: int) -> tuple[float, float]:
    """Width and height in inches; the cells of a heat map are about square."""
    if kind != "heads":
        return (SINGLE if panels == 1 else DOUBLE), _HEIGHT
    heads = [int(part["head"].max()) + 1 for _, part in by_module(data)]
    layers = data["layer"].nunique()
    margin = 1.25  # axis labels and colour bar
    cell = min((DOUBLE - margin) / layers, 0.22)
    width = max(margin + cell * layers, SINGLE)
    return width, min(sum(max(0.65 + max(cell, 0.1) * count, 1.8) for count in heads), 9)


def _color(profile: Profile) -> Any:
    name = str(profile.model.get("name"))
    return model_colors([name])[name]


# The panels


def _draw_layers(ax: Axes, profile: Profile, data: pd.DataFrame, activation: str) -> None:
    data = data[(data["activation"] == activation) & (data["absmax"] > 0)]
    color = _color(profile)
    for branch, line in _by_branch(data):
        ax.plot(
            line["layer"], line["absmax"], color=color, marker="o",
            markerfacecolor="white" if branch == 2 else color, **_line(branch),
        )  # fmt: skip
    largest = data["absmax"].max() if len(data) else 1.0
    if len(data) and largest > 10**_DECADES * data["absmax"].min():
        ax.set_yscale("log")
    else:
        ax.set_ylim(0, largest * 1.08)
    ax.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    ax.set_xlabel("layer")
    ax.set_ylabel(f"largest {MAGNITUDE[activation]}")
    _legend(ax)


def _draw_heads(ax: Axes, profile: Profile, data: pd.DataFrame, activation: str) -> None:
    mesh = draw_heads(ax, data, profile.attention_logits.absmax)
    height = ax.bbox.height / ax.figure.dpi
    bar = ax.figure.colorbar(mesh, ax=ax, pad=0.015, fraction=0.05, aspect=height / 0.08)
    bar.outline.set_visible(False)
    bar.set_label(f"largest {MAGNITUDE[activation]}")


def _draw_magnitudes(ax: Axes, profile: Profile, data: pd.DataFrame, activation: str) -> None:
    part = getattr(profile, activation)
    data = data[data["activation"] == activation]
    color = _color(profile)
    zeros, data = data[data["high"] == 0], data[data["high"] > 0]
    for branch, curve in _by_branch(data):
        edges = np.append(curve["low"], curve["high"].iloc[-1])
        # Empty bins are drawn far below the axis, so that isolated bins reach down to it.
        shares = curve["share_per_octave"].replace(0, _NOTHING).to_numpy(float)
        if branch != 2:
            ax.stairs(shares, edges, baseline=_NOTHING, fill=True, color=color, alpha=0.12)
        ax.stairs(shares, edges, baseline=_NOTHING, color=color, **_line(branch))
    ax.set_xscale("log")
    ax.set_yscale("log")
    seen = data[data["count"] > 0]
    if len(seen):
        left = max(part.percentile(_LEFT_OUT), float(seen["low"].min()))
        seen = seen[seen["high"] > left]["share_per_octave"]
        ax.set_xlim(left, part.absmax * 1.6)
        ax.set_ylim(seen.min() / 3, seen.max() * 8)
    for value, word in ((part.median, "median"), (part.absmax, "top-1")):
        if not value:
            continue
        ax.axvline(value, color="0.4", linewidth=0.6, linestyle=":")
        # To the left of the line: under the curve's rise, or above its fall.
        at, shift, va = (1, -2, "top") if word == "top-1" else (0, 3, "bottom")
        ax.annotate(
            f"{word} {number(value)}", (value, at), xycoords=("data", "axes fraction"),
            xytext=(-2, shift), textcoords="offset points", ha="right", va=va, fontsize=7,
            color="0.25",
        )  # fmt: skip
    label = MAGNITUDE[activation]
    if len(zeros):
        label += f" ({zeros['count'].sum() / max(part.count, 1):.2g} of all are zero)"
    ax.set_xlabel(label)
    ax.set_ylabel("share of values per octave")
    _legend(ax)


def _by_branch(data: pd.DataFrame) -> Iterator[tuple[int | None, pd.DataFrame]]:
    for branch in sorted(data["branch"].dropna().unique()):
        yield int(branch), data[data["branch"] == branch]
    if data["branch"].isna().any():
        yield None, data[data["branch"].isna()]


def _line(branch: int | None) -> dict[str, Any]:
    """Label and line style of a branch; both branches share the model's colour."""
    if branch is None:
        return {}
    return {"label": f"branch {branch}", "linestyle": "--" if branch == 2 else "-"}


def _legend(ax: Axes) -> None:
    """A legend in a strip of its own at the top, so that it never covers data."""
    if len(ax.get_legend_handles_labels()[1]) < 2:
        return
    low, high = ax.get_ylim()
    log = ax.get_yscale() == "log"
    ax.set_ylim(low, high * (high / low) ** 0.15 if log else high + 0.15 * (high - low))
    ax.legend(loc="upper left", ncols=2)


_PANELS: dict[str, Callable[[Axes, Profile, pd.DataFrame, str], None]] = {
    "layers": _draw_layers,
    "heads": _draw_heads,
    "magnitudes": _draw_magnitudes,
}
_WHOLE: dict[str, Callable[[Profile], Any]] = {"maps": plot_maps, "channels": plot_channels}
