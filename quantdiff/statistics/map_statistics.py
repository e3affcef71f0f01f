"""Statistics kept of the attention maps of one kind in one layer: sums, extremes per head."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from quantdiff.statistics.histogram import Histogram
from quantdiff.statistics.lasting import lasting_zeros

__all__ = ["MapStatistics", "Measures"]

_COUNTS = ("rows", "weights", "negative", "sink_rows", "span_rows")
_SUMS = (
    "row_sum", "negative_mass", "sink", "sink_share", "entropy", "span_mass", "rest_mass",
    "span_share",
)  # fmt: skip
_LEAST = ("row_sum", "context_rms", "context_rms_scaled")
_MOST = ("row_sum", "context_rms")

Measures = dict[str, float | int | None]


@dataclass(eq=False)
class MapStatistics:
    """Measures of the maps of one kind in one layer, per head; see `maps.MAP_DEFINITIONS`.

    Attributes:
        name: module path of the site.
        layer: index of the layer, from 0.
        kind: `softmax` (standard heads), `branch 1`, `branch 2` or `difference`.
        heads: G query heads by their index in the projection; for a difference its map-1 heads.
        counts: rows, weights, negative (entries), sink_rows and span_rows, each (G,) int64.
        sums: sums over rows of the quantities that the measures are means of, each (G,) fp64.
        least, most: extremes over rows, each (G,) fp64; +inf and −inf if nothing was seen.
        context_rms: histogram of G groups, one value per row.
        similarity_rows, similarity_sum: number of rows that have a similarity, and its sum over
            them.
    """

    name: str
    layer: int
    kind: str
    heads: list[int]
    counts: dict[str, NDArray[np.int64]] = field(repr=False)
    sums: dict[str, NDArray[np.float64]] = field(repr=False)
    least: dict[str, NDArray[np.float64]] = field(repr=False)
    most: dict[str, NDArray[np.float64]] = field(repr=False)
    context_rms: Histogram = field(repr=False)
    similarity_rows: int = 0
    similarity_sum: float = 0.0

    @classmethod
    def empty(cls, name: str, layer: int, kind: str, heads: Sequence[int]) -> Self:
        """Empty statistics; the arguments are the attributes."""
        groups = len(heads)
        counts = lasting_zeros((len(_COUNTS), groups), np.int64)
        sums, least, most = (
            lasting_zeros((len(names), groups), np.float64) for names in (_SUMS, _LEAST, _MOST)
        )
        least[:], most[:] = np.inf, -np.inf
        return cls(
            name, layer, kind, list(heads),
            dict(zip(_COUNTS, counts, strict=True)), dict(zip(_SUMS, sums, strict=True)),
            dict(zip(_LEAST, least, strict=True)), dict(zip(_MOST, most, strict=True)),
            Histogram.empty(groups),
        )  # fmt: skip

    @property
    def similarity(self) -> float | None:
        """Mean cosine similarity of two heads' rows; None for one head or if no row has one."""
        return self.similarity_sum / self.similarity_rows if self.similarity_rows else None

    @property
    def summary(self) -> Measures:
        """The measures over the rows of all heads together, and the similarity."""
        return self._measures(slice(None)) | {"similarity": self.similarity}

    def rows(self) -> Iterator[Measures]:
        """One dictionary per head: head, counts and measures; None for measures that no row has."""
        for g, head in enumerate(self.heads):
            yield {"head": head} | self._measures(slice(g, g + 1))

    def merge(self, other: "MapStatistics") -> None:
        """Add the measures of other data at the same site, in place.

        Raises:
            ValueError: another site, kind of map or set of heads.
        """
        mine, theirs = (
            f"{x.name} (layer {x.layer}, {x.kind}, heads {x.heads})" for x in (self, other)
        )
        if mine != theirs:
            raise ValueError(f"maps of {mine} cannot be merged with maps of {theirs}")
        for name in _COUNTS:
            self.counts[name] += other.counts[name]
        for name in _SUMS:
            self.sums[name] += other.sums[name]
        for name in _LEAST:
            np.minimum(self.least[name], other.least[name], out=self.least[name])
        for name in _MOST:
            np.maximum(self.most[name], other.most[name], out=self.most[name])
        self.context_rms.merge(other.context_rms)
        self.similarity_rows += other.similarity_rows
        self.similarity_sum += other.similarity_sum

    def add(self, rows: Mapping[str, NDArray[Any]]) -> None:
        """Add rows, given as numpy arrays as described at `map_rows.Rows`."""
        visible = rows["visible"].astype(np.float64)
        counted = visible > 0
        sinks = counted & ~rows["alone"]
        spans = counted & ~np.isnan(rows["span"])
        total, mass, first, span, norm = (
            rows[name].astype(np.float64) for name in ("total", "mass", "first", "span", "norm")
        )
        per_mass = np.divide(1, mass, out=np.zeros_like(mass), where=mass > 0)
        for name, values, where in (
            ("rows", counted, counted),
            ("weights", visible, counted),
            ("negative", rows["negative"], counted),
            ("sink_rows", sinks, sinks),
            ("span_rows", spans, spans),
        ):
            self.counts[name] += np.where(where, values, 0).astype(np.int64).sum(1)
        for name, values, where in (
            ("row_sum", total, counted),
            ("negative_mass", rows["negative_mass"], counted),
            ("sink", first, sinks),
            ("sink_share", np.abs(first) * per_mass, sinks),
            ("entropy", rows["entropy"], counted),
            ("span_mass", span, spans),
            ("rest_mass", total - span, spans),
            ("span_share", rows["span_abs"] * per_mass, spans),
        ):
            self.sums[name] += np.where(where, values, 0).sum(1, dtype=np.float64)
        for name, values in (
            ("row_sum", total),
            ("context_rms", norm),
            ("context_rms_scaled", norm * np.sqrt(visible)),
        ):
            least = np.where(counted, values, np.inf).min(1, initial=np.inf)
            np.minimum(self.least[name], least, out=self.least[name])
            if name in self.most:
                most = np.where(counted, values, -np.inf).max(1, initial=-np.inf)
                np.maximum(self.most[name], most, out=self.most[name])
        self._count_norms(rows["norm"], counted)
        similar = rows["cosine"][~np.isnan(rows["cosine"])]
        self.similarity_rows += len(similar)
        self.similarity_sum += float(similar.sum(dtype=np.float64))

    def to_arrays(self) -> dict[str, NDArray[Any]]:
        """Everything but name, layer, kind and heads, without loss, as arrays for safetensors."""
        group, column = np.nonzero(self.context_rms.counts[:, 0])  # no norm is negative
        return {
            **{f"counts.{name}": array.copy() for name, array in self.counts.items()},
            **{f"sums.{name}": array.copy() for name, array in self.sums.items()},
            **{f"least.{name}": array.copy() for name, array in self.least.items()},
            **{f"most.{name}": array.copy() for name, array in self.most.items()},
            "context_rms.zeros": self.context_rms.zeros.copy(),
            "context_rms.lengths": np.bincount(group, minlength=len(self.heads)).astype(np.int64),
            "context_rms.bins": (self.context_rms.first + column).astype(np.int64),
            "context_rms.counts": self.context_rms.counts[group, 0, column],
            "similarity.rows": np.array([self.similarity_rows], np.int64),
            "similarity.sum": np.array([self.similarity_sum], np.float64),
        }

    @classmethod
    def from_arrays(
        cls,
        name: str,
        layer: int,
        kind: str,
        heads: Sequence[int],
        arrays: Mapping[str, NDArray[Any]],
    ) -> Self:
        """Rebuild from the arrays of `to_arrays` and the attributes that it leaves out.

        Raises:
            KeyError: an array is missing.
            ValueError: the arrays are for another number of heads.
        """
        result = cls.empty(name, layer, kind, heads)
        for part in ("counts", "sums", "least", "most"):
            for key, kept in getattr(result, part).items():
                kept[:] = _of_length(arrays[f"{part}.{key}"], len(heads))
        histogram = result.context_rms
        histogram.zeros[:] = _of_length(arrays["context_rms.zeros"], len(heads))
        lengths = _of_length(arrays["context_rms.lengths"], len(heads))
        bins = arrays["context_rms.bins"]
        if len(bins):
            low = int(bins.min())
            counts = np.zeros((len(heads), 2, int(bins.max()) + 1 - low), np.int64)
            group = np.repeat(np.arange(len(heads)), lengths)
            counts[group, 0, bins - low] = arrays["context_rms.counts"]
            histogram.add(counts, low)
        result.similarity_rows = int(arrays["similarity.rows"][0])
        result.similarity_sum = float(arrays["similarity.sum"][0])
        return result

    def _count_norms(self, norms: NDArray[np.float32], counted: NDArray[np.bool_]) -> None:
        """Count the norms (G, n) of the rows that count."""
        group = np.nonzero(counted)[0]
        bins = (norms[counted].view(np.uint32) >> 16).astype(np.int64)
        if not len(bins):
            return
        low = int(bins.min())
        width = int(bins.max()) + 1 - low
        flat = np.bincount(group * width + bins - low, minlength=len(self.heads) * width)
        counts = np.zeros((len(self.heads), 2, width), np.int64)
        counts[:, 0] = flat.reshape(-1, width)
        self.context_rms.add(counts, low)

    def _measures(self, part: slice) -> Measures:
        """The measures of some heads, their rows taken together."""
        counts = {name: int(array[part].sum()) for name, array in self.counts.items()}
        sums = {name: float(array[part].sum()) for name, array in self.sums.items()}
        rows = counts["rows"]

        def mean(name: str, over: str = "rows") -> float | None:
            return sums[name] / counts[over] if counts[over] else None

        def extreme(value: Any) -> float | None:
            return float(value) if rows else None

        low, high = self.least["context_rms"][part].min(), self.most["context_rms"][part].max()
        norms = Histogram(
            self.context_rms.counts[part], self.context_rms.first, self.context_rms.zeros[part]
        )
        median = norms.total().percentile(50)[0]
        measures: Measures = {
            "rows": rows,
            "weights": counts["weights"],
            "row_sum": mean("row_sum"),
            "row_sum_min": extreme(self.least["row_sum"][part].min()),
            "row_sum_max": extreme(self.most["row_sum"][part].max()),
            "negative_share": counts["negative"] / counts["weights"] if rows else None,
            "negative_mass": mean("negative_mass"),
            "sink": mean("sink", "sink_rows"),
            "sink_share": mean("sink_share", "sink_rows"),
            "sink_rows": counts["sink_rows"],
            "entropy": mean("entropy"),
            "context_rms_min": extreme(low),
            "context_rms_median": extreme(median),
            "context_rms_max": extreme(high),
            "context_rms_scaled": extreme(self.least["context_rms_scaled"][part].min()),
        }
        if self.kind == "difference":
            for name, norm in (("min", high), ("median", median), ("max", low)):
                # JSON has no infinity.
                measures[f"norm_gain_{name}"] = float(1 / norm) if rows and norm > 0 else None
        return measures | {
            "span_mass": mean("span_mass", "span_rows"),
            "rest_mass": mean("rest_mass", "span_rows"),
            "span_share": mean("span_share", "span_rows"),
            "span_rows": counts["span_rows"],
        }


def _of_length(array: NDArray[Any], length: int) -> NDArray[Any]:
    if array.shape != (length,):
        raise ValueError(f"arrays of {len(array)} heads, not of {length}")
    return array
