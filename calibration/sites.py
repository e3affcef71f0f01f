"""The sites of a calibration table: copying, merging, comparing; the provenance of a merge."""

import hashlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from quantdiff.errors import UsageError
from quantdiff.statistics.activations import Activations
from quantdiff.statistics.channels import Channels
from quantdiff.statistics.histogram import Histogram
from quantdiff.statistics.profile import Profile
from quantdiff.statistics.site import SiteStatistics
from quantdiff.statistics.top import Top

__all__ = ["Kind", "check_sites", "joined", "kinds_of", "light", "merged", "shape"]

_COORDINATES = 5  # of one of the largest logits; a table keeps none


@dataclass(eq=False)
class Kind:
    """What a calibration saw at one kind of site other than the attention logits.

    Attributes:
        definition: what was counted, in words.
        sites: in layer order; the groups of `keys` and `values` are heads.
        earlier: the same after the first part of the data, or None.
    """

    definition: str
    sites: list[SiteStatistics]
    earlier: list[SiteStatistics] | None = None

    def merge(self, other: "Kind") -> "Kind":
        """Both as one; of first parts, those that exist."""
        firsts = [kind.earlier for kind in (self, other) if kind.earlier is not None]
        return Kind(
            self.definition,
            merged(self.sites, other.sites),
            merged(*firsts) if firsts else None,
        )


def kinds_of(profile: Profile, earlier: Profile | None) -> dict[str, Kind]:
    """The kinds of sites requested of a recording, as copies of what the observers need."""
    found: dict[str, Kind] = {}
    for kind, part in _asked(profile).items():
        first = None if earlier is None else [light(s) for s in _asked(earlier)[kind].sites]
        found[kind] = Kind(profile.definition[kind], [light(s) for s in part.sites], first)
    return found


def _asked(profile: Profile) -> dict[str, Activations]:
    parts: dict[str, Activations] = dict(profile.sites)
    if any(site.channels is not None for site in profile.hidden_states.sites):
        parts["hidden_states"] = profile.hidden_states
    return parts


def light(site: SiteStatistics) -> SiteStatistics:
    """A copy of what the observers need.

    Raises:
        UsageError: only extremes were recorded.
    """
    if site.histogram is None:
        raise UsageError("a calibration needs a recording in full detail, with histograms")
    return SiteStatistics(
        name=site.name,
        layer=site.layer,
        count=site.count.copy(),
        min=site.min.copy(),
        max=site.max.copy(),
        top=Top(0, _COORDINATES),
        histogram=Histogram(
            site.histogram.counts.copy(), site.histogram.first, site.histogram.zeros.copy()
        ),
        channels=None
        if site.channels is None
        else Channels(site.channels.min.copy(), site.channels.max.copy()),
    )


def merged(*parts: list[SiteStatistics]) -> list[SiteStatistics]:
    """The sites of all parts together, as copies."""
    result = [light(site) for site in parts[0]]
    for more in parts[1:]:
        for site, further in zip(result, more, strict=True):
            site.merge(further)
    return result


def shape(sites: list[SiteStatistics]) -> list[tuple[str, int, int, int]]:
    """Name, layer, number of heads and of channels of each site."""
    return [(site.name, site.layer, site.groups, site.width) for site in sites]


def check_sites(
    model: str,
    mine: list[SiteStatistics],
    theirs: Mapping[str, tuple[int, int]],
    modules: Collection[str] = (),
) -> None:
    """Refuse a model whose sites, name -> (layer, query heads), differ from those of a table.

    Args:
        model: name of the table's model, for messages.
        mine: the table's sites.
        theirs: the model's.
        modules: paths of other modules of the model that may be sites, such as cross-attention,
            which need not run.

    Raises:
        UsageError: names the first difference.
    """
    start = f"this calibration is of another model ({model}): "
    known = {site.name: site for site in mine}
    for name, (layer, heads) in theirs.items():
        if name not in known:
            raise UsageError(f"{start}it has nothing for {name}")
        site = known[name]
        if site.groups != heads:
            raise UsageError(f"{start}{name} has {site.groups} query heads there, {heads} here")
        if site.layer != layer:
            raise UsageError(f"{start}{name} is layer {site.layer} there, {layer} here")
    for name in known:
        if name not in theirs and name.partition(" ")[0] not in modules:
            raise UsageError(f"{start}it has a site {name}, which is not here")


def joined(
    mine: dict[str, Any],
    other: dict[str, Any],
    versions: dict[str, str],
    other_versions: dict[str, str],
) -> tuple[dict[str, Any], dict[str, str]]:
    """The `data` and `versions` of two tables as those of one.

    Tokens and sequences add up; `parts` lists the data of each, however often they were merged, so
    that one can still check whether a text was among them; `fingerprint` is a hash over those of
    the parts, if all have one.
    """
    parts = [part for data in (mine, other) for part in data.get("parts", [data])]
    sources = dict.fromkeys(part["source"] for part in parts)
    data = {
        "source": " + ".join(sources),
        "tokens": mine["tokens"] + other["tokens"],
        "sequences": mine["sequences"] + other["sequences"],
        "sequence_length": max(mine["sequence_length"], other["sequence_length"]),
    }
    prints = [part.get("fingerprint") for part in parts]
    if None not in prints:
        data["fingerprint"] = hashlib.sha256("".join(map(str, prints)).encode()).hexdigest()
    first = [d["earlier_tokens"] for d in (mine, other) if "earlier_tokens" in d]
    if first:
        data["earlier_tokens"] = sum(first)
    data["parts"] = [dict(part) for part in parts]
    together = dict(versions)
    for name, version in other_versions.items():
        known = together.setdefault(name, version)
        if version not in known.split(", "):
            together[name] = f"{known}, {version}"
    return data, together
