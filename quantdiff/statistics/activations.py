"""Activations of all layers as objects: attention logits, hidden states, the largest of them."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np

from quantdiff.statistics.histogram import Histogram
from quantdiff.statistics.moments import Moments
from quantdiff.statistics.site import SiteStatistics
from quantdiff.statistics.top import Top

__all__ = [
    "RANKS",
    "RECORDED",
    "SITES",
    "Activations",
    "AttentionLogits",
    "CacheEntries",
    "CacheEntry",
    "HiddenState",
    "HiddenStates",
    "LinearInput",
    "LinearInputs",
    "Logit",
    "Values",
]

RANKS = (1, 2, 3, 10, 100)


@dataclass(frozen=True)
class Logit:
    """A large attention logit: its magnitude and position, all counted from 0."""

    value: float
    layer: int
    head: int
    branch: int | None
    sequence: int
    query: int
    key: int


@dataclass(frozen=True)
class HiddenState:
    """A large element of the residual stream: its magnitude and position, counted from 0."""

    value: float
    layer: int
    sequence: int
    token: int
    channel: int


@dataclass(frozen=True)
class LinearInput:
    """A large input of a linear module: its magnitude and position, counted from 0."""

    value: float
    layer: int
    module: str
    sequence: int
    token: int
    channel: int


@dataclass(frozen=True)
class CacheEntry:
    """A large element of the keys or values: its magnitude and position, counted from 0."""

    value: float
    layer: int
    head: int
    sequence: int
    token: int
    channel: int


@dataclass(eq=False)
class Activations:
    """One kind of activation over all layers.

    Attributes:
        sites: one per layer or module, in order.
        sequence: index of the sequence among the coordinates of the largest magnitudes.
    """

    sequence: ClassVar[int]

    sites: list[SiteStatistics]
    _histogram: Histogram | None = field(default=None, init=False, repr=False)

    @property
    def count(self) -> int:
        """Number of values seen."""
        return int(sum(site.count.sum() for site in self.sites))

    @property
    def absmax(self) -> float:
        """Largest magnitude; NaN if nothing was seen."""
        seen = (float(site.absmax.max()) for site in self.sites if site.count.any())
        return max(seen, default=float("nan"))

    @property
    def largest(self) -> Top:
        """The largest magnitudes of all sites with their coordinates."""
        tops = [site.top for site in self.sites]
        merged = Top(tops[0].rank, tops[0].coordinates.shape[1])
        for top in tops:
            merged.offer(top.values, top.coordinates)
        return merged

    @property
    def histogram(self) -> Histogram | None:
        """All values of all sites, one group; None if only extremes were recorded."""
        if self._histogram is None:
            parts = [site.histogram for site in self.sites]
            total = Histogram.empty(1)
            for part in parts:
                if part is None:
                    return None
                total.merge(part.total())
            self._histogram = total
        return self._histogram

    @property
    def moments(self) -> Moments | None:
        """Moments of all values, one group; None if only extremes were recorded."""
        total = Moments.empty(1)
        for site in self.sites:
            if site.moments is None:
                return None
            total.merge(site.moments.total())
        return total

    @property
    def median(self) -> float | None:
        """Median magnitude, within 0.5 %; None if only extremes were recorded."""
        return self.percentile(50)

    def percentile(self, percent: float) -> float | None:
        """Magnitude below which `percent` per cent of the magnitudes lie, within 0.5 %."""
        histogram = self.histogram
        if histogram is None:
            return None
        if percent == 100:
            return self.absmax
        return float(histogram.percentile(percent)[0])

    def rank(self, n: int) -> float | None:
        """The n-th largest magnitude; None if fewer were kept."""
        values = self.largest.values
        return float(values[n - 1]) if 0 < n <= len(values) else None


class AttentionLogits(Activations):
    """The attention logits of all layers; a site's groups are its query heads.

    Attributes:
        branches: the branch of each head, by site name.
    """

    sequence = 2

    def __init__(
        self, sites: list[SiteStatistics], branches: Mapping[str, Sequence[int | None]]
    ) -> None:
        super().__init__(sites)
        self.branches = {name: list(heads) for name, heads in branches.items()}

    def top(self, n: int) -> list[Logit]:
        """The n largest magnitudes, or as many as were kept; ties go to the lowest coordinate."""
        return self._items(self.sites)[:n]

    def items(self, site: SiteStatistics) -> list[Logit]:
        """Entries for a site's largest magnitudes."""
        return self._items([site])

    def _items(self, sites: Sequence[SiteStatistics]) -> list[Logit]:
        # Several attention modules of a layer share coordinates: the last column tells them apart.
        merged = Top(sites[0].top.rank, 6)
        for number, site in enumerate(sites):
            places = site.top.coordinates
            numbers = np.full((len(places), 1), number)
            merged.offer(site.top.values, np.concatenate([places, numbers], 1))
        return [
            Logit(
                float(value), layer, head, self.branches[sites[number].name][head],
                sequence, query, key,
            )
            for value, (layer, head, sequence, query, key, number) in zip(
                merged.values, merged.coordinates.tolist(), strict=True
            )
        ]  # fmt: skip


class Values(Activations, ABC):
    """Activations that are elements of a tensor with channels.

    Attributes:
        heads: whether a site's groups are heads; otherwise it has one group.
    """

    heads: ClassVar[bool] = False

    def top(self, n: int) -> list[Any]:
        """The n largest magnitudes, or as many as were kept; ties go to the lowest coordinate."""
        return self.items(self.largest)[:n]

    @abstractmethod
    def items(self, top: Top) -> list[Any]:
        """Entries for the largest magnitudes of one site or of all sites."""


class HiddenStates(Values):
    """The residual stream after every decoder layer; each site has one group."""

    sequence = 1

    def items(self, top: Top) -> list[HiddenState]:
        """See `Values.items`."""
        return [
            HiddenState(float(value), *place)
            for value, place in zip(top.values, top.coordinates.tolist(), strict=True)
        ]


class LinearInputs(Values):
    """Inputs of the linear modules of the layers: one site per module, with one group.

    The second coordinate of the largest magnitudes is the index of the module among the sites.
    """

    sequence = 2

    def items(self, top: Top) -> list[LinearInput]:
        """See `Values.items`."""
        return [
            LinearInput(float(value), layer, self.sites[module].name, *place)
            for value, (layer, module, *place) in zip(
                top.values, top.coordinates.tolist(), strict=True
            )
        ]


class CacheEntries(Values):
    """Keys, after their rotary embedding, or values of all layers; a site's groups are its heads.

    The heads are those seen in the module's attention calls, each once, in their order.
    """

    sequence = 2
    heads = True

    def items(self, top: Top) -> list[CacheEntry]:
        """See `Values.items`."""
        return [
            CacheEntry(float(value), *place)
            for value, place in zip(top.values, top.coordinates.tolist(), strict=True)
        ]


# Recorded on request, in addition to logits and hidden states.
SITES: dict[str, type[Values]] = {
    "linear_inputs": LinearInputs,
    "keys": CacheEntries,
    "values": CacheEntries,
}
# What can be requested of a recording; for the hidden states, that is their channels.
RECORDED = (*SITES, "hidden_states")
