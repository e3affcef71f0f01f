"""The section on accuracy against bits: tables, figures, and paired differences."""

from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from quantdiff.analysis.compare.accuracy import bits_figures, bits_table
from quantdiff.analysis.compare.difference_figure import difference_data, difference_page
from quantdiff.analysis.compare.differences import Differences
from quantdiff.analysis.compare.measured import Measured, data_of
from quantdiff.analysis.compare.outlier_figures import Colors
from quantdiff.analysis.compare.paired import DECISIVE, FEW, LEVEL, RESAMPLES, SEED
from quantdiff.analysis.compare.parts import Keys, constant, table, warned, words
from quantdiff.analysis.published import FIGURE_8_SOURCE, FIGURE_8_UNSAID, MODELS, figure_8_frame
from quantdiff.analysis.report.content import Figure, Part, Section, Shown, Table
from quantdiff.analysis.sweep.lines import Measure, lines, measures
from quantdiff.analysis.text import literal

__all__ = ["accuracy_section"]

_NOTHING = "No sweep was given: quantdiff sweep MODEL --eval E --out DIR evaluates low bit widths."
_NO_ACCURACY = "No accuracy was measured that the paper's Figure 8 could be drawn beside."
_ONCE = {"baseline": "Baseline:", "metric": "Metric:", "n": "n ="}


def accuracy_section(
    measured: Sequence[tuple[Measured, Differences]],
    warnings: Sequence[str],
    colors: Colors,
    keys: Keys,
    *,
    published: bool,
    drawn: bool,
) -> Section:
    """Every evaluation as tables, figures and differences.

    Args:
        measured: evaluations with their differences.
        warnings: what must not be compared, one sentence each.
        colors: of all models of the comparison.
        keys: gives the parts' keys.
        published: whether the paper's Figure 8 is drawn beside accuracies.
        drawn: whether to include figures.
    """
    parts: list[Part] = []
    if not measured:
        parts += warned([_NOTHING])
    parts += warned(warnings)
    printed = False
    for one, between in measured:
        parts += warned([*one.warnings, *between.warnings])
        found = [measure for measure in measures(one.results) if lines(one.results, measure)]
        parts += [_bits(one, measure, keys) for measure in found]
        if not printed and any(measure.is_accuracy for measure in found):
            printed = True
            parts.append(_figure_8(keys))
        if drawn:
            parts += _figures(one, list(colors), keys, published=published)
        parts += _differences(one, between, keys)
        if drawn and len(between.models):
            parts.append(_drawn(one, between, colors, keys))
    if published and not printed:
        parts += warned([_NO_ACCURACY])
    return Section("accuracy", "Accuracy against bits", tuple(parts))


def _bits(measured: Measured, measure: Measure, keys: Keys) -> Table:
    frame, scheme = constant(bits_table(measured, measure), "scheme")
    caption = data_of(measured)
    if scheme is not None:
        caption += f" All in one way: {scheme}."
    counts = {row["count"] for row in measured.results.rows if row.get("metric") == measure.metric}
    things, over = "", ""
    if any(str(name).endswith("_stderr") for name in frame):
        things, over = _counted(measured.data["settings"])
        caption += f" ± is one standard error{over and f' over the {over}'}."
    if len(counts) == 1:
        caption += f" n = {counts.pop():,}{things}."
    key = keys("bits", measure.source, measure.metric)
    return table(key, literal(measure.label), frame, caption)


def _counted(settings: Mapping[str, Any]) -> tuple[str, str]:
    """What a result counts, where its error is over other units, and what those are."""
    if "windows" in settings:
        return f" tokens in {settings['windows']:,} windows", "windows"
    if "samples" in settings:  # needles: all depths share one text
        texts = len(set(settings["lengths"])) * settings["samples"]
        return f" questions about {texts:,} texts", "texts"
    return "", ""


def _figure_8(keys: Keys) -> Table:
    caption = f"{FIGURE_8_SOURCE}. {MODELS}. {FIGURE_8_UNSAID}"
    shown: dict[str, Shown] = {
        str(name): "{:.3f}".format for name in figure_8_frame() if name != "model"
    }
    title = "Accuracy by bits of the attention logits, as the paper prints it"
    return table(keys("figure-8"), title, figure_8_frame(), caption, shown=shown, published=True)


def _figures(
    measured: Measured, names: Sequence[str], keys: Keys, *, published: bool
) -> list[Figure]:
    called = {name: name for name in names}
    found = []
    for site, page, frame in bits_figures(measured, called, published=published):
        what = "not quantized" if site is None else f"{words(site)} quantized"
        frame = frame.assign(evaluation=measured.source)  # noqa: PLW2901
        caption = f"{data_of(measured)} Bars are one standard error to either side."
        accuracies = any(measure.is_accuracy for measure in measures(measured.results))
        if published and accuracies and site in (None, "attention_logits"):
            caption += f" Dashed: {FIGURE_8_SOURCE}."
        title = f"{literal(measured.source)} against bits, {what}"
        description = (
            f"{', '.join(dict.fromkeys(frame['metric']))} against bits, one line per model."
        )
        key = keys("figure", measured.source, site or "plain")
        found.append(Figure(key, title, page, frame, caption, description))
    return found


def _differences(measured: Measured, found: Differences, keys: Keys) -> list[Table]:
    tables = []
    for which, frame, title, told in (
        ("models", found.models, "Differences between models",
         "The model's value less the baseline's, quantized in the same way to the same width"),
        ("widths", found.widths, "Differences from 16 bits",
         "The value at that width less that of the same model at 16 bits"),
    ):  # fmt: skip
        if not len(frame):
            continue
        caption = f"{data_of(measured)} {told}, on the same {frame['unit'].iloc[0]}."
        shown = frame.drop(columns=["evaluation", "unit"])
        # What is the same in all rows is stated once.
        for column, word in _ONCE.items():
            shown, value = constant(shown, column)
            if value is not None and value != "16 bits":
                caption += f" {word} {value}."
        caption += f" {_how(frame)}{_undecided(frame)}"
        key = keys("differences", which, measured.source)
        heads = {"low": f"{LEVEL} % from", "high": "to"}
        title = f"{title}: {literal(measured.source)}"  # noqa: PLW2901
        tables.append(table(key, title, shown, caption, heads=heads))
    return tables


def _drawn(measured: Measured, found: Differences, colors: Colors, keys: Keys) -> Figure:
    data = difference_data(found.models)
    title = f"Differences between models: {literal(measured.source)}"
    caption = f"{data_of(measured)} Bars are 95 % intervals. {_how(data)}"
    description = f"Difference of {', '.join(dict.fromkeys(data['metric']))} against bits."
    key, page = keys("figure-differences", measured.source), difference_page(data, colors)
    return Figure(key, title, page, data, caption, description)


def _how(frame: pd.DataFrame) -> str:
    """How the intervals were computed, which may differ with the number of units."""
    n, unit = frame["n"], frame["unit"].iloc[0]
    few, many = n[(n > 1) & (n < FEW)], n[n >= FEW]
    told = []
    if len(few):
        told.append(
            f"Over {_from_to(few)} {unit} {LEVEL} % intervals are Student's t of the paired "
            "differences, with n − 1 degrees of freedom."
        )
    if len(many):
        told.append(
            f"Over {_from_to(many)} {unit} {LEVEL} % intervals are percentiles of a paired "
            f"bootstrap, {RESAMPLES:,} resamples of n {unit}, seed {SEED}."
        )
    if n.min() == 1:
        told.append("A difference over a single one has no interval.")
    told.append(
        "Each is for itself, so that of many some exclude 0 by chance. An interval without width "
        "means that no unit differs, or that all do by the same."
    )
    if "nll" in set(frame["metric"]):
        told.append("nll is in nats per token, windows weighted by their tokens.")
    return " ".join(told)


def _from_to(n: "pd.Series[int]") -> str:
    least, most = int(n.min()), int(n.max())
    return f"{least:,}" if least == most else f"{least:,} to {most:,}"


def _undecided(frame: pd.DataFrame) -> str:
    """Why some rows do not state whether 0 is excluded; empty where all do."""
    if frame["n"].min() >= DECISIVE:
        return ""
    return (
        f" Below {DECISIVE} {frame['unit'].iloc[0]} it is not said whether 0 is excluded: so few "
        f"may all differ to one side by chance in more than {100 - LEVEL} % of cases."
    )
