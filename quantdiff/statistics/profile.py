"""A recording as an object: statistics of the attention logits and the hidden states."""

import copy
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, cast

from quantdiff.errors import UsageError
from quantdiff.statistics.activations import (
    RANKS,
    Activations,
    AttentionLogits,
    CacheEntries,
    HiddenStates,
    LinearInputs,
    Values,
)
from quantdiff.statistics.map_statistics import MapStatistics
from quantdiff.statistics.site import SiteStatistics

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["DEFINITIONS", "LAMBDA", "SITE_DEFINITIONS", "Profile"]

DEFINITIONS = {
    "attention_logits": (
        "what softmax sees before masking: q·kᵀ·scaling in fp32, soft-capped where the model does, "
        "plus additive position biases; only positions that may be attended, rows of real queries "
        "only, both branches; value, topN and median are magnitudes; topN is the N-th largest; "
        "mean, std (population), kurtosis (Pearson's, 3 for a normal distribution), min and max "
        "are signed"
    ),
    "hidden_states": (
        "the residual stream after each decoder layer, real tokens only; value, topN and median "
        "are magnitudes; topN is the N-th largest; mean, std (population), kurtosis (Pearson's), "
        "min and max are signed"
    ),
}

_SITE = (
    "real tokens only, each once; statistics as of the hidden states; channel_ratio: largest "
    "magnitude over that of the median channel; token_ratio: over that of the median token; "
    "top_channel, top_token: the channel, and the place in its sequence, that hold most of the "
    "largest values kept, with their share of these"
)
SITE_DEFINITIONS = {
    "linear_inputs": f"what goes into each linear module of the layers; {_SITE}",
    "keys": f"the keys as the queries meet them, behind their rotary embedding, by head; {_SITE}",
    "values": f"the values that the attention maps weigh, by head as they are weighed; {_SITE}",
    "hidden_states": f"{DEFINITIONS['hidden_states']}; {_SITE}",
}

LAMBDA = "λ = sigmoid(W·x) of every real token and pair of heads, as the model computes it"


@dataclass(eq=False)
class Profile:
    """The result of a recording: mergeable, saveable, plottable.

    Attributes:
        model: name, family, layout, parameters, dtype, lambda.
        data: source, tokens, sequences, sequence_length.
        definition: what was counted, in words.
        detail: `full` or `extremes`.
        partial: whether the recording was cut short.
        attention_logits, hidden_states: the statistics.
        versions: versions of the libraries that the numbers depend on.
        command: the command line that made it, if any.
        lambdas: where λ is one number per token and pair, as in DIFF V2: its distribution, one site
            per layer whose groups are the pairs; otherwise empty.
        maps: measures of the attention maps, by layer and kind; None if not requested.
        sites: those of `linear_inputs`, `keys` and `values` that were requested.
    """

    model: dict[str, Any]
    data: dict[str, Any]
    definition: dict[str, str]
    detail: str
    attention_logits: AttentionLogits
    hidden_states: HiddenStates
    partial: bool = False
    versions: dict[str, str] = field(default_factory=dict)
    command: str | None = None
    lambdas: list[SiteStatistics] = field(default_factory=list)
    maps: list[MapStatistics] | None = None
    sites: dict[str, Values] = field(default_factory=dict)

    @property
    def linear_inputs(self) -> LinearInputs:
        """The inputs of the linear modules.

        Raises:
            UsageError: they were not recorded.
        """
        return cast(LinearInputs, self._site("linear_inputs"))

    @property
    def keys(self) -> CacheEntries:
        """The keys of all layers.

        Raises:
            UsageError: they were not recorded.
        """
        return cast(CacheEntries, self._site("keys"))

    @property
    def values(self) -> CacheEntries:
        """The values of all layers.

        Raises:
            UsageError: they were not recorded.
        """
        return cast(CacheEntries, self._site("values"))

    def copy(self) -> Self:
        """An independent copy."""
        return copy.deepcopy(self)

    def merge(self, other: "Profile") -> "Profile":
        """Both recordings as one, as if one process had seen the data of both.

        The sequences of `other` are numbered after this profile's.

        Raises:
            UsageError: recordings of different models, definitions or levels of detail.
        """
        mine = (self.model, self.definition, self.detail, _shape(self))
        if mine != (other.model, other.definition, other.detail, _shape(other)):
            raise UsageError(
                f"profiles of {self.model.get('name')!r} ({self.detail}) and "
                f"{other.model.get('name')!r} ({other.detail}) do not measure the same thing "
                "and cannot be merged"
            )
        result, added = self.copy(), other.copy()
        shift = int(self.data["sequences"])
        for (_, ours), (_, theirs) in zip(result._parts(), added._parts(), strict=True):
            for site, further in zip(ours.sites, theirs.sites, strict=True):
                further.top.coordinates[:, ours.sequence] += shift
                site.merge(further)
            ours._histogram = None
        for lam, more in zip(result.lambdas, added.lambdas, strict=True):
            lam.merge(more)
        for maps, others in zip(result.maps or [], added.maps or [], strict=True):
            maps.merge(others)
        for name in ("tokens", "sequences"):
            result.data[name] = self.data[name] + other.data[name]
        result.data["sequence_length"] = max(
            self.data["sequence_length"], other.data["sequence_length"]
        )
        _join_provenance(result, other)
        return result

    def to_frame(self) -> "pd.DataFrame":
        """One row per site and head: activation, name, layer, head, branch, count and statistics.

        Where channels were recorded, also the median magnitude and the fields of `Outliers`.
        """
        import pandas as pd  # 45 MB that a recording does not need

        return pd.DataFrame(list(self._rows()))

    def maps_frame(self) -> "pd.DataFrame":
        """One row per layer, kind of map and head, with the measures of `MAP_DEFINITIONS`.

        Raises:
            UsageError: the maps were not measured.
        """
        import pandas as pd

        if self.maps is None:
            raise UsageError("this profile has no maps; record(model, maps=True) measures them")
        return pd.DataFrame([
            {"name": site.name, "layer": site.layer, "kind": site.kind, **row}
            for site in self.maps
            for row in site.rows()
        ])  # fmt: skip

    def summary(self) -> "pd.DataFrame":
        """The paper's Table 5: top-1, 2, 3, 10, 100 and median, one row per activation."""
        import pandas as pd

        rows = {
            kind: {
                **{f"top-{n}": part.rank(n) for n in RANKS},
                "median": part.median,
            }
            for kind, part in self._parts()
        }
        return pd.DataFrame.from_dict(rows, orient="index", dtype=float)

    def save(self, folder: str | Path) -> None:
        """Write `profile.json` and `profile.safetensors` to a folder, created if needed."""
        from quantdiff.statistics.storage import save_profile

        save_profile(self, Path(folder))

    @classmethod
    def load(cls, folder: str | Path) -> "Profile":
        """Read what `save` wrote.

        Raises:
            UsageError: no profile, a broken one, or one of a newer format.
        """
        from quantdiff.statistics.storage import load_profile

        return load_profile(Path(folder))

    def plot(self, kind: str = "layers", *, activation: str | None = None, ax: Any = None) -> Any:
        """Draw a figure of the profile; see `quantdiff.plot`."""
        import quantdiff

        return quantdiff.plot(self, kind, activation=activation, ax=ax)

    def __repr__(self) -> str:
        name, layout = self.model.get("name"), self.model.get("layout")
        head = (
            f"Profile of {name} ({self.model.get('family')}, head layout {layout}): "
            f"{self.data['tokens']:,} tokens in {self.data['sequences']:,} sequences, "
            f"{self.detail}{', partial' if self.partial else ''}"
        )
        table = self.summary().to_string(float_format=lambda x: f"{x:.4g}", na_rep="–")
        return f"{head}\n{table}"

    def _repr_html_(self) -> str:
        import quantdiff

        return quantdiff.to_html(self)

    def _site(self, kind: str) -> Values:
        if kind not in self.sites:
            raise UsageError(
                f"this profile has no {kind}; record(model, sites=({kind!r},)) or --sites {kind} "
                "records them"
            )
        return self.sites[kind]

    def _parts(self) -> Iterator[tuple[str, Activations]]:
        yield "attention_logits", self.attention_logits
        yield "hidden_states", self.hidden_states
        yield from self.sites.items()

    def _rows(self) -> Iterator[dict[str, Any]]:
        for kind, part in self._parts():
            for site in part.sites:
                for g, row in enumerate(site.rows()):
                    yield {
                        "activation": kind,
                        "name": site.name,
                        "layer": site.layer,
                        "head": g if isinstance(part, AttentionLogits | CacheEntries) else None,
                        "branch": part.branches[site.name][g]
                        if isinstance(part, AttentionLogits)
                        else None,
                        "count": int(site.count[g]),
                        **row,
                    }


def _join_provenance(result: Profile, other: Profile) -> None:
    """Record the data and versions of both profiles in the merged one."""
    if result.data["source"] != other.data["source"]:
        result.data["source"] = f"{result.data['source']} + {other.data['source']}"
    prints = [profile.data.get("fingerprint") for profile in (result, other)]
    result.data.pop("fingerprint", None)
    if None not in prints:
        result.data["fingerprint"] = hashlib.sha256("".join(map(str, prints)).encode()).hexdigest()
    if result.command != other.command:
        result.command = None
    for name, version in other.versions.items():
        if result.versions.setdefault(name, version) != version:
            result.versions[name] += f", {version}"
    result.partial = result.partial or other.partial


def _shape(profile: Profile) -> list[tuple[str, int, int, int]]:
    sites = [(kind, site) for kind, part in profile._parts() for site in part.sites]
    sites += [("lambda", site) for site in profile.lambdas]
    return [
        (f"{kind} {site.name}", site.groups, site.top.rank, site.width) for kind, site in sites
    ] + [(f"{site.name} {site.kind}", len(site.heads), 0, 0) for site in profile.maps or []]
