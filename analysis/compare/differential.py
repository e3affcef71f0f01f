"""What sets differential models apart: λ, two branches, their maps, and where errors cancel."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pandas as pd

from quantdiff.analysis.compare.alike import Group
from quantdiff.analysis.compare.measured import Measured
from quantdiff.analysis.compare.recorded import Recorded
from quantdiff.analysis.frames import branch_histograms
from quantdiff.analysis.maps import least_norm, maps_frame
from quantdiff.analysis.modules import by_module
from quantdiff.analysis.sweep.lines import NO_WAY, Line, lines, measures, way_label
from quantdiff.statistics.histogram import Histogram
from quantdiff.statistics.map_statistics import MapStatistics

__all__ = ["branches", "is_differential", "lambdas", "maps", "noise"]


def is_differential(recorded: Recorded) -> bool:
    """Whether a model's heads have branches."""
    return any(
        branch is not None
        for heads in recorded.profile.attention_logits.branches.values()
        for branch in heads
    )


def lambdas(group: Group[Recorded]) -> pd.DataFrame:
    """λ by depth.

    Returns:
        One row per model and layer: `model`, `layer`, `mean`, and, where λ is computed per token
        and pair of heads (DIFF V2), `low`, `median` and `high`, the 5th, 50th and 95th percentiles.
    """
    rows: list[dict[str, Any]] = []
    for recorded in group.members:
        layers = recorded.profile.model.get("lambda") or []
        rows += [
            {"model": recorded.label, "layer": layer, "mean": value}
            for layer, value in enumerate(layers)
            if value is not None
        ]
        for site in recorded.profile.lambdas:
            if site.moments is None or site.histogram is None or not site.count.any():
                continue
            total = site.histogram.total()
            ends = {
                name: float(total.percentile(percent)[0])
                for name, percent in (("low", 5), ("median", 50), ("high", 95))
            }
            mean = float(site.moments.total().mean[0])
            rows.append({"model": recorded.label, "layer": site.layer, "mean": mean} | ends)
    columns = ["model", "layer", "mean", "low", "median", "high"]
    return pd.DataFrame(rows, columns=columns).astype(dict.fromkeys(columns[2:], float))


def branches(group: Group[Recorded]) -> pd.DataFrame:
    """Branch 1 beside branch 2 of each differential model.

    Returns:
        One row per model and branch: `model`, `branch`, `count`, `top1`, the largest magnitude of
        an attention logit, and `median`, NaN where only extremes were recorded.
    """
    rows = []
    for recorded in group.members:
        part = recorded.profile.attention_logits
        medians = {
            branch: float(histogram.percentile(50)[0])
            for branch, histogram in branch_histograms(part)
        }
        for branch in (1, 2) if is_differential(recorded) else ():
            heads = [
                (site, g)
                for site in part.sites
                for g, other in enumerate(part.branches[site.name])
                if other == branch
            ]
            rows.append({
                "model": recorded.label,
                "branch": branch,
                "count": sum(int(site.count[g]) for site, g in heads),
                "top1": max((float(site.absmax[g]) for site, g in heads), default=np.nan),
                "median": medians.get(branch, np.nan),
            })  # fmt: skip
    return pd.DataFrame(rows, columns=["model", "branch", "count", "top1", "median"])


def maps(group: Group[Recorded]) -> pd.DataFrame:
    """Measures of the attention maps over all layers, where they were measured.

    Returns:
        One row per model and kind of map: `model`, `kind`, `module` (a row each, where layers of a
        model hold several attention modules), `rows`, the means over rows `row_sum`,
        `negative_mass`, `sink` and `entropy`, then `context_rms_min`, `context_rms_median` and
        `context_rms_max`, and their bounds: `lower`, 1/√n for softmax over the longest sequence, n,
        and 0 for a difference, where a learned sink takes a share of the weights, and for
        cross-attention; `upper`, 1 for softmax, and for a difference the largest of its layers:
        √(1 + λ²) for λ ≥ 0, as ‖w₁ − λ·w₂‖² ≤ ‖w₁‖² + λ²·‖w₂‖² for non-negative weights, 1 + |λ|
        for λ < 0, and √2 for V2, whose λ lies between 0 and 1. It is NaN where λ is not known.
    """
    found = []
    for recorded in group.members:
        if not recorded.profile.maps:
            continue
        longest = int(recorded.profile.data["sequence_length"])
        for module, part in by_module(maps_frame(recorded.profile)):
            names = set(part["name"])
            kinds: dict[str, list[MapStatistics]] = {}
            for site in recorded.profile.maps:
                if site.name in names:
                    kinds.setdefault(site.kind, []).append(site)
            for kind, sites in kinds.items():
                found.append(
                    {"model": recorded.label, "kind": kind, "module": module}
                    | _together(sites)
                    | {"lower": least_norm(sites, longest)}
                    | {"upper": _largest(recorded, sites) if kind == "difference" else 1.0}
                )
    frame = pd.DataFrame(found)
    return frame.drop(columns="module") if len(frame) and frame["module"].isna().all() else frame


def _largest(recorded: Recorded, sites: list[MapStatistics]) -> float:
    """The norm that no row of these differences exceeds; NaN where λ is not known."""
    if recorded.profile.lambdas:
        return 2**0.5
    layers = recorded.profile.model.get("lambda")
    # Layers without attention, as in hybrid models, have no λ and no site.
    known = [layers[site.layer] if layers else None for site in sites]
    found = [(1 + x**2) ** 0.5 if x >= 0 else 1 - x for x in known if x is not None]
    return max(found) if len(found) == len(sites) else np.nan


def _together(sites: list[MapStatistics]) -> dict[str, Any]:
    """Combine the rows of some layers into one."""
    rows = sum(int(site.counts["rows"].sum()) for site in sites)
    norms = Histogram.empty(1)
    for site in sites:
        norms.merge(site.context_rms.total())
    ends = {
        "context_rms_min": min(float(site.least["context_rms"].min()) for site in sites),
        "context_rms_median": float(norms.percentile(50)[0]),
        "context_rms_max": max(float(site.most["context_rms"].max()) for site in sites),
    }
    if not rows:
        ends = dict.fromkeys(ends, np.nan)
    means = {
        name: _mean(sites, name, over)
        for name, over in (
            ("row_sum", "rows"), ("negative_mass", "rows"), ("sink", "sink_rows"),
            ("entropy", "rows"),
        )
    }  # fmt: skip
    return {"rows": rows} | means | ends


def _mean(sites: list[MapStatistics], name: str, over: str) -> float:
    count = sum(int(site.counts[over].sum()) for site in sites)
    return sum(float(site.sums[name].sum()) for site in sites) / count if count else np.nan


def noise(measured: Measured) -> pd.DataFrame:
    """Signal to quantization noise before and after the subtraction, from the evaluation `noise`.

    Returns:
        One row per model, scheme and width: `model`, `scheme`, `bits`, then the evaluation's
        metrics, each the mean over layers: `snr_logits`, `snr_softmax` for standard heads,
        `snr_branch_1`, `snr_branch_2`, `snr_difference`, `cancellation` for differential ones, and
        `snr_hidden`; NaN where a model has none. Only widths with noise are listed.
    """
    rows: dict[tuple[Any, ...], dict[str, Any]] = {}
    for metric, line in _noise_lines(measured):
        for bits, point in line.points.items():
            if bits != 16 and point["status"] == "ok":
                key = (line.model, "" if line.way == NO_WAY else way_label(line.way), bits)
                rows.setdefault(key, {})[metric] = point["value"]
    found = [
        dict(zip(("model", "scheme", "bits"), key, strict=True)) | values
        for key, values in rows.items()
    ]
    known = [name for name in _NOISE if any(name in row for row in found)]
    return pd.DataFrame(found, columns=["model", "scheme", "bits", *known])


def _noise_lines(measured: Measured) -> Iterator[tuple[str, Line]]:
    for measure in measures(measured.results):
        for line in lines(measured.results, measure):
            yield measure.metric, line


_NOISE = (
    "snr_logits", "snr_softmax", "snr_branch_1", "snr_branch_2", "snr_difference", "cancellation",
    "snr_hidden",
)  # fmt: skip
