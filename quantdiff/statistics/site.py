"""Statistics kept of one site: exact extremes and moments per group, and the histogram."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Self

import numpy as np
from numpy.typing import NDArray

from quantdiff.statistics.channels import Channels, outliers
from quantdiff.statistics.histogram import Histogram
from quantdiff.statistics.lasting import lasting_zeros
from quantdiff.statistics.moments import Moments
from quantdiff.statistics.top import Top

__all__ = ["SiteStatistics", "of_groups"]


@dataclass(eq=False)
class SiteStatistics:
    """Statistics of one tensor of a layer, per group (a head, or one group if there are none).

    Attributes:
        name: module path of the site.
        layer: index of the layer, from 0.
        count: (G,) int64.
        min, max: (G,) fp32; +inf and −inf for an empty group.
        top: the largest magnitudes of the site with their coordinates.
        uncapped: (G,) fp32, largest magnitude before the soft cap, if the model has one.
        moments: None if only extremes were recorded.
        histogram: None if only extremes were recorded.
        channels: for values with channels, if requested; else None.
    """

    name: str
    layer: int
    count: NDArray[np.int64]
    min: NDArray[np.float32]
    max: NDArray[np.float32]
    top: Top = field(repr=False)
    moments: Moments | None = field(default=None, repr=False)
    histogram: Histogram | None = field(default=None, repr=False)
    uncapped: NDArray[np.float32] | None = None
    channels: Channels | None = field(default=None, repr=False)

    @classmethod
    def empty(
        cls,
        name: str,
        layer: int,
        groups: int,
        *,
        full: bool,
        rank: int,
        coordinates: int,
        width: int | None = None,
    ) -> Self:
        """Empty statistics.

        Args:
            name: module path.
            layer: index of the layer.
            groups: number of groups G.
            full: whether to keep moments and histogram.
            rank: how many of the largest magnitudes are kept.
            coordinates: how many coordinates each of them has.
            width: number of channels, whose extremes are kept too; None for no channels.
        """
        least, most = (lasting_zeros((groups,), np.float32) for _ in range(2))
        least[:], most[:] = np.inf, -np.inf
        return cls(
            name,
            layer,
            lasting_zeros((groups,), np.int64),
            least,
            most,
            Top(rank, coordinates),
            Moments.empty(groups) if full else None,
            Histogram.empty(groups) if full else None,
            channels=None if width is None else Channels.empty(groups, width, full=full),
        )

    @property
    def groups(self) -> int:
        """Number of groups G."""
        return len(self.count)

    @property
    def width(self) -> int:
        """Number of channels whose extremes are kept; 0 if none."""
        return 0 if self.channels is None else self.channels.width

    @property
    def absmax(self) -> NDArray[np.float32]:
        """Largest magnitude, (G,); 0 for an empty group."""
        both = np.maximum(np.abs(self.min), np.abs(self.max))
        return np.where(self.count > 0, both, np.float32(0))

    def merge(self, other: "SiteStatistics") -> None:
        """Add the statistics of other data at the same site, in place.

        Raises:
            ValueError: another site, another number of groups or channels, or another level of
                detail.
        """
        if (self.name, self.layer, self.groups) != (other.name, other.layer, other.groups):
            raise ValueError(
                f"site {self.name} with {self.groups} groups cannot be merged with site "
                f"{other.name} with {other.groups} groups"
            )
        if (self.moments is None, self.top.rank) != (other.moments is None, other.top.rank):
            raise ValueError(f"site {self.name} was recorded at two levels of detail")
        if self.width != other.width:
            raise ValueError(
                f"site {self.name} has {self.width} channels here, {other.width} there"
            )
        self.count += other.count
        np.minimum(self.min, other.min, out=self.min)
        np.maximum(self.max, other.max, out=self.max)
        self.top.offer(other.top.values, other.top.coordinates)
        if other.uncapped is not None:
            mine = np.zeros_like(other.uncapped) if self.uncapped is None else self.uncapped
            self.uncapped = np.maximum(mine, other.uncapped)
        if self.moments is not None and other.moments is not None:
            self.moments.merge(other.moments)
        if self.histogram is not None and other.histogram is not None:
            self.histogram.merge(other.histogram)
        if self.channels is not None and other.channels is not None:
            self.channels.merge(other.channels)

    def spread(self, groups: Sequence[int], total: int) -> "SiteStatistics":
        """The same statistics as some of the groups of a larger site; the others are empty.

        Args:
            groups: where each group goes, G different indices; the coordinates of `top` are kept as
                they were offered.
            total: number of groups of the larger site.
        """
        rank, coordinates = self.top.rank, self.top.coordinates.shape[1]
        whole = SiteStatistics.empty(
            self.name, self.layer, total, full=self.moments is not None, rank=rank,
            coordinates=coordinates,
        )  # fmt: skip
        at = np.asarray(groups)
        whole.count[at], whole.min[at], whole.max[at] = self.count, self.min, self.max
        whole.top.offer(self.top.values, self.top.coordinates)
        if self.uncapped is not None:
            whole.uncapped = np.zeros(total, np.float32)
            whole.uncapped[at] = self.uncapped
        if self.moments is not None and whole.moments is not None:
            whole.moments = self.moments.spread(at, total)
        if self.histogram is not None and whole.histogram is not None:
            whole.histogram = self.histogram.spread(at, total)
        if self.channels is not None:
            whole.channels = self.channels.spread(at, total)
        return whole

    def rows(self) -> Iterator[dict[str, float | int | None]]:
        """One dictionary per group: absmax, min, max, mean, std, kurtosis (None if unknown).

        Where the model caps its logits, also uncapped_absmax; where channels were kept, also the
        median magnitude and the fields of `Outliers`.
        """
        medians = None
        if self.channels is not None and self.histogram is not None:
            medians = self.histogram.percentile(50)
        std = None if self.moments is None else self.moments.std
        kurtosis = None if self.moments is None else self.moments.kurtosis
        for g in range(self.groups):
            empty = self.count[g] == 0
            row = {
                "absmax": None if empty else float(self.absmax[g]),
                "min": None if empty else float(self.min[g]),
                "max": None if empty else float(self.max[g]),
                "mean": None if empty or self.moments is None else float(self.moments.mean[g]),
                "std": None if empty or std is None else float(std[g]),
                "kurtosis": None
                if kurtosis is None or not np.isfinite(kurtosis[g])
                else float(kurtosis[g]),
            }
            if self.uncapped is not None:
                row["uncapped_absmax"] = float(self.uncapped[g])
            if self.channels is not None:
                places = self.top.coordinates
                if self.groups > 1:
                    places = places[places[:, 1] == g]
                row["median"] = None if medians is None or empty else float(medians[g])
                row |= vars(outliers(self.channels, g, float(self.absmax[g]), places))
            yield row


def of_groups(name: str, layer: int, values: NDArray[np.float32]) -> SiteStatistics:
    """Statistics of a few values that are all available, without coordinates.

    Args:
        name, layer: as in `SiteStatistics`.
        values: (G, n) fp32, finite, n > 0.
    """
    groups, n = values.shape
    site = SiteStatistics.empty(name, layer, groups, full=True, rank=0, coordinates=0)
    site.count[:] = n
    site.min[:], site.max[:] = values.min(1), values.max(1)
    x = values.astype(np.float64)
    mean = x.mean(1)
    powers = [((x - mean[:, None]) ** p).sum(1) for p in (2, 3, 4)]
    site.moments = Moments(site.count.copy(), mean, *powers)
    site.histogram = Histogram.of(values)
    return site
