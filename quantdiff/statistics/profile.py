"""A recording as an object: what was seen at the attention logits and the hidden states."""

import copy
import hashlib
import html
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from quantdiff.errors import UsageError
from quantdiff.statistics.histogram import Histogram
from quantdiff.statistics.moments import Moments
from quantdiff.statistics.site import SiteStatistics
from quantdiff.statistics.top import Top

if TYPE_CHECKING:
    import pandas as pd

__all__ = [
    "DEFINITIONS",
    "RANKS",
    "Activations",
    "AttentionLogits",
    "HiddenState",
    "HiddenStates",
    "Logit",
    "Profile",
]

RANKS = (1, 2, 3, 10, 100)

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


@dataclass(frozen=True)
class Logit:
    """A large attention logit: its magnitude and where it stands, all counted from 0."""

    value: float
    layer: int
    head: int
    branch: int | None
    sequence: int
    query: int
    key: int


@dataclass(frozen=True)
class HiddenState:
    """A large element of the residual stream: its magnitude and where it stands, from 0."""

    value: float
    layer: int
    sequence: int
    token: int
    channel: int


@dataclass(eq=False)
class Activations:
    """One kind of activation over all layers.

    Attributes:
        sites: one a layer, in order.
    """

    sites: list[SiteStatistics]
    _histogram: Histogram | None = field(default=None, init=False, repr=False)

    @property
    def count(self) -> int:
        """Number of values seen."""
        return int(sum(site.count.sum() for site in self.sites))

    @property
    def absmax(self) -> float:
        """Largest magnitude; NaN if nothing was seen."""
        return max((float(site.absmax.max()) for site in self.sites), default=float("nan"))

    @property
    def largest(self) -> Top:
        """The largest magnitudes of all sites with their coordinates."""
        tops = [site.top for site in self.sites]
        merged = Top(tops[0].rank, tops[0].coordinates.shape[1])
        for top in tops:
            merged.offer(top.values, top.coordinates)
        return merged

    @property
    def histogram(self) -> Histogram | None:
        """All values of all sites, one group; None where only extremes were recorded."""
        if self._histogram is None:
            parts = [site.histogram for site in self.sites]
            total = Histogram.empty(1)
            for part in parts:
                if part is None:
                    return None
                total.merge(part.total())
            self._histogram = total
        return self._histogram

    @property
    def moments(self) -> Moments | None:
        """Moments of all values, one group; None where only extremes were recorded."""
        total = Moments.empty(1)
        for site in self.sites:
            if site.moments is None:
                return None
            total.merge(site.moments.total())
        return total

    @property
    def median(self) -> float | None:
        """Median magnitude to 0.5 %; None where only extremes were recorded."""
        return self.percentile(50)

    def percentile(self, percent: float) -> float | None:
        """Magnitude below which `percent` per cent of the magnitudes lie, to 0.5 %."""
        histogram = self.histogram
        if histogram is None:
            return None
        if percent == 100:
            return self.absmax
        return float(histogram.percentile(percent)[0])

    def rank(self, n: int) -> float | None:
        """The n-th largest magnitude; None if fewer were kept."""
        values = self.largest.values
        return float(values[n - 1]) if 0 < n <= len(values) else None


class AttentionLogits(Activations):
    """The attention logits of all layers; a site's groups are its query heads."""

    def __init__(
        self, sites: list[SiteStatistics], branches: Mapping[int, Sequence[int | None]]
    ) -> None:
        super().__init__(sites)
        self.branches = {layer: list(heads) for layer, heads in branches.items()}

    def top(self, n: int) -> list[Logit]:
        """The n largest magnitudes, or as many as were kept, ties by the lowest coordinate."""
        return self.items(self.largest)[:n]

    def items(self, top: Top) -> list[Logit]:
        """The entries of a site's or of all sites' largest magnitudes."""
        return [
            Logit(float(value), layer, head, self.branches[layer][head], sequence, query, key)
            for value, (layer, head, sequence, query, key) in zip(
                top.values, top.coordinates.tolist(), strict=True
            )
        ]


class HiddenStates(Activations):
    """The residual stream after every decoder layer; a site has one group."""

    def top(self, n: int) -> list[HiddenState]:
        """The n largest magnitudes, or as many as were kept, ties by the lowest coordinate."""
        return self.items(self.largest)[:n]

    def items(self, top: Top) -> list[HiddenState]:
        """The entries of a site's or of all sites' largest magnitudes."""
        return [
            HiddenState(float(value), *place)
            for value, place in zip(top.values, top.coordinates.tolist(), strict=True)
        ]


@dataclass(eq=False)
class Profile:
    """What a recording saw: mergeable, saveable, plottable.

    Attributes:
        model: name, family, layout, parameters, dtype, lambda.
        data: source, tokens, sequences, sequence_length.
        definition: what was counted, in words.
        detail: `full` or `extremes`.
        partial: the recording was cut short.
        attention_logits, hidden_states: the statistics.
        versions: of the libraries that the numbers depend on.
        command: the command line that made it, if one did.
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
        # Column of the sequence among the coordinates.
        for ours, theirs, column in (
            (result.attention_logits, added.attention_logits, 2),
            (result.hidden_states, added.hidden_states, 1),
        ):
            for site, further in zip(ours.sites, theirs.sites, strict=True):
                further.top.coordinates[:, column] += shift
                site.merge(further)
            ours._histogram = None
        for name in ("tokens", "sequences"):
            result.data[name] = self.data[name] + other.data[name]
        result.data["sequence_length"] = max(
            self.data["sequence_length"], other.data["sequence_length"]
        )
        _join_provenance(result, other)
        return result

    def to_frame(self) -> "pd.DataFrame":
        """One row a site and head: activation, name, layer, head, branch, count and statistics."""
        import pandas as pd  # 45 MB that a recording need not hold

        return pd.DataFrame(list(self._rows()))

    def summary(self) -> "pd.DataFrame":
        """The paper's Table 5: top-1, 2, 3, 10, 100 and median, one row an activation."""
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
        """Write `profile.json` and `profile.safetensors` into a folder, made if missing."""
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
        head, _, _ = repr(self).partition("\n")
        table = self.summary().to_html(float_format=lambda x: f"{x:.4g}", na_rep="–", border=0)
        return f"<p>{html.escape(head)}</p>\n{table}"

    def _parts(self) -> Iterator[tuple[str, AttentionLogits | HiddenStates]]:
        yield "attention_logits", self.attention_logits
        yield "hidden_states", self.hidden_states

    def _rows(self) -> Iterator[dict[str, Any]]:
        for kind, part in self._parts():
            for site in part.sites:
                for g, row in enumerate(site.rows()):
                    yield {
                        "activation": kind,
                        "name": site.name,
                        "layer": site.layer,
                        "head": g if isinstance(part, AttentionLogits) else None,
                        "branch": part.branches[site.layer][g]
                        if isinstance(part, AttentionLogits)
                        else None,
                        "count": int(site.count[g]),
                        **row,
                    }


def _join_provenance(result: Profile, other: Profile) -> None:
    """Say what data and versions a merged profile stands for."""
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


def _shape(profile: Profile) -> list[tuple[str, int, int]]:
    return [
        (site.name, site.groups, site.top.rank)
        for _, part in profile._parts()
        for site in part.sites
    ]
