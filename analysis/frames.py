"""The numbers behind each figure, as saved beside it."""

from collections.abc import Callable, Iterator

import numpy as np
import pandas as pd

from quantdiff.analysis.channels import channels_frame
from quantdiff.analysis.maps import maps_frame
from quantdiff.analysis.modules import own_names
from quantdiff.errors import UsageError
from quantdiff.statistics import Histogram
from quantdiff.statistics.activations import AttentionLogits, HiddenStates
from quantdiff.statistics.histogram import BINS_AN_OCTAVE
from quantdiff.statistics.profile import Profile

__all__ = [
    "ACTIVATIONS",
    "KINDS",
    "MAGNITUDE",
    "activations_of",
    "branch_histograms",
    "figure_data",
]

_STEP = BINS_AN_OCTAVE // 4  # histogram bins in a quarter of an octave


def figure_data(profile: Profile, kind: str) -> pd.DataFrame:
    """The numbers that `plot(profile, kind)` draws.

    Args:
        profile: what was recorded.
        kind: "layers" (one row per activation, layer and branch), "heads" (one row per attention
            module and head), "magnitudes" (one row per activation, branch and quarter-octave bin,
            magnitudes in [low, high), and one with low = high = 0 for the zeros, if any), "maps"
            (one row per attention module and kind of map) or "channels" (see `channels_frame`).
            `name` is a module's full name, `module` its name within its layer.

    Raises:
        UsageError: an unknown kind, magnitudes of a recording that kept only extremes, or maps or
            channels of one that did not measure them.
    """
    if kind not in KINDS:
        raise UsageError(f"there is no figure {kind!r}; choose one of {', '.join(KINDS)}")
    frame = KINDS[kind](profile)
    return frame.astype({"branch": "Int64"}) if "branch" in frame else frame


def activations_of(profile: Profile, activation: str | None) -> list[str]:
    """The activations to draw: the named one, or all.

    Raises:
        UsageError: an unknown activation.
    """
    if activation is None:
        return list(ACTIVATIONS)
    if activation not in ACTIVATIONS:
        raise UsageError(
            f"there is no activation {activation!r} in a profile; "
            f"choose one of {', '.join(ACTIVATIONS)}"
        )
    return [activation]


def _layers(profile: Profile) -> pd.DataFrame:
    frame = profile.to_frame().astype({"absmax": float})
    frame = frame[frame["activation"].isin(ACTIVATIONS)]
    keys = ["activation", "layer", "branch"]
    # sort=False keeps the order of the activations; the layers of a frame are already in order.
    return frame.groupby(keys, dropna=False, sort=False)["absmax"].max().reset_index()


def _heads(profile: Profile) -> pd.DataFrame:
    frame = profile.to_frame()
    frame = frame[frame["activation"] == "attention_logits"].reset_index(drop=True)
    frame["module"] = frame["name"].map(own_names(profile))
    columns = ["name", "module", "layer", "head", "branch", "absmax"]
    return frame[columns].astype({"head": int, "absmax": float})


def _magnitudes(profile: Profile) -> pd.DataFrame:
    if profile.detail == "extremes":
        raise UsageError(
            "a profile recorded with detail='extremes' holds no distribution of magnitudes; "
            "record it with detail='full'"
        )
    frames = []
    for activation in ACTIVATIONS:
        for branch, histogram in branch_histograms(getattr(profile, activation)):
            frame = _bins(histogram)
            frame.insert(0, "activation", activation)
            frame.insert(1, "branch", branch)
            frames.append(frame)
    return pd.concat(frames, ignore_index=True)


def branch_histograms(
    part: AttentionLogits | HiddenStates,
) -> Iterator[tuple[int | None, Histogram]]:
    """One histogram per branch, over all layers."""
    totals: dict[int | None, Histogram] = {}
    for site in part.sites:
        if site.histogram is None:
            continue
        branches: list[int | None] = [None] * site.groups
        if isinstance(part, AttentionLogits):
            branches = part.branches[site.name]
        for branch in dict.fromkeys(branches):
            groups = [g for g, other in enumerate(branches) if other == branch]
            full = site.histogram
            some = Histogram(full.counts[groups], full.first, full.zeros[groups])
            totals.setdefault(branch, Histogram.empty(1)).merge(some.total())
    yield from totals.items()


def _bins(histogram: Histogram) -> pd.DataFrame:
    counts = histogram.counts[0].sum(0).reshape(-1, _STEP).sum(1)
    quarters = np.arange(len(counts) + 1) + histogram.first // _STEP
    # The exponent's bias is 127; within an octave the bins of a float pattern are equally wide.
    edges = np.ldexp(1 + quarters % 4 / 4, quarters // 4 - 127)
    used = np.flatnonzero(counts)
    inside = slice(used[0], used[-1] + 1) if len(used) else slice(0, 0)
    low, high, counts = edges[:-1][inside], edges[1:][inside], counts[inside]
    if histogram.zeros[0]:
        low, high = np.append(0.0, low), np.append(0.0, high)
        counts = np.append(histogram.zeros[0], counts)
    share = counts / max(int(histogram.count[0]), 1)
    octaves = np.log2(high, where=high > 0, out=np.full_like(high, np.nan))
    octaves -= np.log2(low, where=low > 0, out=np.full_like(low, np.nan))
    return pd.DataFrame(
        {"low": low, "high": high, "count": counts, "share": share,
         "share_per_octave": share / octaves}
    )  # fmt: skip


ACTIVATIONS = ("attention_logits", "hidden_states")
MAGNITUDE = {"attention_logits": "|attention logit|", "hidden_states": "|hidden state|"}

KINDS: dict[str, Callable[[Profile], pd.DataFrame]] = {
    "layers": _layers,
    "heads": _heads,
    "magnitudes": _magnitudes,
    "maps": maps_frame,
    "channels": channels_frame,
}
