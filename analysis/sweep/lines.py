"""The results of a sweep as lines over bits: what its tables print and its figures draw."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any, NamedTuple

from quantdiff.analysis.sweep.loaded import SweepResults
from quantdiff.analysis.sweep.results import Row
from quantdiff.quantization.short import SHORT

__all__ = [
    "NO_WAY",
    "WAYS",
    "Line",
    "Measure",
    "Way",
    "evaluation_labels",
    "lines",
    "measures",
    "model_labels",
    "of_some",
    "same_in",
    "way_label",
]


class Way(NamedTuple):
    """What distinguishes two ways of quantizing, apart from their bits; see `results.jsonl`.

    Several sites together have their short name as `site`, what that name leaves out as `schemes`,
    and nothing else except a remedy.
    """

    site: str | None = None
    range: str | None = None
    granularity: str | None = None
    symmetric: bool | None = None
    newest: int | None = None
    schemes: str | None = None
    remedy: str | None = None


WAYS = Way._fields
NO_WAY = Way()  # of a model that was only evaluated unquantized


@dataclass(frozen=True)
class Measure:
    """One metric of one evaluation.

    Attributes:
        evaluation: name.
        metric: name.
        source: label of the evaluation among the others; see `evaluation_labels`.
    """

    evaluation: str
    metric: str
    source: str

    @property
    def is_accuracy(self) -> bool:
        """Whether the published Figure 8 can be shown beside it."""
        return self.metric.rpartition(":")[2].startswith("acc")

    @property
    def label(self) -> str:
        """For a title: the metric, and the evaluation if it is called something else."""
        return self.metric if self.metric == self.source else f"{self.metric} · {self.source}"


@dataclass(frozen=True)
class Line:
    """One model, quantized in one way to several widths.

    Attributes:
        model: name.
        way: values of `WAYS`, or `NO_WAY`.
        points: bits -> line of `results.jsonl`, widest first; that of a failed cell has no value.
    """

    model: str
    way: Way
    points: dict[int, Row]


def measures(results: SweepResults) -> list[Measure]:
    """All metrics, grouped by evaluation; the first of each evaluation is its main one."""
    found: dict[str, dict[str, None]] = {}
    for row in results.rows:
        of_one = found.setdefault(row["eval"], {})
        if row["status"] == "ok":
            of_one[row["metric"]] = None
    labels = evaluation_labels(found) | results.labels
    return [
        Measure(name, metric, labels[name]) for name, of_one in found.items() for metric in of_one
    ]


def lines(results: SweepResults, measure: Measure) -> list[Line]:
    """A metric as lines, model by model, in the order of the grid.

    Cells of only some layers or heads are left out, as they form no line over bits;
    `quantdiff.analysis.sensitivity` reads them.
    """
    found: dict[str, dict[Way, dict[int, Row]]] = {model: {} for model in results.models}
    references: dict[str, Row] = {}
    for row in results.rows:
        failed = row["status"] != "ok"
        if row["eval"] != measure.evaluation or not (failed or row["metric"] == measure.metric):
            continue
        if row["site"] is None:
            references[row["model"]] = row
            continue
        options = row["options"]
        if of_some(row):
            continue
        how = options.get("symmetric"), options.get("newest"), None, options.get("remedy")
        way = Way(row["site"], row["range"], row["granularity"], *how)
        if "schemes" in options:  # its bits alone do not identify it
            way = Way(row["scheme"], schemes=_unsaid(options["schemes"]), remedy=how[-1])
        found[row["model"]].setdefault(way, {})[row["bits"]] = row
    result = []
    for model, ways in found.items():
        reference = {16: references[model]} if model in references else {}
        if reference and not ways:
            ways = {NO_WAY: {}}  # noqa: PLW2901
        result += [
            Line(model, way, dict(sorted((reference | points).items(), reverse=True)))
            for way, points in ways.items()
        ]
    return result


def _unsaid(schemes: Sequence[Mapping[str, Any]]) -> str | None:
    """How schemes used together differ from those that their short name stands for, in words.

    Args:
        schemes: from the `options` of a line.
    """
    usual = {site: usual for sites, *usual in SHORT.values() for site in sites}
    found = []
    for one in sorted(schemes, key=lambda one: list(usual).index(one["site"])):
        granularity, symmetric = usual[one["site"]]
        told = [] if one["range"] == "dynamic" else [one["range"]]
        # The name includes the size of groups.
        if one["granularity"] != granularity and not one["granularity"].startswith("group:"):
            told.append(one["granularity"])
        if one["symmetric"] != symmetric:
            told.append("symmetric" if one["symmetric"] else "asymmetric")
        if told:
            found.append(" ".join([one["site"].replace("_", " "), *told]))
    return " and ".join(found) or None


def of_some(row: Row) -> bool:
    """Whether a cell is of only some layers or heads."""
    schemes = row["options"].get("schemes", [row["options"]])
    return any("layers" in one or "heads" in one for one in schemes)


def same_in(ways: Iterable[Way]) -> list[str]:
    """Which of `WAYS` are the same in several ways; unquantized models are ignored."""
    known = {way for way in ways if way != NO_WAY}
    return [name for place, name in enumerate(WAYS) if len({way[place] for way in known}) == 1]


def way_label(way: Way, leave_out: Collection[str] = ()) -> str:
    """A way of quantizing in words, such as `mse, head`; a symmetric grid is not mentioned.

    Args:
        way: values of `WAYS`.
        leave_out: names in `WAYS` to leave out.
    """
    told = way._asdict()
    told["site"] = str(told["site"]).replace("_", " ")
    told["symmetric"] = "asymmetric" if told["symmetric"] is False else None
    told["newest"] = told["newest"] and f"newest {told['newest']} exact"
    return ", ".join(
        str(word) for name, word in told.items() if name not in leave_out and word is not None
    )


def model_labels(models: Sequence[str]) -> dict[str, str]:
    """Short names of models: without their folders, where they stay distinct."""
    ends = {model: PurePath(model).name or model for model in models}
    return {
        model: end if list(ends.values()).count(end) == 1 else model for model, end in ends.items()
    }


def evaluation_labels(evaluations: Iterable[str]) -> dict[str, str]:
    """Short names of evaluations: the shortest end of a file's path that no other one has."""
    ends = {name: _ends(name) for name in evaluations}
    labels = {}
    for name, mine in ends.items():
        others = {end for other, theirs in ends.items() if other != name for end in theirs}
        labels[name] = next((end for end in mine if end not in others), name)
    return labels


def _ends(evaluation: str) -> list[str]:
    """An evaluation with the last part of its file's path, the last two, and so on."""
    kind, colon, argument = evaluation.partition(":")
    parts = PurePath(argument).parts
    return [f"{kind}{colon}{PurePath(*parts[-n:])}" for n in range(1, len(parts) + 1)]
