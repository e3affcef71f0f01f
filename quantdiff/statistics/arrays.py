"""Statistics of sites as flat arrays, for a file of tensors."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from quantdiff.statistics.channels import Channels
from quantdiff.statistics.histogram import BINS_AN_OCTAVE, Histogram
from quantdiff.statistics.moments import Moments
from quantdiff.statistics.site import SiteStatistics
from quantdiff.statistics.top import Top

__all__ = ["Arrays", "from_arrays", "to_arrays"]

_SIGN = 1 << 15  # the bit of a bin's key that is set for negative values

Arrays = dict[str, NDArray[Any]]


def to_arrays(sites: list[SiteStatistics]) -> Arrays:
    """The statistics of some sites as arrays, group after group, without names and layers."""
    arrays: Arrays = {
        "groups": np.array([site.groups for site in sites], np.int64),
        "count": np.concatenate([site.count for site in sites]),
        "min": np.concatenate([site.min for site in sites]),
        "max": np.concatenate([site.max for site in sites]),
        "top.rank": np.array([site.top.rank for site in sites], np.int64),
        "top.lengths": np.array([len(site.top.values) for site in sites], np.int64),
        "top.values": np.concatenate([site.top.values for site in sites]),
        "top.coordinates": np.concatenate([site.top.coordinates for site in sites]),
    }
    if any(site.uncapped is not None for site in sites):
        # Alternating layers may differ; -1 marks no cap, since no magnitude is negative.
        arrays["uncapped"] = np.concatenate([
            np.full(site.groups, -1, np.float32) if site.uncapped is None else site.uncapped
            for site in sites
        ])  # fmt: skip
    moments = [site.moments for site in sites if site.moments is not None]
    for name in ("mean", "m2", "m3", "m4") if moments else ():
        arrays[name] = np.concatenate([getattr(m, name) for m in moments])
    arrays |= _histogram_arrays(
        "histogram", [site.histogram for site in sites if site.histogram is not None]
    )
    channels = [site.channels for site in sites if site.channels is not None]
    if channels:
        arrays["channels.width"] = np.array([c.width for c in channels], np.int64)
        arrays["channels.min"] = np.concatenate([c.min.ravel() for c in channels])
        arrays["channels.max"] = np.concatenate([c.max.ravel() for c in channels])
        arrays |= _histogram_arrays("tokens", [c.tokens for c in channels if c.tokens is not None])
    return {name: np.ascontiguousarray(array) for name, array in arrays.items()}


def from_arrays(kind: str, described: list[dict[str, Any]], arrays: Arrays) -> list[SiteStatistics]:
    """Rebuild sites from arrays of `to_arrays` whose names begin with `kind` and a dot.

    Args:
        kind: kind of the sites.
        described: their `name` and `layer`, in order.
        arrays: arrays of all kinds.
    """
    if not described:
        return []
    a = {
        name.removeprefix(f"{kind}."): array
        for name, array in arrays.items()
        if name.startswith(f"{kind}.")
    }
    ends = np.cumsum(a["groups"])
    starts = ends - a["groups"]
    kept = np.concatenate([[0], np.cumsum(a["top.lengths"])])
    widths = a.get("channels.width", np.zeros(len(described), np.int64))
    wide = np.concatenate([[0], np.cumsum(a["groups"] * widths)])
    sites = []
    for s, (site, i, j) in enumerate(zip(described, starts, ends, strict=True)):
        moments = channels = uncapped = None
        if "mean" in a:
            moments = Moments(*(a[n][i:j].copy() for n in ("count", "mean", "m2", "m3", "m4")))
        if "uncapped" in a and (a["uncapped"][i:j] >= 0).all():
            uncapped = a["uncapped"][i:j].copy()
        if "channels.width" in a:
            least, most = (
                a[f"channels.{end}"][wide[s] : wide[s + 1]].reshape(j - i, widths[s]).copy()
                for end in ("min", "max")
            )
            channels = Channels(least, most, _histogram("tokens", i, j, a))
        places = slice(kept[s], kept[s + 1])
        sites.append(
            SiteStatistics(
                name=site["name"],
                layer=site["layer"],
                count=a["count"][i:j].copy(),
                min=a["min"][i:j].copy(),
                max=a["max"][i:j].copy(),
                top=Top.of(
                    int(a["top.rank"][s]), a["top.values"][places], a["top.coordinates"][places]
                ),
                moments=moments,
                histogram=_histogram("histogram", i, j, a),
                uncapped=uncapped,
                channels=channels,
            )
        )
    return sites


def _histogram_arrays(name: str, histograms: list[Histogram]) -> Arrays:
    """The bins in use as arrays; a bin's key is the sixteen leading bits of its values."""
    if not histograms:
        return {}
    keys, counts, lengths = [], [], []
    for histogram in histograms:
        for group in histogram.counts:
            sign, column = np.nonzero(group)
            keys.append(sign * _SIGN + histogram.first + column)
            counts.append(group[sign, column])
            lengths.append(len(column))
    return {
        f"{name}.zeros": np.concatenate([h.zeros for h in histograms]),
        f"{name}.bins": np.concatenate(keys).astype(np.uint16),
        f"{name}.counts": np.concatenate(counts).astype(np.int64),
        f"{name}.lengths": np.array(lengths, np.int64),
    }


def _histogram(name: str, first: int, last: int, a: Arrays) -> Histogram | None:
    """The histogram of groups [first, last); None if there is none of that name."""
    if f"{name}.bins" not in a:
        return None
    offsets = np.concatenate([[0], np.cumsum(a[f"{name}.lengths"])])
    histogram = Histogram.empty(last - first)
    histogram.zeros = a[f"{name}.zeros"][first:last].copy()
    table = np.zeros((last - first, 2, 256 * BINS_AN_OCTAVE), np.int64)
    for g in range(first, last):
        used = slice(offsets[g], offsets[g + 1])
        keys = a[f"{name}.bins"][used].astype(np.int64)
        table[g - first, keys // _SIGN, keys % _SIGN] = a[f"{name}.counts"][used]
    histogram.add(table, 0)
    return histogram
