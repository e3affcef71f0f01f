"""Differences between models, and of each width from 16 bits, on the same questions or windows."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from quantdiff.analysis.compare.measured import Measured
from quantdiff.analysis.compare.paired import DECISIVE, Units, intervals, units_of
from quantdiff.analysis.compare.parts import joined
from quantdiff.analysis.evaluation.base import CUT
from quantdiff.analysis.sweep.lines import NO_WAY, Line, Measure, Way, lines, measures, way_label
from quantdiff.analysis.sweep.results import Row, read_items
from quantdiff.analysis.text import literal
from quantdiff.errors import UsageError

__all__ = ["COLUMNS", "Differences", "differences"]

COLUMNS = (
    "evaluation", "metric", "scheme", "bits", "model", "baseline", "difference", "low", "high",
    "excludes_0", "n", "unit",
)  # fmt: skip

# Already relative to the unquantized model.
_AGAINST_16 = ("kl", "agreement")


@dataclass(frozen=True)
class Differences:
    """Paired differences of one evaluation.

    Attributes:
        models: each model against the first at the same width, with `COLUMNS`; no rows where the
            first has no result. `difference` is the model's value less that of the baseline, `low`
            and `high` its 95 % interval over `n` units; `excludes_0` is missing where these are
            too few to tell.
        widths: each width against 16 bits of the same model, likewise.
        warnings: what could not be paired, one sentence each.
    """

    models: pd.DataFrame
    widths: pd.DataFrame
    warnings: tuple[str, ...]


@dataclass(frozen=True)
class _Pair:
    metric: str
    scheme: str
    bits: int
    model: str
    baseline: str
    of: Row
    less: Row


def differences(measured: Measured) -> Differences:
    """All paired differences of an evaluation, with the 95 % intervals of `paired.intervals`.

    Pairs are formed only within one evaluation on the same data. A metric that is not a mean of its
    items, such as perplexity, has no differences, but its logarithm, `nll`, does: in nats per token
    over the same windows, weighted by their tokens.
    """
    items = _Items(measured)
    warnings: list[str] = []
    between: list[_Pair] = []
    within: list[_Pair] = []
    some = [(measure, lines(measured.results, measure)) for measure in measures(measured.results)]
    baseline = _baseline(measured, [line for _, found in some for line in found])
    for measure, found in some:
        if measure.metric == CUT:
            continue
        pairs, alone = _between(measure, found, baseline)
        between += pairs
        if alone:
            warnings.append(
                f"{baseline} lacks results of {literal(measured.source)} that {joined(alone)} "
                f"{'have' if len(alone) > 1 else 'has'}: there the models have no difference."
            )
        if measure.metric not in _AGAINST_16:
            within += _within(measure, found)
    return Differences(
        _frame(measured, between, items),
        _frame(measured, within, items),
        tuple(dict.fromkeys([*warnings, *items.warnings])),
    )


def _baseline(measured: Measured, some: list[Line]) -> str | None:
    """The model that all others are compared with: the first with a result."""
    known = {line.model for line in some for row in line.points.values() if row["status"] == "ok"}
    return next((model for model in measured.results.models if model in known), None)


def _between(
    measure: Measure, found: list[Line], baseline: str | None
) -> tuple[list[_Pair], list[str]]:
    """Pair each model with the baseline, quantized in the same way to the same width.

    Returns:
        The pairs, and the models with a result that the baseline lacks.
    """
    known: dict[tuple[str, Way, int], Row] = {
        (line.model, NO_WAY if bits == 16 else line.way, bits): row
        for line in found
        for bits, row in line.points.items()
        if row["status"] == "ok"
    }
    pairs, alone = [], []
    for (model, way, bits), row in known.items():
        less = None if baseline is None else known.get((baseline, way, bits))
        if baseline is None or less is None:
            alone.append(model)
        elif model != baseline:
            scheme = _scheme(way)
            pairs.append(_Pair(measure.metric, scheme, bits, model, baseline, row, less))
    return pairs, list(dict.fromkeys(alone))


def _within(measure: Measure, found: list[Line]) -> Iterator[_Pair]:
    for line in found:
        reference = line.points.get(16)
        for bits, row in line.points.items():
            if bits != 16 and reference and row["status"] == reference["status"] == "ok":
                scheme = _scheme(line.way)
                yield _Pair(measure.metric, scheme, bits, line.model, "16 bits", row, reference)


def _scheme(way: Way) -> str:
    return "not quantized" if way == NO_WAY else way_label(way)


class _Items:
    """Units of cells, each read once."""

    def __init__(self, measured: Measured) -> None:
        self._measured = measured
        self._known: dict[tuple[str, str], Any] = {}
        self.warnings: list[str] = []

    def units(self, row: Row) -> Units | None:
        """Units of a row's metric; None where it has none, or where the items are gone."""
        cell = row["model"], row["cell"]
        if cell not in self._known:
            try:
                self._known[cell] = read_items(self._measured.folders[cell], row["cell"])
            except UsageError as error:
                self._known[cell] = None
                if not self.warnings:
                    self.warnings.append(f"Some differences have no interval: {literal(error)}.")
        items = self._known[cell]
        return None if items is None else units_of(items, row["metric"], row["value"])


def _frame(measured: Measured, pairs: list[_Pair], items: _Items) -> pd.DataFrame:
    # Pairs over the same units are resampled together.
    alike: dict[bytes, list[tuple[int, _Pair, Units, Any]]] = {}
    for number, pair in enumerate(pairs):
        of, less = items.units(pair.of), items.units(pair.less)
        if of is None or less is None:
            continue
        if not np.array_equal(of.weights, less.weights):
            items.warnings.append(
                f"The items of {pair.model} and {pair.baseline} ({literal(measured.source)}, "
                f"{pair.bits} bits) are not those of the same {of.kind}: one of them is broken."
            )
            continue
        entry = (number, pair, of, of.sums - less.sums)
        alike.setdefault(of.weights.tobytes(), []).append(entry)
    rows: dict[int, tuple[Any, ...]] = {}
    for entries in alike.values():
        weights = entries[0][2].weights
        stacked = np.column_stack([difference for *_, difference in entries])  # (n, k)
        ends = intervals(stacked, weights)
        for (number, pair, units, difference), low, high in zip(entries, *ends, strict=True):
            excludes = bool(low > 0 or high < 0) if len(weights) >= DECISIVE else None
            rows[number] = (
                measured.source, pair.metric, pair.scheme, pair.bits, pair.model, pair.baseline,
                float(difference.sum() / weights.sum()), low, high, excludes, len(weights),
                units.kind,
            )  # fmt: skip
    return pd.DataFrame([rows[number] for number in sorted(rows)], columns=list(COLUMNS))
