"""The calibration table: what a calibration saw, from which every observer takes its ranges."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from quantdiff.calibration.convergence import LARGEST, MEDIAN, Moved, movement
from quantdiff.calibration.observers import OBSERVERS, Observed, Range, observe
from quantdiff.calibration.sites import check_sites, joined, light, merged, shape
from quantdiff.errors import UsageError
from quantdiff.quantization.scheme import Scheme
from quantdiff.statistics.profile import Profile
from quantdiff.statistics.site import SiteStatistics

__all__ = ["SHOWN", "SITE", "CalibrationTable"]

SITE = "attention_logits"

# What is said of a table by itself; `range` and `moved` take any scheme.
SHOWN = {
    "absmax": Scheme(SITE, 8, "absmax"),
    "percentile 99.9": Scheme(SITE, 8, "percentile:99.9"),
    "mse at 4 bits": Scheme(SITE, 4, "mse"),
    "entropy at 8 bits": Scheme(SITE, 8, "entropy"),
}
_PREPARED = 8  # sites; what is prepared takes many times the memory of the histogram
_JUDGED = Scheme(SITE, 8, "percentile:99.9", "head")


@dataclass(eq=False)
class CalibrationTable:
    """Histograms and extremes of a model's attention logits, and the ranges that follow from them.

    Attributes:
        model: name, family, layout, parameters, dtype.
        data: source, tokens, sequences, sequence_length, fingerprint; earlier_tokens, how many of
            the tokens `earlier` stands for; of a merged table also parts, the data of each.
        definition: what was counted, in words.
        sites: one a module that attends, in order of the layers; its groups are the query heads.
        branches: the branch of each head, by layer.
        earlier: the same sites after the first part of the data, about three quarters of the
            tokens; None where the data came in one batch. Of a merged table the first parts of
            both tables together.
        partial: the calibration was cut short.
        versions: of the libraries that the numbers depend on.
        command: the command line that made it, if one did.
    """

    model: dict[str, Any]
    data: dict[str, Any]
    definition: str
    sites: list[SiteStatistics]
    branches: dict[int, list[int | None]]
    earlier: list[SiteStatistics] | None = None
    partial: bool = False
    versions: dict[str, str] = field(default_factory=dict)
    command: str | None = None
    _ranges: dict[tuple[Scheme, str, bool], Range] = field(default_factory=dict, repr=False)
    _observed: dict[tuple[str, str, bool], Observed] = field(default_factory=dict, repr=False)

    @classmethod
    def from_profile(cls, profile: Profile, earlier: Profile | None = None) -> "CalibrationTable":
        """The table of a recording in full detail.

        Args:
            profile: all of the data.
            earlier: the same recording after the first part of the data.

        Raises:
            UsageError: only extremes were recorded, or `earlier` has other sites.
        """
        part = profile.attention_logits
        sites = [light(site) for site in part.sites]
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
            branches={layer: list(heads) for layer, heads in part.branches.items()},
            earlier=first,
            partial=profile.partial,
            versions=dict(profile.versions),
            command=profile.command,
        )

    def range(self, scheme: Scheme, name: str) -> Range:
        """The range of a static scheme at one site.

        Args:
            scheme: of `attention_logits`, static, with 2 to 8 bits.
            name: of the site, a module path.

        Returns:
            (least, most), fp32, (H,) each, finite; copies. For the granularity `head` each head's
            own; for `tensor` that of all heads and both branches together, H times. 0 and 0 where
            nothing was seen.

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
            granularity `head`); None where all data came in one batch.

        Raises:
            UsageError: as `range`.
        """
        self._check(scheme)
        if self.earlier is None:
            return None
        names = [site.name for site in self.sites]
        return movement(
            [(site.name, site.layer) for site in self.sites],
            [self._range(scheme, name, first=True) for name in names],
            [self._range(scheme, name, first=False) for name in names],
            symmetric=scheme.symmetric,
            per_head=scheme.granularity == "head",
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
        """One sentence where the data were too little, by the 99.9th percentile of each head.

        They were if half of the heads moved by more than 2 % over the last part of the data, or one
        of them by more than 10 %; `calibration/convergence.py` says why these.
        """
        moved = self.moved(_JUDGED)
        if moved is None:
            return (
                "whether the ranges have converged is unknown, since the data came in one batch; "
                "calibrate on more tokens, in several batches"
            )
        if moved.median <= MEDIAN and moved.largest <= LARGEST:
            return None
        share = 1 - self.data["earlier_tokens"] / self.data["tokens"]
        return (
            f"the calibration data were too little: over their last {share:.0%} the 99.9th "
            f"percentile moved by {moved.largest:.1%} in layer {moved.layer}, head {moved.head}, "
            f"and by {moved.median:.1%} in the median head; calibrate on more tokens"
        )

    def check_model(self, sites: Mapping[str, tuple[int, int]]) -> None:
        """Refuse a model that this table was not made for.

        Args:
            sites: the model's attention sites, name -> (layer, query heads).

        Raises:
            UsageError: names the first difference.
        """
        check_sites(str(self.model.get("name")), self.sites, sites)

    def merge(self, other: "CalibrationTable") -> "CalibrationTable":
        """Both tables as one, as if one process had seen the data of both.

        The first parts of their data are merged too; a table that has none adds nothing to them,
        as if its data had come last.

        Raises:
            UsageError: tables of different models or definitions.
        """
        mine = (self.model, self.definition, shape(self.sites))
        if mine != (other.model, other.definition, shape(other.sites)):
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
            branches={layer: list(heads) for layer, heads in self.branches.items()},
            earlier=merged(*firsts) if firsts else None,
            partial=self.partial or other.partial,
            versions=versions,
            command=self.command if self.command == other.command else None,
        )

    def save(self, folder: str | Path) -> None:
        """Write `calibration.json` and `calibration.safetensors` into a folder, made if missing."""
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

    def __repr__(self) -> str:
        heads = sum(site.groups for site in self.sites)
        return (
            f"CalibrationTable of {self.model.get('name')}: {len(self.sites)} attention sites, "
            f"{heads} heads, {self.data['tokens']:,} tokens of {self.data['source'] or 'a batch'}"
            f"{', partial' if self.partial else ''}"
        )

    def _check(self, scheme: Scheme) -> None:
        if scheme.site != SITE:
            raise UsageError(f"this calibration holds ranges for {SITE} alone, not {scheme.site}")
        if not scheme.static:
            raise UsageError(
                f"a dynamic scheme needs no calibration; its range is one of {', '.join(OBSERVERS)}"
            )
        if not scheme.quantizes:
            raise UsageError(f"{scheme.bits} bits are not quantized and have no range")

    def _range(self, scheme: Scheme, name: str, *, first: bool) -> Range:
        key = scheme, name, first
        if key not in self._ranges:
            observed = self._find(name, scheme.granularity, first)
            found = observe(
                scheme.observer, observed, scheme.bits, scheme.symmetric, scheme.percentile
            )
            heads = self._find(name, "head", first).histogram.groups
            least, most = (np.broadcast_to(end, (heads,)) for end in found)
            self._ranges[key] = least, most
        return self._ranges[key]

    def _find(self, name: str, granularity: str, first: bool) -> Observed:
        """What was seen at a site, prepared for all observers and widths."""
        key = name, granularity, first
        if key not in self._observed:
            sites = self.earlier if first else self.sites
            site = next((site for site in sites or [] if site.name == name), None)
            if site is None:
                raise UsageError(
                    f"this calibration of {self.model.get('name')} has nothing for {name}"
                )
            assert site.histogram is not None
            if len(self._observed) >= _PREPARED:
                self._observed.clear()
            seen = Observed(site.histogram, site.min, site.max)
            self._observed[key] = seen if granularity == "head" else seen.total()
        return self._observed[key]
