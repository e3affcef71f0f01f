"""Figures of differential models: λ by depth, maps by depth, noise before and after subtracting."""

from collections.abc import Mapping
from itertools import cycle
from typing import Any, TypeAlias

import numpy as np
import pandas as pd
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from quantdiff.analysis.compare.outlier_figures import model_entries, told_apart
from quantdiff.analysis.modules import MARKERS, by_module
from quantdiff.analysis.style import DOUBLE, SINGLE, Page, legend_below, set_title, style

__all__ = ["draw_lambda", "lambda_page", "maps_page", "noise_page"]

Axes: TypeAlias = Any  # matplotlib's, which has no types here
Colors: TypeAlias = Mapping[str, Any]

_HEIGHT = 2.3  # inches
_KINDS = {"softmax": "-", "difference": "-.", "branch 1": "--", "branch 2": ":"}
_MAIN = ("softmax", "difference")  # the maps that weigh the values
_NOISE = {
    "snr_softmax": ("softmax", "-"), "snr_difference": ("difference", "-"),
    "snr_branch_1": ("map 1", "--"), "snr_branch_2": ("map 2", ":"),
}  # fmt: skip


def lambda_page(data: pd.DataFrame, colors: Colors) -> Page:
    """λ by depth, one line per model, from `differential.lambdas`.

    Where λ varies per token, the line is its mean and the band holds 90 % of its values.
    """
    with style():
        page = Page(SINGLE, _HEIGHT)
        set_title(page, *_title(data, "λ by depth"))
        draw_lambda(page.subplots(), data, colors)
        legend_below(page, told_apart(model_entries(data, colors)))
        return page


def draw_lambda(ax: Axes, data: pd.DataFrame, colors: Colors) -> None:
    """One panel of λ by depth."""
    for model, line in data.groupby("model", sort=False):
        color = colors[str(model)]
        ax.plot(line["layer"], line["mean"], color=color, marker="o", label=model)
        spread = line.dropna(subset=["low", "high"])
        if len(spread):
            ax.fill_between(
                spread["layer"], spread["low"], spread["high"], color=color, alpha=0.15, linewidth=0
            )  # fmt: skip
    _layers(ax, "λ")


def maps_page(data: pd.DataFrame, longest: int, bounds: pd.DataFrame, colors: Colors) -> Page:
    """Sinks, negative mass and context RMS by depth, one line per model and attention module.

    Args:
        data: one row per model, layer and kind of map, from `outliers.curves(group, "maps")`.
        longest: tokens of the longest sequence, n.
        bounds: from `differential.maps`; the largest `upper` is drawn where all are known.
        colors: of the models.
    """
    differential = bool((data["kind"] == "difference").any())
    upper = float(bounds["upper"].max(skipna=False))
    modules: dict[tuple[str, str], None] = {}  # of layers that hold several, with markers
    with style():
        page = Page(DOUBLE, _HEIGHT + 0.1)
        set_title(page, *_title(data, "attention maps by depth"))
        sink, middle, norm = page.subplots(1, 3)
        measure = "negative_mass" if differential else "entropy"
        drawn = [
            (model, kind, module, marker, line)
            for model, rows in data.groupby("model", sort=False)
            for (module, part), marker in zip(by_module(rows), cycle(MARKERS), strict=False)
            for kind, line in part.groupby("kind", sort=False)
        ]
        for model, kind, module, marker, line in drawn:
            color = colors[str(model)]
            look = {"color": color, "linestyle": _KINDS[str(kind)], "marker": marker}
            if module is not None:
                modules[module, marker] = None
            sink.plot(line["layer"], line["sink"], **look, alpha=1.0 if kind in _MAIN else 0.6)
            if kind in _MAIN:
                middle.plot(line["layer"], line[measure], **look)
                norm.plot(line["layer"], line["context_rms_median"], **look)
                norm.fill_between(
                    line["layer"], line["context_rms_min"], line["context_rms_max"], color=color,
                    alpha=0.1, linewidth=0,
                )  # fmt: skip
        norm.set_yscale("log")
        # Labels on opposite sides of two lines that may lie close together.
        ends = [(longest**-0.5, "1/√n", "center")] * bool(bounds["lower"].gt(0).any())
        ends += [(1.0, "1", "top" if differential else "center")]
        most = (2**0.5, "√2", "bottom") if upper <= 2**0.5 else (upper, f"{upper:.3g}", "bottom")
        ends += [most] * (differential and not np.isnan(upper))
        for value, word, side in ends:
            norm.axhline(value, color="0.4", linewidth=0.6, linestyle=":")
            norm.annotate(
                word, (1, value), xycoords=("axes fraction", "data"), xytext=(2, 0),
                textcoords="offset points", ha="left", va=side, fontsize=7, color="0.25",
            )  # fmt: skip
        middle.set_ylim(bottom=0)
        _layers(sink, "weight on the first token")
        _layers(middle, "negative mass Σ|w|, w < 0" if differential else "entropy (nats)")
        _layers(norm, f"context RMS ‖w‖₂, n ≤ {longest:,}")
        entries = model_entries(data, colors)
        if differential:
            entries += [
                (name.replace("branch", "map"), Line2D([], [], color="0.4", linestyle=_KINDS[name]))
                for name in ("difference", "branch 1", "branch 2")
            ]
        entries += [
            (module, Line2D([], [], color="0.4", marker=marker)) for module, marker in modules
        ]
        legend_below(page, told_apart(entries))
        return page


def noise_page(data: pd.DataFrame, colors: Colors) -> Page:
    """Signal to noise of the maps before and after the subtraction, and how much noise cancels.

    Args:
        data: from `differential.noise`, one scheme.
        colors: of the models.
    """
    widths = sorted(data["bits"].unique(), reverse=True)
    places = {bits: place for place, bits in enumerate(widths)}
    cancels = "cancellation" in data and bool(data["cancellation"].notna().any())
    with style():
        page = Page(DOUBLE if cancels else SINGLE, _HEIGHT)
        set_title(page, *_title(data, str(data["scheme"].iloc[0])))
        ax, *rest = page.subplots(1, 1 + cancels, squeeze=False)[0]
        shown = [name for name in _NOISE if name in data and data[name].notna().any()]
        for model, part in data.groupby("model", sort=False):
            color = colors[str(model)]
            x = part["bits"].map(places)
            for name in shown:
                if part[name].notna().any():
                    line = _NOISE[name][1]
                    ax.plot(x, part[name], color=color, marker="o", linestyle=line)
            for other in rest:
                if part["cancellation"].notna().any():
                    other.plot(x, part["cancellation"], color=color, marker="o")
        ax.set_ylabel("signal to noise of maps, dB")
        for other in rest:
            other.axhline(1, color="0.4", linewidth=0.6, linestyle=":")
            other.set_ylabel("noise / independent noise")
        for each in (ax, *rest):
            each.set_xticks(list(places.values()), [str(bits) for bits in places])
            each.set_xlim(-0.35, len(places) - 0.65)
            each.set_xlabel("bits")
        kinds: dict[str, str] = {}
        for name in shown:
            word, look = _NOISE[name]
            kinds[look] = f"{kinds[look]}, {word}" if look in kinds else word
        lines = [(word, Line2D([], [], color="0.4", linestyle=k)) for k, word in kinds.items()]
        legend_below(page, model_entries(data, colors) + (lines if len(lines) > 1 else []))
        return page


def _title(data: pd.DataFrame, what: str) -> tuple[str, str]:
    models = list(dict.fromkeys(data["model"]))
    return (models[0] if len(models) == 1 else f"{len(models)} models"), what


def _layers(ax: Axes, label: str) -> None:
    ax.set_xlabel("layer")
    ax.set_ylabel(label)
    ax.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
