"""Attention maps as a table and a figure: what the papers claim about them, layer by layer."""

from collections.abc import Sequence
from itertools import cycle
from typing import Any

import pandas as pd
from matplotlib.ticker import MaxNLocator
from rich.table import Table

from quantdiff.analysis.modules import MARKERS, by_module, own_names
from quantdiff.analysis.style import DOUBLE, Page, model_colors, set_title, style
from quantdiff.analysis.text import UNKNOWN, literal, number
from quantdiff.statistics.maps import MapStatistics
from quantdiff.statistics.profile import Profile

__all__ = ["least_norm", "maps_frame", "maps_table", "plot_maps"]

_LINES = {"softmax": "-", "difference": "-.", "branch 1": "--", "branch 2": ":"}
_NAMES = {"softmax": "softmax", "difference": "map 1 − λ·map 2", "branch 1": "map 1",
          "branch 2": "map 2"}  # fmt: skip
_WHOLE_ROW = 1 - 1e-4  # the least that a sum of 1 comes to in fp32
_LABELS = {"negative_mass": "negative mass Σ|w|, w < 0", "entropy": "entropy (nats)"}


def maps_frame(profile: Profile) -> pd.DataFrame:
    """One row per attention module and kind of map, with measures over all its heads.

    `name` is a module's full name, `module` its name within its layer.

    Raises:
        UsageError: the maps were not measured.
    """
    profile.maps_frame()  # raises and says how to measure maps
    names = own_names(profile)
    return pd.DataFrame([
        {"name": site.name, "module": names[site.name], "layer": site.layer, "kind": site.kind}
        | site.summary
        for site in profile.maps or []
    ])  # fmt: skip


def least_norm(sites: Sequence[MapStatistics], longest: int) -> float:
    """A lower bound on the context RMS of every row of some maps.

    This is 1/√n for weights that sum to 1 over n keys, and 0 for differences, for maps where a
    learned sink takes a share of the weights, and for cross-attention, whose n is not the sequence
    length.

    Args:
        sites: measures of the maps.
        longest: tokens of the longest sequence.
    """
    bounded = all(
        site.kind != "difference"
        and not site.name.endswith("(cross-attention)")
        and float(site.least["row_sum"].min()) >= _WHOLE_ROW
        for site in sites
    )
    return longest**-0.5 if bounded else 0.0


def maps_table(profile: Profile) -> Table:
    """The maps that weight the values, one row per attention module."""
    sites = [site for site in profile.maps or [] if site.kind in ("softmax", "difference")]
    several = len(by_module(maps_frame(profile))) > 1
    names = own_names(profile)
    differential = any(site.kind == "difference" for site in sites)
    spanned = any(site.counts["span_rows"].any() for site in sites)
    table = Table(
        title="attention maps, by layer: means over rows", title_justify="left",
        title_style="bold", box=None, pad_edge=False, padding=(0, 1, 0, 0),
    )  # fmt: skip
    columns = ["layer", *["module"] * several, *["λ"] * differential, "sum",
               *["negative"] * differential, "sink", "entropy", "RMS min", "median", "max",
               "similarity", *["span", "rest"] * spanned]  # fmt: skip
    for column in columns:
        table.add_column(column, justify="left" if column == "module" else "right")
    for site in sites:
        s = site.summary
        module = [names[site.name]] * several
        lam = [_lambda(profile, site)] * differential
        negative = [_cell(s["negative_mass"])] * differential
        span = [_cell(s["span_mass"]), _cell(s["rest_mass"])] * spanned
        table.add_row(
            str(site.layer), *module, *lam, _cell(s["row_sum"]), *negative, _cell(s["sink"]),
            _cell(s["entropy"]), *(_cell(s[f"context_rms_{x}"]) for x in ("min", "median", "max")),
            _cell(s["similarity"]), *span,
        )  # fmt: skip
    gains = [float(gain) for site in sites if (gain := site.summary.get("norm_gain_max"))]
    told = "sum: Σw; negative: Σ|w| over w < 0; sink: w on the first token; RMS: ‖w‖₂"
    if gains and not profile.lambdas:
        told += f"; an RMS norm over the heads amplifies by up to {number(max(gains))}"
    table.caption, table.caption_justify = told, "left"
    return table


def plot_maps(profile: Profile) -> Any:
    """Draw sinks, negative mass (entropy for softmax) and context RMS by layer, in a new figure.

    Raises:
        UsageError: the maps were not measured.
    """
    data = maps_frame(profile)
    color = model_colors([str(profile.model.get("name"))])[str(profile.model.get("name"))]
    kinds = [kind for kind in _LINES if (data["kind"] == kind).any()]
    longest, least = int(profile.data["sequence_length"]), 0.0
    with style():
        page = Page(DOUBLE, 2.4)
        set_title(page, literal(profile.model.get("name")), f"{profile.data['tokens']:,} tokens")
        sink, middle, norm = page.subplots(1, 3)
        # Softmax has no negative weights to show.
        measure = "negative_mass" if "difference" in kinds else "entropy"
        drawn = [
            (kind, module, marker, part[part["kind"] == kind])
            for (module, part), marker in zip(by_module(data), cycle(MARKERS), strict=False)
            for kind in kinds
            if (part["kind"] == kind).any()
        ]
        for kind, module, marker, part in drawn:
            names = set(part["name"])
            sites = [s for s in profile.maps or [] if s.kind == kind and s.name in names]
            least = max(least, least_norm(sites, longest))
            look = {
                "color": color, "linestyle": _LINES[kind], "marker": marker,
                "label": _NAMES[kind] if module is None else f"{_NAMES[kind]}, {module}",
                "alpha": 1.0 if kind in ("softmax", "difference") else 0.6,
            }  # fmt: skip
            sink.plot(part["layer"], part["sink"], **look)
            if kind in ("softmax", "difference"):
                middle.plot(part["layer"], part[measure], **look)
                norm.plot(part["layer"], part["context_rms_median"], **look | {"label": "median"})
                norm.fill_between(
                    part["layer"], part["context_rms_min"], part["context_rms_max"], color=color,
                    alpha=0.15, linewidth=0, label="min to max",
                )  # fmt: skip
        ends = [(least, "1/√n")] * (least > 0) + [(1.0, "1")]
        if profile.lambdas:
            ends.append((2**0.5, "√2"))
        for value, word in ends:
            norm.axhline(value, color="0.4", linewidth=0.6, linestyle=":")
            norm.annotate(
                word, (1, value), xycoords=("axes fraction", "data"), xytext=(-2, 1),
                textcoords="offset points", ha="right", va="bottom", fontsize=7, color="0.25",
            )  # fmt: skip
        norm.set_yscale("log")
        middle.set_ylim(bottom=0)
        for ax, label in (
            (sink, "weight on the first token"), (middle, _LABELS[measure]),
            (norm, f"context RMS ‖w‖₂, n ≤ {longest:,}"),
        ):  # fmt: skip
            ax.set_xlabel("layer")
            ax.set_ylabel(label)
            ax.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
        if len(drawn) > 1:  # in a strip of its own, so that it never covers data
            low, high = sink.get_ylim()
            sink.set_ylim(low, high + 0.4 * max(len(drawn) / 3, 1) * (high - low))
            sink.legend(loc="upper left")
        return page


def _cell(value: float | None) -> str:
    if value is None:
        return UNKNOWN
    return "0" if value == 0 else f"{value:.3f}" if 1e-3 <= abs(value) < 100 else number(value)


def _lambda(profile: Profile, site: MapStatistics) -> str:
    """λ of a layer: its value or, in V2, the mean over tokens and pairs."""
    for other in profile.lambdas:
        if other.layer == site.layer and other.moments is not None:
            return _cell(float(other.moments.total().mean[0]))
    layers = profile.model.get("lambda")
    return _cell(layers[site.layer] if layers else None)
