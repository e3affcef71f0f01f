"""The calibration table: what a calibration saw, from which every observer derives its ranges."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from quantdiff.calibration.convergence import LARGEST, MEDIAN, Moved, movement
from quantdiff.calibration.observers import OBSERVERS, Observed, Range, observe
from quantdiff.calibration.sites import Kind, check_sites, joined, kinds_of, light, merged, shape
from quantdiff.errors import UsageError
from quantdiff.quantization.scheme import STATIC, Scheme
from quantdiff.statistics.profile import Profile
from quantdiff.statistics.site import SiteStatistics

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["SHOWN", "SITE", "CalibrationTable"]

SITE = "attention_logits"

# Schemes reported for a table by default; `range` and `moved` accept any scheme.
SHOWN = {
    "absmax": Scheme(SITE, 8, "absmax"),
    "percentile 99.9": Scheme(SITE, 8, "percentile:99.9"),
    "mse at 4 bits": Scheme(SITE, 4, "mse"),
    "entropy at 8 bits": Scheme(SITE, 8, "entropy"),
}
_PREPARED = 8  # sites; a prepared one takes many times the memory of its histogram
_JUDGED = "percentile:99.9"


@dataclass(eq=False)
class CalibrationTable:
    """Histograms and extremes of a model's activations, and the ranges that follow from them.

    It always holds the attention logits; linear inputs, keys, values and hidden states only if
    requested.

    Attributes:
        model: name, family, layout, parameters, dtype.
        data: source, tokens, sequences, sequence_length, fingerprint; earlier_tokens, how many of
            the tokens `earlier` covers; for a merged table also parts, the data of each.
        definition: what was counted, in words.
        sites: one per attention module, in layer order; its groups are the query heads.
        branches: the branch of each head, by site name.
        earlier: the same sites after the first part of the data, about three quarters of the
            tokens; None if the data came in one batch or the calibration was cut short before. For
            a merged table, the first parts of both tables together.
        more: the other sites, by kind.
        partial: whether the calibration was cut short.
        versions: versions of the libraries that the numbers depend on.
        command: the command line that made it, if any.
    """

    model: dict[str, Any]
    data: dict[str, Any]
    definition: str
    sites: list[SiteStatistics]
    branches: dict[str, list[int | None]]
    earlier: list[SiteStatistics] | None = None
    more: dict[str, Kind] = field(default_factory=dict)
    partial: bool = False
    versions: dict[str, str] = field(default_factory=dict)
    command: str | None = None
    _ranges: dict[tuple[Any, str, bool], Range] = field(default_factory=dict, repr=False)
    _observed: dict[tuple[str, str, str, bool], Observed] = field(default_factory=dict, repr=False)

    @classmethod
    def from_profile(cls, profile: Profile, earlier: Profile | None = None) -> "CalibrationTable":
        """The table of a recording in full detail.

        Args:
            profile: the recording of all of the data.
            earlier: the same recording after the first part of the data.

        Raises:
            UsageError: only extremes were recorded, or `earlier` has other sites.
        """
        part = profile.attention_logits
        sites, more = [light(site) for site in part.sites], kinds_of(profile, earlier)
        data = dict(profile.data)
        first = None
        if earlier is not None:
            first = [light(site) for site in earlier.attention_logits.sites]
            if shape(first) != shape(sites):
                raise UsageError(
                    "the profile of the first part of the data has other attention sites than that "
                    "of all of it"
                )
            data["earlier_tokens"] = earlier.data["tokens"]
        return cls(
            model={key: value for key, value in profile.model.items() if key != "lambda"},
            data=data,
            definition=profile.definition[SITE],
            sites=sites,
            branches={name: list(heads) for name, heads in part.branches.items()},
            earlier=first,
            more=more,
            partial=profile.partial,
            versions=dict(profile.versions),
            command=profile.command,
        )

    def range(self, scheme: Scheme, name: str) -> Range:
        """The range of a static scheme at one site.

        Args:
            scheme: static, with 2 to 8 bits.
            name: module path of the site.

        Returns:
            (least, most), fp32, finite; copies. For attention logits, keys and values (H,) each:
            with granularity `head` each head's own, with `tensor` that of all heads and both
            branches together, H times; with `channel` (H, C) each. For linear inputs and hidden
            states (1,) each. 0 and 0 where nothing was seen.

        Raises:
            UsageError: a dynamic scheme, or a site or an observer that the table lacks.
        """
        self._check(scheme)
        least, most = self._range(scheme, name, first=False)
        return least.copy(), most.copy()

    def moved(self, scheme: Scheme) -> Moved | None:
        """How much a scheme's ranges still changed over the last part of the data.

        Returns:
            The largest and the median relative change over all sites (and heads, for the
            granularity `head`); None if `earlier` is None.

        Raises:
            UsageError: as in `range`.
        """
        self._check(scheme)
        if self.earlier is None or self._seen(scheme.site, first=True) is None:
            return None
        sites = [(site.name, site.layer) for site in self._seen(scheme.site, first=False) or []]
        return movement(
            sites,
            [self._range(scheme, name, first=True) for name, _ in sites],
            [self._range(scheme, name, first=False) for name, _ in sites],
            symmetric=scheme.symmetric,
            per_head=scheme.granularity in ("head", "channel"),
        )

    def convergence(self) -> dict[str, dict[str, float]]:
        """Largest and median movement of each observer's `tensor` ranges; empty if unknown."""
        found = {name: self.moved(scheme) for name, scheme in SHOWN.items()}
        return {
            name: {"largest": moved.largest, "median": moved.median}
            for name, moved in found.items()
            if moved is not None
        }

    def warning(self) -> str | None:
        """One sentence if there were too few data, or if that is unknown; else None.

        By the 99.9th percentile of each head, there were too few if half of the heads moved by more
        than 2 % over the last part of the data, or one of them by more than 10 %;
        `calibration/convergence.py` explains these bounds. For sites without heads, modules are
        judged.
        """
        for site in (SITE, *self.more):
            kind = "head" if "head" in STATIC[site] else "tensor"
            moved = self.moved(Scheme(site, 8, _JUDGED, kind))
            if moved is None:
                why = "the data came in one batch; calibrate on more tokens, in several batches"
                if self.partial:
                    why = "the calibration was cut short; let it run to its end"
                return f"whether the ranges have converged is unknown, since {why}"
            if moved.median <= MEDIAN and moved.largest <= LARGEST:
                continue
            share = 1 - self.data["earlier_tokens"] / self.data["tokens"]
            words = "" if site == SITE else f" of the {site.replace('_', ' ')}"
            where = f"layer {moved.layer}"
            where += f" ({moved.site})" if moved.head is None else f", head {moved.head}"
            return (
                f"the calibration data were too little: over their last {share:.0%} the 99.9th "
                f"percentile{words} moved by {moved.largest:.1%} in {where}, and by "
                f"{moved.median:.1%} in the median {'module' if moved.head is None else 'head'}; "
                "calibrate on more tokens"
            )
        return None

    def check_site(self, site: str) -> None:
        """Refuse a site for which the table holds nothing.

        Raises:
            UsageError: names it and the remedy.
        """
        if site != SITE and site not in self.more:
            raise UsageError(
                f"this calibration of {self.model.get('name')} holds no ranges of {site}: "
                f"calibrate again with sites=({site!r},), or --sites {site}"
            )

    def check_model(
        self, sites: Mapping[str, tuple[int, int]], modules: Collection[str] = ()
    ) -> None:
        """Refuse a model that this table was not made for.

        Args:
            sites: the model's attention sites, name -> (layer, query heads).
            modules: paths of all of its modules. Those of cross-attention, and those that attend
                outside of transformers' dispatch, may be sites of the table in addition to `sites`.

        Raises:
            UsageError: names the first difference.
        """
        check_sites(str(self.model.get("name")), self.sites, sites, modules)

    def merge(self, other: "CalibrationTable") -> "CalibrationTable":
        """Both tables as one, as if one process had seen the data of both.

        The first parts of their data are merged too; a table that has none adds nothing to them,
        as if its data had come last.

        Raises:
            UsageError: tables of different models or definitions.
        """
        if _told(self) != _told(other):
            raise UsageError(
                f"calibrations of {self.model.get('name')!r} and {other.model.get('name')!r} do "
                "not measure the same thing and cannot be merged"
            )
        firsts = [table.earlier for table in (self, other) if table.earlier is not None]
        data, versions = joined(self.data, other.data, self.versions, other.versions)
        return CalibrationTable(
            model=dict(self.model),
            data=data,
            definition=self.definition,
            sites=merged(self.sites, other.sites),
            branches={name: list(heads) for name, heads in self.branches.items()},
            earlier=merged(*firsts) if firsts else None,
            more={kind: part.merge(other.more[kind]) for kind, part in self.more.items()},
            partial=self.partial or other.partial,
            versions=versions,
            command=self.command if self.command == other.command else None,
        )

    def save(self, folder: str | Path) -> None:
        """Write `calibration.json` and `calibration.safetensors` to a folder, created if needed."""
        from quantdiff.calibration.saved import save_table

        save_table(self, Path(folder))

    @classmethod
    def load(cls, folder: str | Path) -> "CalibrationTable":
        """Read what `save` wrote.

        Raises:
            UsageError: no calibration, a broken one, or one of a newer format.
        """
        from quantdiff.calibration.saved import load_table

        return load_table(Path(folder))

    def same_as(self, other: "CalibrationTable") -> bool:
        """Whether another table holds the same statistics, data and provenance, to the bit."""
        from quantdiff.calibration.saved import same

        return same(self, other)

    def to_frame(self, granularity: str = "tensor") -> "pd.DataFrame":
        """The ranges of the attention logits that each observer finds; see `ranges_frame`."""
        from quantdiff.calibration.frames import ranges_frame

        return ranges_frame(self, granularity)

    def plot(self, *, ax: Any = None) -> Any:
        """Draw the ranges of the attention logits by layer; see `quantdiff.plot_ranges`."""
        import quantdiff

        return quantdiff.plot_ranges(self, ax=ax)

    def __repr__(self) -> str:
        heads = sum(site.groups for site in self.sites)
        more = "".join(f", {kind}" for kind in self.more)
        return (
            f"CalibrationTable of {self.model.get('name')}: {len(self.sites)} attention sites, "
            f"{heads} heads{more}, {self.data['tokens']:,} tokens of "
            f"{self.data['source'] or 'a batch'}{', partial' if self.partial else ''}"
        )

    def _repr_html_(self) -> str:
        import quantdiff

        return quantdiff.to_html(self)

    def _check(self, scheme: Scheme) -> None:
        if not scheme.static:
            raise UsageError(
                f"a dynamic scheme needs no calibration; its range is one of {', '.join(OBSERVERS)}"
            )
        if not scheme.quantizes:
            raise UsageError(f"{scheme.bits} bits are not quantized and have no range")
        self.check_site(scheme.site)

    def _seen(self, kind: str, *, first: bool) -> list[SiteStatistics] | None:
        """The sites of a kind, or what they were after the first part of the data."""
        if kind == SITE:
            return self.earlier if first else self.sites
        return self.more[kind].earlier if first else self.more[kind].sites

    def _range(self, scheme: Scheme, name: str, *, first: bool) -> Range:
        # Without layers, heads and newest tokens, which do not affect the ranges.
        kind = scheme.site, scheme.bits, scheme.range, scheme.granularity, scheme.symmetric
        key = kind, name, first
        if key not in self._ranges:
            site = self._site(scheme.site, name, first=first)
            if scheme.granularity == "channel":
                assert site.channels is not None
                empty = site.channels.min > site.channels.max
                least, most = (
                    np.where(empty, np.float32(0), end)
                    for end in (site.channels.min, site.channels.max)
                )  # (H, C) each
            else:
                found = observe(
                    scheme.observer, self._find(scheme, name, first=first), scheme.bits,
                    scheme.symmetric, scheme.percentile,
                )  # fmt: skip
                least, most = (np.broadcast_to(end, (site.groups,)) for end in found)
            self._ranges[key] = least, most
        return self._ranges[key]

    def _site(self, kind: str, name: str, *, first: bool) -> SiteStatistics:
        for site in self._seen(kind, first=first) or []:
            if site.name == name:
                return site
        raise UsageError(f"this calibration of {self.model.get('name')} has nothing for {name}")

    def _find(self, scheme: Scheme, name: str, *, first: bool) -> Observed:
        """What was seen at a site, prepared for all observers and bit widths."""
        key = scheme.site, name, scheme.granularity, first
        if key not in self._observed:
            site = self._site(scheme.site, name, first=first)
            assert site.histogram is not None
            if len(self._observed) >= _PREPARED:
                self._observed.clear()
            seen = Observed(site.histogram, site.min, site.max)
            self._observed[key] = seen if scheme.granularity == "head" else seen.total()
        return self._observed[key]


def _told(table: CalibrationTable) -> Any:
    """What tables must have in common to be merged."""
    more = {kind: (part.definition, shape(part.sites)) for kind, part in table.more.items()}
    return table.model, table.definition, shape(table.sites), more
