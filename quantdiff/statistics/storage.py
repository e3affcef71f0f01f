"""A profile on disk: `profile.json` for people and tools, `profile.safetensors` for the arrays."""

import json
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load as load_tensors
from safetensors.numpy import save as save_tensors

from quantdiff.errors import UsageError
from quantdiff.files import write_bytes, write_json
from quantdiff.statistics.activations import (
    RANKS,
    Activations,
    AttentionLogits,
    HiddenStates,
)
from quantdiff.statistics.histogram import BINS_AN_OCTAVE, Histogram
from quantdiff.statistics.map_statistics import MapStatistics
from quantdiff.statistics.moments import Moments
from quantdiff.statistics.profile import Profile
from quantdiff.statistics.site import SiteStatistics
from quantdiff.statistics.top import Top

__all__ = [
    "FORMAT",
    "Arrays",
    "from_arrays",
    "load_profile",
    "read_content",
    "save_profile",
    "to_arrays",
    "to_json",
]

FORMAT = "quantdiff.profile"
VERSION = 1
_SIGN = 1 << 15  # of a bin's key: set for negative values
_TOP_LISTED = 100

Arrays = dict[str, NDArray[Any]]


def save_profile(profile: Profile, folder: Path) -> None:
    """Write both files; the JSON last, so that its presence means a whole profile."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "profile.json").unlink(missing_ok=True)
    arrays: Arrays = {}
    for kind, part in profile._parts():
        arrays |= {f"{kind}.{name}": array for name, array in to_arrays(part.sites).items()}
    if profile.lambdas:
        arrays |= {f"lambda.{n}": array for n, array in to_arrays(profile.lambdas).items()}
    for i, site in enumerate(profile.maps or []):
        arrays |= {f"maps.{i}.{name}": array for name, array in site.to_arrays().items()}
    write_bytes(folder / "profile.safetensors", save_tensors(arrays))
    write_json(folder / "profile.json", to_json(profile))


def to_json(profile: Profile) -> dict[str, Any]:
    """The content of `profile.json`."""
    logits, hidden = profile.attention_logits, profile.hidden_states
    content = {
        "format": f"{FORMAT}/{VERSION}",
        "model": profile.model,
        "data": profile.data,
        "definition": profile.definition,
        "detail": profile.detail,
        "partial": profile.partial,
        "versions": profile.versions,
        "command": profile.command,
        "attention_logits": {
            **_totals(logits),
            "top": [vars(item) for item in logits.top(_TOP_LISTED)],
            "sites": [
                {
                    "name": site.name,
                    "layer": site.layer,
                    "heads": [
                        {"head": g, "branch": logits.branches[site.layer][g], **row}
                        for g, row in enumerate(site.rows())
                    ],
                }
                for site in logits.sites
            ],
        },
        "hidden_states": {
            **_totals(hidden),
            "top": [vars(item) for item in hidden.top(_TOP_LISTED)],
            "sites": [
                {"name": site.name, "layer": site.layer, **row}
                for site in hidden.sites
                for row in site.rows()
            ],
        },
    }
    if profile.lambdas:
        content["lambda"] = [
            {"name": site.name, "layer": site.layer, "pairs": _lambda_rows(site)}
            for site in profile.lambdas
        ]
    if profile.maps is not None:
        content["maps"] = [
            {
                "name": site.name,
                "layer": site.layer,
                "kind": site.kind,
                **site.summary,
                "heads": list(site.rows()),
            }
            for site in profile.maps
        ]
    return content


def _lambda_rows(site: SiteStatistics) -> list[dict[str, Any]]:
    """λ of each pair of heads: how it is spread over the tokens."""
    medians = [] if site.histogram is None else site.histogram.percentile(50).tolist()
    kept = ("min", "max", "mean", "std")
    return [
        {"pair": i, **{name: row[name] for name in kept}, "median": median}
        for i, (row, median) in enumerate(zip(site.rows(), medians, strict=True))
    ]


def read_content(path: Path, kind: str, newest: int, word: str) -> dict[str, Any]:
    """The JSON file of a result, whose entry `format` is `kind` and a version.

    Args:
        path: the file.
        kind: of the format, for example `quantdiff.profile`.
        newest: version that can be read.
        word: what the file holds, for messages, for example `profile`.

    Raises:
        UsageError: it is missing, broken, of another kind or of a newer version.
    """
    try:
        content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        name, _, version = str(content["format"]).partition("/")
        known = name == kind and version.isdigit()
    except FileNotFoundError:
        raise UsageError(f"{path.parent} holds no {word}: {path.name} is missing") from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(f"{path} is no readable {word}: {error}") from None
    if not known:
        raise UsageError(f"{path} is no {word}: its format is {content['format']!r}")
    if int(version) > newest:
        raise UsageError(
            f"{path} has format version {version}, newer than this quantdiff reads ({newest}); "
            "upgrade quantdiff"
        )
    return content


def load_profile(folder: Path) -> Profile:
    """Read both files; see `Profile.load`."""
    content = read_content(folder / "profile.json", FORMAT, VERSION, "profile")
    try:
        arrays = load_tensors((folder / "profile.safetensors").read_bytes())
        logits = content["attention_logits"]["sites"]
        hidden = content["hidden_states"]["sites"]
        branches = {site["layer"]: [head["branch"] for head in site["heads"]] for site in logits}
        return Profile(
            model=content["model"],
            data=content["data"],
            definition=content["definition"],
            detail=content["detail"],
            partial=content["partial"],
            versions=content["versions"],
            command=content["command"],
            attention_logits=AttentionLogits(
                from_arrays("attention_logits", logits, arrays), branches
            ),
            hidden_states=HiddenStates(from_arrays("hidden_states", hidden, arrays)),
            lambdas=from_arrays("lambda", content.get("lambda", []), arrays),
            maps=_maps(content["maps"], arrays) if "maps" in content else None,
        )
    except (OSError, SafetensorError, KeyError, ValueError, TypeError) as error:
        raise UsageError(f"{folder} holds a broken profile: {error}") from None


def _totals(part: Activations) -> dict[str, Any]:
    ranks = {f"top{n}": part.rank(n) for n in RANKS}
    return {"count": part.count, **ranks, "median": part.median}


def _maps(described: list[dict[str, Any]], arrays: Arrays) -> list[MapStatistics]:
    return [
        MapStatistics.from_arrays(
            site["name"],
            site["layer"],
            site["kind"],
            [head["head"] for head in site["heads"]],
            {
                name.removeprefix(f"maps.{i}."): array
                for name, array in arrays.items()
                if name.startswith(f"maps.{i}.")
            },
        )
        for i, site in enumerate(described)
    ]


def to_arrays(sites: list[SiteStatistics]) -> Arrays:
    """The statistics of some sites as arrays, groups after one another; names and layers not."""
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
        # Alternating layers may differ; no magnitude is negative.
        arrays["uncapped"] = np.concatenate([
            np.full(site.groups, -1, np.float32) if site.uncapped is None else site.uncapped
            for site in sites
        ])  # fmt: skip
    moments = [site.moments for site in sites if site.moments is not None]
    for name in ("mean", "m2", "m3", "m4") if moments else ():
        arrays[name] = np.concatenate([getattr(m, name) for m in moments])
    histograms = [site.histogram for site in sites if site.histogram is not None]
    if histograms:
        # Only the bins in use: a bin's key is the sixteen leading bits of its values.
        keys, counts, lengths = [], [], []
        for histogram in histograms:
            for group in histogram.counts:
                sign, column = np.nonzero(group)
                keys.append(sign * _SIGN + histogram.first + column)
                counts.append(group[sign, column])
                lengths.append(len(column))
        arrays["histogram.zeros"] = np.concatenate([h.zeros for h in histograms])
        arrays["histogram.bins"] = np.concatenate(keys).astype(np.uint16)
        arrays["histogram.counts"] = np.concatenate(counts).astype(np.int64)
        arrays["histogram.lengths"] = np.array(lengths, np.int64)
    return {name: np.ascontiguousarray(array) for name, array in arrays.items()}


def from_arrays(kind: str, described: list[dict[str, Any]], arrays: Arrays) -> list[SiteStatistics]:
    """What `to_arrays` took apart, whose names begin with `kind` and a dot.

    Args:
        kind: of the sites.
        described: their `name` and `layer`, in order.
        arrays: of all kinds.
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
    offsets = np.concatenate([[0], np.cumsum(a.get("histogram.lengths", np.zeros(0, np.int64)))])
    kept = np.concatenate([[0], np.cumsum(a["top.lengths"])])
    sites = []
    for s, (site, i, j) in enumerate(zip(described, starts, ends, strict=True)):
        moments = histogram = None
        if "mean" in a:
            moments = Moments(*(a[n][i:j].copy() for n in ("count", "mean", "m2", "m3", "m4")))
        if "histogram.bins" in a:
            histogram = Histogram.empty(j - i)
            histogram.zeros = a["histogram.zeros"][i:j].copy()
            table = np.zeros((j - i, 2, 256 * BINS_AN_OCTAVE), np.int64)
            for g in range(i, j):
                keys = a["histogram.bins"][offsets[g] : offsets[g + 1]].astype(np.int64)
                table[g - i, keys // _SIGN, keys % _SIGN] = a["histogram.counts"][
                    offsets[g] : offsets[g + 1]
                ]
            histogram.add(table, 0)
        uncapped = None
        if "uncapped" in a and (a["uncapped"][i:j] >= 0).all():
            uncapped = a["uncapped"][i:j].copy()
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
                histogram=histogram,
                uncapped=uncapped,
            )
        )
    return sites
