"""Outliers along channels and tokens of every recorded kind of site, as tables and a figure."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from rich import box
from rich.table import Table

from quantdiff.analysis.style import DOUBLE, SINGLE, Page, heat_map, set_title, style
from quantdiff.analysis.text import UNKNOWN, literal, number
from quantdiff.errors import UsageError
from quantdiff.statistics.activations import RECORDED, Values
from quantdiff.statistics.profile import Profile
from quantdiff.statistics.site import SiteStatistics

__all__ = ["channel_kinds", "channels_frame", "channels_tables", "plot_channels"]

WORDS = {
    "linear_inputs": "linear inputs", "keys": "keys", "values": "values",
    "hidden_states": "hidden states",
}  # fmt: skip
_RANKS = 48  # points per curve, evenly spaced on a logarithmic scale
_TOLD = (
    "×: the largest value over that of the median channel, of the median token; most in: the "
    "channel, and the place of the tokens, with the greatest share of the largest values kept"
)


def channel_kinds(profile: Profile) -> dict[str, Values]:
    """The kinds of sites whose channels were recorded."""
    parts = {**profile.sites, "hidden_states": profile.hidden_states}
    return {
        kind: parts[kind]
        for kind in RECORDED
        if kind in parts and any(site.channels is not None for site in parts[kind].sites)
    }


def channels_tables(profile: Profile, n: int = 5) -> list[Table]:
    """For each kind of site, the n modules (heads for keys and values) with the largest values."""
    tables = []
    for kind, part in channel_kinds(profile).items():
        of = {"linear_inputs": "module", "hidden_states": ""}.get(kind, "head")
        table = Table(
            box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 0), title_justify="left",
            title_style="bold", title=f"largest {WORDS[kind]}, by {of or 'layer'}",
        )  # fmt: skip
        table.add_column("layer", justify="right", no_wrap=True)
        if of:
            justify: Any = "left" if of == "module" else "right"
            table.add_column(of, justify=justify, no_wrap=True)
        for column in ("largest", "median", "token", "channel", "×\nchannel", "×\ntoken",
                       "most in\nchannel", "most in\ntoken"):  # fmt: skip
            table.add_column(column, justify="right", no_wrap=True)
        for worst in _worst(part, n):
            named = {"module": _named(part, worst.site), "head": str(worst.group), "": None}[of]
            table.add_row(*_cells(part, worst, named))
        table.caption, table.caption_justify = _TOLD, "left"
        tables.append(table)
    for table in tables[:-1]:
        table.caption = None  # shown once, at the end
    return tables


class _Worst(NamedTuple):
    """A group of a site and its row of statistics."""

    site: SiteStatistics
    group: int
    row: dict[str, float | int | None]


def _worst(part: Values, n: int) -> list[_Worst]:
    found = [
        _Worst(site, g, row)
        for site in part.sites
        for g, row in enumerate(site.rows())
        if site.count[g]
    ]
    return sorted(found, key=lambda worst: -float(worst.site.absmax[worst.group]))[:n]


def _cells(part: Values, worst: _Worst, named: str | None) -> list[str]:
    site, group, row = worst
    places = [
        item
        for item in part.items(site.top)
        if not part.heads or item.head == group  # without heads there is only one group
    ]
    at = [UNKNOWN] * 2 if not places else [str(places[0].token), str(places[0].channel)]
    shares = [
        UNKNOWN if row[which] is None else f"{row[f'{which}_share']:.0%} {row[which]}"
        for which in ("top_channel", "top_token")
    ]
    return [
        str(site.layer), *([] if named is None else [named]), number(row["absmax"]),
        number(row["median"]), *at, number(row["channel_ratio"]), number(row["token_ratio"]),
        *shares,
    ]  # fmt: skip


def _named(part: Values, site: SiteStatistics) -> str:
    """The fewest trailing parts of a module's name that are unique in its layer."""
    words = site.name.split(".")
    others = [other.name.split(".") for other in part.sites if other.layer == site.layer]
    for count in range(1, len(words)):
        if sum(other[-count:] == words[-count:] for other in others) == 1:
            return literal(".".join(words[-count:]))
    return literal(site.name)


def channels_frame(profile: Profile) -> pd.DataFrame:
    """The largest magnitude of each channel, in descending order, at some ranks.

    One row per kind, layer and rank, for the layer's module and head with the largest value.

    Raises:
        UsageError: no channels were recorded.
    """
    kinds = channel_kinds(profile)
    if not kinds:
        raise UsageError(
            f"this profile has no channels; record(model, sites=({', '.join(map(repr, RECORDED))}))"
            " or --sites all records them"
        )
    return pd.DataFrame([
        {"activation": kind, "name": site.name, "layer": layer, "head": head, "channels": len(line),
         "rank": int(rank), "absmax": float(line[rank - 1])}
        for kind, part in kinds.items()
        for layer, site, head, line in _lines(part)
        for rank in _ranks(len(line))
    ]).astype({"head": "Int64"})  # fmt: skip


def _lines(part: Values) -> Iterator[tuple[int, SiteStatistics, int | None, np.ndarray[Any, Any]]]:
    for layer in sorted({site.layer for site in part.sites}):
        several = [s for s in part.sites if s.layer == layer and s.channels is not None]
        site = max(several, key=lambda s: float(s.absmax.max()))
        head = int(site.absmax.argmax())
        assert site.channels is not None
        line = np.sort(site.channels.absmax[head])[::-1]
        yield layer, site, head if part.heads else None, line


def _ranks(count: int) -> list[int]:
    return sorted(set(np.geomspace(1, count, _RANKS).round().astype(int).tolist()))


def plot_channels(profile: Profile) -> Any:
    """Draw the channels' largest magnitudes in descending order, a line per layer, in a new figure.

    Raises:
        UsageError: no channels were recorded.
    """
    data = channels_frame(profile)
    kinds = list(channel_kinds(profile))
    layers = int(data["layer"].max()) + 1
    colors = heat_map()
    with style():
        page = Page(SINGLE if len(kinds) == 1 else DOUBLE, 2.3 if len(kinds) < 3 else 4.2)
        set_title(page, literal(profile.model.get("name")), f"{profile.data['tokens']:,} tokens")
        shape = (1, len(kinds)) if len(kinds) < 3 else (2, 2)
        panels = page.subplots(*shape, squeeze=False).ravel()
        for ax, kind in zip(panels, kinds, strict=False):
            seen = data[(data["activation"] == kind) & (data["absmax"] > 0)]
            for layer in range(layers):
                line = seen[seen["layer"] == layer]
                shade = colors(0.15 + 0.85 * layer / max(layers - 1, 1))
                ax.plot(line["rank"], line["absmax"], color=shade, linewidth=0.8)
            ax.set_xscale("log")
            ax.set_yscale("log")
            ax.set_xlabel("channel, by rank")
            ax.set_ylabel(f"largest |{WORDS[kind].removesuffix('s')}|")
        for ax in panels[len(kinds) :]:
            ax.set_axis_off()
        _bar(page, panels[: len(kinds)], colors, layers)
    return page


def _bar(page: Page, panels: Any, colors: Any, layers: int) -> None:
    """Add a colour bar of the layers' shades."""
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import Normalize
    from matplotlib.ticker import MaxNLocator

    # The lines do not use the palest shades.
    first = -0.15 / 0.85 * max(layers - 1, 1)
    shades = ScalarMappable(Normalize(first, max(layers - 1, 1)), colors)
    bar = page.colorbar(shades, ax=list(panels), pad=0.015, aspect=40)
    bar.ax.set_ylim(0, max(layers - 1, 1))
    bar.ax.yaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    bar.outline.set_visible(False)
    bar.set_label("layer")
