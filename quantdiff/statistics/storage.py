"""A profile on disk: `profile.json` for people and tools, `profile.safetensors` for the arrays."""

import json
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.numpy import load as load_tensors
from safetensors.numpy import save as save_tensors

from quantdiff.errors import UsageError
from quantdiff.files import write_bytes, write_json
from quantdiff.statistics.activations import (
    RANKS,
    SITES,
    Activations,
    AttentionLogits,
    HiddenStates,
    Values,
)
from quantdiff.statistics.arrays import Arrays, from_arrays, to_arrays
from quantdiff.statistics.map_statistics import MapStatistics
from quantdiff.statistics.profile import Profile
from quantdiff.statistics.site import SiteStatistics

__all__ = ["FORMAT", "load_profile", "read_branches", "read_content", "save_profile", "to_json"]

FORMAT = "quantdiff.profile"
VERSION = 1
_TOP_LISTED = 100


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
                        {"head": g, "branch": logits.branches[site.name][g], **row}
                        for g, row in enumerate(site.rows())
                    ],
                }
                for site in logits.sites
            ],
        },
        "hidden_states": _described(hidden),
    }
    for kind, part in profile.sites.items():
        content[kind] = _described(part)
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
    """λ of each pair of heads: its distribution over the tokens."""
    medians = [] if site.histogram is None else site.histogram.percentile(50).tolist()
    kept = ("min", "max", "mean", "std")
    return [
        {"pair": i, **{name: row[name] for name in kept}, "median": median}
        for i, (row, median) in enumerate(zip(site.rows(), medians, strict=True))
    ]


def read_content(path: Path, kind: str, newest: int, word: str) -> dict[str, Any]:
    """Read the JSON file of a result, whose entry `format` is `kind` and a version.

    Args:
        path: the file.
        kind: the format, for example `quantdiff.profile`.
        newest: newest version that can be read.
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


def read_branches(sites: list[dict[str, Any]]) -> dict[str, list[int | None]]:
    """The branch of each head, by site, from the logit sites of a JSON file."""
    return {site["name"]: [head["branch"] for head in site["heads"]] for site in sites}


def load_profile(folder: Path) -> Profile:
    """Read both files; see `Profile.load`."""
    content = read_content(folder / "profile.json", FORMAT, VERSION, "profile")
    try:
        arrays = load_tensors((folder / "profile.safetensors").read_bytes())
        logits = content["attention_logits"]["sites"]
        hidden = content["hidden_states"]["sites"]
        return Profile(
            model=content["model"],
            data=content["data"],
            definition=content["definition"],
            detail=content["detail"],
            partial=content["partial"],
            versions=content["versions"],
            command=content["command"],
            attention_logits=AttentionLogits(
                from_arrays("attention_logits", logits, arrays), read_branches(logits)
            ),
            hidden_states=HiddenStates(from_arrays("hidden_states", hidden, arrays)),
            lambdas=from_arrays("lambda", content.get("lambda", []), arrays),
            maps=_maps(content["maps"], arrays) if "maps" in content else None,
            sites={
                kind: made(from_arrays(kind, content[kind]["sites"], arrays))
                for kind, made in SITES.items()
                if kind in content
            },
        )
    except (OSError, SafetensorError, KeyError, ValueError, TypeError) as error:
        raise UsageError(f"{folder} holds a broken profile: {error}") from None


def _totals(part: Activations) -> dict[str, Any]:
    ranks = {f"top{n}": part.rank(n) for n in RANKS}
    return {"count": part.count, **ranks, "median": part.median}


def _described(part: Values) -> dict[str, Any]:
    """The entry for a kind of activation other than logits."""
    sites: list[dict[str, Any]] = []
    for site in part.sites:
        place = {"name": site.name, "layer": site.layer}
        if part.heads:
            rows = [{"head": g, **row} for g, row in enumerate(site.rows())]
            sites.append({**place, "heads": rows})
        else:
            sites += [{**place, **row} for row in site.rows()]
    return {**_totals(part), "top": [vars(item) for item in part.top(_TOP_LISTED)], "sites": sites}


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
