"""Outliers side by side: the paper's Table 5 for any models, and the numbers of its figures."""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pandas as pd

from quantdiff.analysis.compare.alike import Group
from quantdiff.analysis.compare.recorded import Recorded
from quantdiff.analysis.frames import ACTIVATIONS, figure_data
from quantdiff.statistics.activations import RANKS, Activations

__all__ = ["curves", "outliers", "places"]

_MOST = 3  # places that are named

# Activation -> place -> columns of its coordinates, and how a place is written.
_LOGITS = ("layer", "head", "sequence", "query", "key")
_HIDDEN = ("layer", "sequence", "token", "channel")
_PLACES: dict[str, tuple[tuple[str, ...], dict[str, tuple[str, ...]]]] = {
    "attention_logits": (
        _LOGITS,
        {
            "layer": ("layer",),
            "head": ("layer", "head"),
            "query place": ("query",),
            "key place": ("key",),
            "key token": ("sequence", "key"),
        },
    ),
    "hidden_states": (
        _HIDDEN,
        {
            "layer": ("layer",),
            "channel": ("channel",),
            "token place": ("token",),
            "token": ("sequence", "token"),
            "channel of a token": ("sequence", "token", "channel"),
        },
    ),
}


def outliers(group: Group[Recorded]) -> pd.DataFrame:
    """The largest magnitudes and medians in the layout of the paper's Table 5.

    Returns:
        One row per activation and model: `model`, `activation`, `top1` … `top100`, `median`, and
        `top1_ratio` and `median_ratio`, relative to the first model; NaN where a number is not
        known.
    """
    rows = []
    for activation in ACTIVATIONS:
        first: dict[str, float] = {}
        for recorded in group.members:
            part: Activations = getattr(recorded.profile, activation)
            found = _magnitudes(part)
            first = first or found
            rows.append(
                {"model": recorded.label, "activation": activation}
                | found
                | {f"{name}_ratio": _ratio(found[name], first[name]) for name in ("top1", "median")}
            )
    return pd.DataFrame(rows)


def _magnitudes(part: Activations) -> dict[str, float]:
    if not part.count:
        return dict.fromkeys([*(f"top{n}" for n in RANKS), "median"], np.nan)
    found = {f"top{n}": part.rank(n) for n in RANKS} | {"median": part.median}
    return {name: np.nan if value is None else value for name, value in found.items()}


def _ratio(value: float, first: float) -> float:
    return value / first if first else np.nan


def curves(group: Group[Recorded], kind: str) -> pd.DataFrame:
    """The rows of `quantdiff.analysis.figure_data` for each model, with its name as `model`.

    Args:
        group: profiles; those that lack what the figure shows are left out.
        kind: `layers`, `heads`, `magnitudes` or `maps`.
    """
    frames = []
    for recorded in group.members:
        profile = recorded.profile
        if kind == "magnitudes" and profile.detail == "extremes":
            continue
        if kind == "maps" and not profile.maps:
            continue
        frame = figure_data(profile, kind)
        frame.insert(0, "model", recorded.label)
        frames.append(frame)
    return pd.concat(frames, ignore_index=True) if frames else pd.DataFrame()


def places(group: Group[Recorded]) -> pd.DataFrame:
    """Where the largest magnitudes sit: massive activations are in a few channels and tokens.

    Returns:
        One row per model, activation and kind of place: `kept`, how many of the largest magnitudes
        are known (usually 100); `distinct`, the number of such places they lie in; `share`, the
        share of them in the fullest place; `most`, the fullest places with their counts, ties in
        order of the magnitudes. Layers, heads, channels and positions in a sequence count from 0; a
        token is a position in one sequence.
    """
    rows = []
    for recorded in group.members:
        for activation, (columns, kinds) in _PLACES.items():
            part: Activations = getattr(recorded.profile, activation)
            if not part.count or not len(part.largest.values):
                continue
            coordinates = part.largest.coordinates[:100]  # (n, columns), by magnitude
            for place, wanted in kinds.items():
                some = coordinates[:, [columns.index(name) for name in wanted]]
                counted = Counter(map(tuple, some.tolist())).most_common()
                told = [f"{_told(place, at)} ({count})" for at, count in counted[:_MOST]]
                rows.append({
                    "model": recorded.label,
                    "activation": activation,
                    "place": place,
                    "kept": len(coordinates),
                    "distinct": len(counted),
                    "share": counted[0][1] / len(coordinates),
                    "most": ", ".join(told),
                })  # fmt: skip
    return pd.DataFrame(rows)


def _told(place: str, at: Sequence[int]) -> str:
    return _WRITTEN[place](*at) if place in _WRITTEN else str(at[0])


_WRITTEN: dict[str, Callable[..., Any]] = {
    "head": lambda layer, head: f"L{layer}H{head}",
    "key token": lambda sequence, key: f"{key} of sequence {sequence}",
    "token": lambda sequence, token: f"{token} of sequence {sequence}",
    "channel of a token": lambda sequence, token, channel: f"{channel} at {sequence}:{token}",
}
