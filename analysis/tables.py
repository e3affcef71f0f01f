"""A profile as tables for a terminal of 80 columns or more."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from rich import box
from rich.table import Table
from rich.text import Text

from quantdiff.analysis.channels import channels_tables
from quantdiff.analysis.maps import maps_table
from quantdiff.analysis.published import SOURCE, TABLE_5, UNSAID
from quantdiff.analysis.text import UNKNOWN, literal, number
from quantdiff.statistics.activations import (
    RANKS,
    Activations,
    AttentionLogits,
    HiddenState,
    Logit,
)
from quantdiff.statistics.profile import Profile
from quantdiff.statistics.site import SiteStatistics

__all__ = ["heading", "profile_report", "profile_table", "published_table", "worst_layers_table"]

_WORDS = {"attention_logits": "attention logits", "hidden_states": "hidden states"}


def heading(profile: Profile) -> Text:
    """The model and the data of a profile, in two lines that a narrow terminal may wrap."""
    model, data = profile.model, profile.data
    layout = model.get("layout")
    heads = "standard heads" if layout in (None, "none") else f"differential heads ({layout})"
    facts = [model.get("family"), heads, _parameters(model.get("parameters")), model.get("dtype")]
    tokens, sequences = data.get("tokens", 0), data.get("sequences", 0)
    text = Text(literal(model.get("name")), style="bold")
    text.append(f"  {', '.join(literal(fact) for fact in facts if fact)}\n", style="not bold")
    text.append(
        f"{literal(data.get('source') or 'unnamed data')}: {tokens:,} token{'s' * (tokens != 1)} "
        f"in {sequences:,} sequence{'s' * (sequences != 1)} "
        f"of up to {data.get('sequence_length', 0):,}",
        style="not bold",
    )
    if profile.detail == "extremes":
        text.append("; extremes only", style="not bold")
    if profile.partial:
        text.append("; ", style="not bold")
        text.append("partial", style="bold yellow")
    return text


def profile_report(profile: Profile) -> list[Text | Table]:
    """Everything a terminal shows, in order: heading, table, worst layers, channels, maps."""
    maps = [maps_table(profile)] if profile.maps else []
    return [
        heading(profile), profile_table(profile), worst_layers_table(profile),
        *channels_tables(profile), *maps,
    ]  # fmt: skip


def profile_table(profile: Profile) -> Table:
    """The largest magnitudes and the median, laid out like the paper's Table 5."""
    table = _table("activation", numbers=[*(f"top-{n}" for n in RANKS), "median"])
    parts: dict[str, Activations] = {kind: getattr(profile, kind) for kind in _WORDS}
    for kind, part in (parts | profile.sites).items():
        cells = [*(number(part.rank(n)) for n in RANKS), number(part.median)]
        table.add_row(kind.replace("_", " "), *cells)
    return table


def published_table() -> Table:
    """The paper's own Table 5, to show beneath a measured one."""
    table = _table("published", "activation", numbers=[*(f"top-{n}" for n in RANKS), "median"])
    for row in TABLE_5:
        cells = [number(row.ranks[n]) for n in RANKS]
        # One decimal throughout, as printed: more digits would claim more than the paper does.
        table.add_row(row.model, _WORDS[row.activation], *cells, f"{row.median:.1f}")
    table.caption = f"{SOURCE}. {UNSAID}"
    table.caption_justify = "left"
    return table


def worst_layers_table(profile: Profile, n: int = 5) -> Table:
    """The n layers with the largest attention logit, and those with the largest hidden state.

    `std` and `kurtosis` are those of the head, or of the layer's hidden states.
    """
    both = Table.grid()
    both.add_row(_worst_logits(profile.attention_logits, n))
    both.add_row(_worst_hidden(profile, n))
    return both


def _worst_logits(part: AttentionLogits, n: int) -> Table:
    branched = any(branch is not None for heads in part.branches.values() for branch in heads)
    table = _table(
        numbers=["layer", "head", *["branch"] * branched, "largest", "sequence", "query", "key",
                 "std", "kurtosis"],
        title="largest attention logits, by layer",
    )  # fmt: skip
    for site in _worst(part, n):
        head = int(np.argmax(site.absmax))
        place = next(iter(part.items(site)), None)
        # Two heads may tie; the place names the lower one.
        head = head if place is None else place.head
        branch = part.branches[site.name][head]
        table.add_row(
            str(site.layer), str(head), *[UNKNOWN if branch is None else str(branch)] * branched,
            number(float(site.absmax[head])), *_place(place, "sequence", "query", "key"),
            *_spread(site, head),
        )  # fmt: skip
    return table


def _worst_hidden(profile: Profile, n: int) -> Table:
    part = profile.hidden_states
    table = _table(
        numbers=["layer", "largest", "sequence", "token", "channel", "std", "kurtosis"],
        title="largest hidden states, by layer",
    )
    for site in _worst(part, n):
        place = next(iter(part.items(site.top)), None)
        table.add_row(
            str(site.layer), number(float(site.absmax[0])),
            *_place(place, "sequence", "token", "channel"), *_spread(site, 0),
        )  # fmt: skip
    return table


def _worst(part: Activations, n: int) -> list[SiteStatistics]:
    seen = [site for site in part.sites if site.count.any()]
    return sorted(seen, key=lambda site: -float(site.absmax.max()))[:n]


def _place(item: Logit | HiddenState | None, *names: str) -> list[str]:
    return [UNKNOWN if item is None else str(getattr(item, name)) for name in names]


def _spread(site: SiteStatistics, group: int) -> list[str]:
    if site.moments is None:
        return [UNKNOWN, UNKNOWN]
    return [number(float(values[group])) for values in (site.moments.std, site.moments.kurtosis)]


def _parameters(count: int | None) -> str | None:
    for unit, size in (("B", 1e9), ("M", 1e6), ("K", 1e3)):
        if count and count >= size:
            return f"{count / size:.4g}{unit} parameters"
    return f"{count} parameters" if count else None


def _table(*words: str, numbers: Sequence[str], title: str | None = None) -> Table:
    options: dict[str, Any] = {"title": title, "title_justify": "left", "title_style": "bold"}
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True, **options)
    for word in words:
        table.add_column(word, no_wrap=True)
    for word in numbers:
        table.add_column(word, justify="right", no_wrap=True)
    return table
