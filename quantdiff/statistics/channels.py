"""Where the large values of a site lie along channels and tokens."""

from dataclasses import dataclass
from typing import Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quantdiff.statistics.histogram import Histogram
from quantdiff.statistics.lasting import lasting_zeros

__all__ = ["Channels", "Outliers", "outliers"]


@dataclass(eq=False)
class Channels:
    """Extremes of every channel, and the largest magnitude of every token.

    Attributes:
        min, max: (G, C) fp32; +inf and −inf where nothing was seen.
        tokens: histogram of each token's largest magnitude, G groups; None if only extremes were
            recorded.
    """

    min: NDArray[np.float32]
    max: NDArray[np.float32]
    tokens: Histogram | None = None

    @classmethod
    def empty(cls, groups: int, width: int, *, full: bool) -> Self:
        """Empty statistics of `groups` groups of `width` channels; with the tokens if `full`."""
        least, most = (lasting_zeros((groups, width), np.float32) for _ in range(2))
        least[:], most[:] = np.inf, -np.inf
        return cls(least, most, Histogram.empty(groups) if full else None)

    @property
    def width(self) -> int:
        """Number of channels C."""
        return self.min.shape[1]

    @property
    def absmax(self) -> NDArray[np.float32]:
        """Largest magnitude of each channel, (G, C); 0 where nothing was seen."""
        both = np.maximum(np.abs(self.min), np.abs(self.max))
        return np.where(self.min <= self.max, both, np.float32(0))

    def add(self, x: Tensor) -> None:
        """Add tokens, in place.

        Args:
            x: (G, n, C) fp32, finite, n > 0.
        """
        least, most = x.amin(1).cpu().numpy(), x.amax(1).cpu().numpy()  # (G, C)
        np.minimum(self.min, least, out=self.min)
        np.maximum(self.max, most, out=self.max)
        if self.tokens is not None:
            largest = torch.maximum(x.amax(-1), -x.amin(-1))  # (G, n)
            self.tokens.merge(Histogram.of(largest.abs().cpu().numpy()))

    def spread(self, groups: NDArray[np.int64], total: int) -> "Channels":
        """The same statistics as the given groups of a larger set; the others are empty."""
        whole = Channels.empty(total, self.width, full=False)
        whole.min[groups], whole.max[groups] = self.min, self.max
        if self.tokens is not None:
            whole.tokens = self.tokens.spread(groups, total)
        return whole

    def merge(self, other: "Channels") -> None:
        """Add the statistics of other data at the same site, in place."""
        np.minimum(self.min, other.min, out=self.min)
        np.maximum(self.max, other.max, out=self.max)
        if self.tokens is not None and other.tokens is not None:
            self.tokens.merge(other.tokens)


@dataclass(frozen=True)
class Outliers:
    """How concentrated the large values of one group of a site are.

    Attributes:
        channel_ratio: largest magnitude of the largest channel, over that of the median channel.
        token_ratio: largest magnitude of the largest token, over that of the median token.
        top_channel: the channel with the most of the largest values kept; `top_channel_share` is
            its share of them, in (0, 1].
        top_token: likewise, the position of tokens in their sequences, from 0.

    A field is None if it is unknown or has nothing to be compared with.
    """

    channel_ratio: float | None
    token_ratio: float | None
    top_channel: int | None
    top_channel_share: float | None
    top_token: int | None
    top_token_share: float | None


def outliers(channels: Channels, group: int, largest: float, places: NDArray[np.int64]) -> Outliers:
    """Compute the `Outliers` of a group.

    Args:
        channels: those of the site.
        group: index of the group.
        largest: largest magnitude in the group.
        places: coordinates of the group's largest values, (n, …), ending in token and channel.
    """
    tokens = None if channels.tokens is None else float(channels.tokens.percentile(50)[group])
    return Outliers(
        _ratio(largest, float(np.median(channels.absmax[group]))),
        _ratio(largest, tokens),
        *_most(places[:, -1]),
        *_most(places[:, -2]),
    )


def _ratio(largest: float, median: float | None) -> float | None:
    return largest / median if median is not None and median > 0 else None


def _most(numbers: NDArray[np.int64]) -> tuple[int | None, float | None]:
    """The most frequent number, the lowest if several are, and its share."""
    if not len(numbers):
        return None, None
    found, counts = np.unique(numbers, return_counts=True)
    return int(found[counts.argmax()]), float(counts.max() / len(numbers))
