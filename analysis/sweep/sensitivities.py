"""The costs of each layer, or head, from the results of a layer-by-layer or head-by-head sweep."""

from collections.abc import Collection
from dataclasses import replace
from typing import Any

from quantdiff.analysis.evaluation import cost_sign
from quantdiff.analysis.sensitivity import Place, Sensitivity
from quantdiff.analysis.sweep.lines import Measure, measures
from quantdiff.analysis.sweep.loaded import SweepResults
from quantdiff.analysis.sweep.results import Row
from quantdiff.errors import UsageError
from quantdiff.quantization.scheme import Scheme

__all__ = ["chosen_sensitivity", "cost_of", "schemes_of", "sensitivities", "sensitivity_name"]

_MAIN = ("kl", "nll")  # their increase is the cost; the first one measured counts
_TOLD = ("site", "bits", "range", "granularity", "symmetric", "newest", "layers", "heads")
_ANY = 8  # bits that stand for any
_OF_ATTENTION = {"attention_logits", "attention_maps", "keys", "values"}


def sensitivities(
    results: SweepResults,
    *,
    evaluation: str | None = None,
    metric: str | None = None,
    cells: Collection[str] | None = None,
) -> list[Sensitivity]:
    """All sensitivities that were measured completely, by model and by schemes used together.

    Cells with a remedy do not describe the model without it and are left out. So are layers without
    attention, where nothing was rounded, so that they cost exactly nothing at any width: sweeps of
    earlier versions tried them too.

    Args:
        results: those of a sweep.
        evaluation, metric: as in `Sensitivity.of`; defaults are chosen for each one separately.
        cells: ids of the cells that count, such as those of one request; None for all.

    Returns:
        One for each model, kind of place and template, in the order of the grid; those with a
        missing or failed cell are left out.

    Raises:
        UsageError: there is no such metric.
    """
    rows = [
        row
        for row in _whole(results)
        if _place(row) is not None
        and "remedy" not in row["options"]
        and (cells is None or row["cell"] in cells)
    ]
    by_key: dict[Any, list[Row]] = {}
    for row in rows:
        key = row["model"], isinstance(_place(row), tuple), _template(schemes_of(row))
        by_key.setdefault(key, []).append(row)
    chosen = {key: _cost_measure(results, some, evaluation, metric) for key, some in by_key.items()}
    if chosen and not any(chosen.values()) and (evaluation or metric):
        raise UsageError(
            f"there are no costs by {metric or evaluation} in {results.folder}: it was not measured"
        )
    found = []
    for key, measure in chosen.items():
        if measure is None:
            continue
        some = [row for row in by_key[key] if row["eval"] == measure.evaluation]
        if any(row["status"] != "ok" for row in some):
            continue
        model, _, template = key
        costs = _costs(results, [row for row in some if row["metric"] == measure.metric])
        if measure.metric in _MAIN and {scheme.site for scheme in template} <= _OF_ATTENTION:
            # Not for other metrics: answers may stay the same although attention was rounded.
            costs = {place: by for place, by in costs.items() if any(by.values())} or costs
        found.append(Sensitivity(template, costs, model, measure.evaluation, measure.metric))
    return found


def _costs(results: SweepResults, rows: list[Row]) -> dict[Place, dict[int, float]]:
    costs: dict[Place, dict[int, float]] = {}
    for row in rows:
        place = _place(row)
        assert place is not None
        costs.setdefault(place, {})[row["bits"]] = cost_of(results, row)
    return costs


def _whole(results: SweepResults) -> list[Row]:
    """The rows of requests without missing cells, as far as that can be determined."""
    if not results.missing:
        return results.rows
    asked, done = set(results.record["asked"]), {row["cell"] for row in results.rows}
    return [row for row in results.rows if row["cell"] in asked] if asked <= done else []


def chosen_sensitivity(
    results: SweepResults,
    model: str | None,
    site: str | None,
    each: str | None,
    evaluation: str | None,
    metric: str | None,
) -> Sensitivity:
    """See `Sensitivity.of`."""
    every = sensitivities(results, evaluation=evaluation, metric=metric)
    fitting = [
        one
        for one in every
        if model in (None, one.model)
        and site in (None, "+".join(scheme.site for scheme in one.template))
        and each in (None, "head" if one.of_heads else "layer")
    ]
    if not every and results.missing:
        raise UsageError(
            f"{results.missing} cells of {results.folder} are missing: let the sweep finish first"
        )
    if len(fitting) != 1:
        known = "; ".join(f"{one.model}: {sensitivity_name(one)}" for one in every) or "none"
        count = "no" if not fitting else f"{len(fitting)}"
        raise UsageError(
            f"{count} sensitivities of {results.folder} are what was asked for, and one is wanted; "
            f"there are {known}"
        )
    return fitting[0]


def sensitivity_name(one: Sensitivity) -> str:
    """A short description, such as `weights, dynamic, channel, layer by layer`."""
    sites = " and ".join(scheme.site.replace("_", " ") for scheme in one.template)
    words = [sites]
    for name in ("range", "granularity"):
        values = {getattr(scheme, name) for scheme in one.template}
        words += values if len(values) == 1 else []
    if not any(scheme.symmetric for scheme in one.template):
        words.append("asymmetric")
    newest = {scheme.newest for scheme in one.template}
    if len(newest) == 1 and newest != {0}:
        words.append(f"newest {newest.pop()} exact")
    words.append("head by head" if one.of_heads else "layer by layer")
    return ", ".join(words)


def _cost_measure(
    results: SweepResults, rows: list[Row], evaluation: str | None, metric: str | None
) -> Measure | None:
    """The measure in some rows that gives the costs; None if nothing measured there does.

    Raises:
        UsageError: it is not known whether more of the requested metric is worse.
    """
    there = {(row["eval"], row["metric"]) for row in rows if row["status"] == "ok"}
    known = [
        measure
        for measure in measures(results)
        if (measure.evaluation, measure.metric) in there
        and evaluation in (None, measure.evaluation)
        and metric in (None, measure.metric)
    ]
    if metric is None:
        main = [m for name in _MAIN for m in known if m.metric == name]
        known = main or [m for m in known if cost_sign(m.evaluation, m.metric) is not None]
    elif known and cost_sign(known[0].evaluation, metric) is None:
        raise UsageError(f"{metric} is no cost: whether more of it is worse is not known; take kl")
    return known[0] if known else None


def cost_of(results: SweepResults, row: Row) -> float:
    """How much worse a finished row's value is than that of the unquantized model.

    Raises:
        UsageError: the unquantized model was not measured.
    """
    if row["metric"] == "kl":
        return float(row["value"])
    for other in results.rows:
        same = all(other[name] == row[name] for name in ("model", "eval", "metric"))
        if same and other["site"] is None:
            sign = cost_sign(row["eval"], row["metric"])
            assert sign is not None
            return sign * (float(row["value"]) - float(other["value"]))
    raise UsageError(
        f"{row['model']} was not measured as it is by {row['eval']}: add 16 bits to the sweep"
    )


def schemes_of(row: Row) -> tuple[Scheme, ...]:
    """The schemes of a cell, from its line."""
    told = row["options"].get("schemes")
    if told is None:
        told = [row | row["options"]] if row["site"] is not None else []
    return tuple(Scheme(**{name: one[name] for name in _TOLD if name in one}) for one in told)


def _place(row: Row) -> Place | None:
    """The one layer, or the one head, that a cell is for."""
    schemes = schemes_of(row)
    if len({(scheme.layers, scheme.heads) for scheme in schemes}) != 1:
        return None
    layers, heads = schemes[0].layers, schemes[0].heads
    if layers is None or len(layers) > 1 or (heads is not None and len(heads) > 1):
        return None
    return layers[0] if heads is None else (layers[0], heads[0])


def _template(schemes: tuple[Scheme, ...]) -> tuple[Scheme, ...]:
    """The schemes for all layers and heads, and for any bits if all have the same."""
    same = len({scheme.bits for scheme in schemes}) == 1
    return tuple(
        replace(s, layers=None, heads=None, bits=_ANY if same else s.bits) for s in schemes
    )
