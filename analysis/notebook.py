"""Profiles, calibration tables and sweeps as HTML for notebooks."""

from collections.abc import Callable
from typing import Any

from quantdiff.analysis.ranges import reaches
from quantdiff.analysis.report import Part, Prose, Table, Warned, html_of
from quantdiff.analysis.sweep.loaded import SweepResults
from quantdiff.analysis.sweep.table import pivot
from quantdiff.analysis.text import number
from quantdiff.calibration.table import CalibrationTable
from quantdiff.statistics.profile import Profile

__all__ = ["to_html"]


def to_html(shown: Any) -> str:
    """Render an object as HTML for a notebook, with every name escaped.

    Args:
        shown: a `Profile`, a `CalibrationTable`, or the `SweepResults` of a sweep.

    Raises:
        TypeError: anything else.
    """
    for kind, parts in _PARTS.items():
        if isinstance(shown, kind):
            return html_of(parts(shown))
    raise TypeError(f"{type(shown).__name__} is not shown as HTML")


def _profile_parts(profile: Profile) -> list[Part]:
    frame = profile.summary()
    shown = dict.fromkeys(frame.columns, number)
    frame.insert(0, "activation", [name.replace("_", " ") for name in frame.index])
    heading, _, _ = repr(profile).partition("\n")
    return [Prose(heading), Table("summary", "Largest magnitudes and median", frame, shown=shown)]


def _calibration_parts(table: CalibrationTable) -> list[Part]:
    frame = reaches(table)
    shown = dict.fromkeys(frame.columns, number)
    title = "Ranges of the attention logits, by layer: ± what stands here"
    parts: list[Part] = [
        Prose(repr(table)),
        Table("ranges", title, frame.reset_index(), shown=shown),
    ]
    warning = table.warning()
    return parts if warning is None else [*parts, Warned(f"{warning[0].upper()}{warning[1:]}.")]


def _sweep_parts(results: SweepResults) -> list[Part]:
    parts: list[Part] = [Prose(repr(results))]
    for place, (title, values) in enumerate(pivot(results), start=1):
        widths = {bits: f"{bits} bits" for bits in values.columns}
        frame = values.rename(columns=widths).reset_index()
        shown = dict.fromkeys(widths.values(), "{:.4g}".format)
        parts.append(Table(f"metric-{place}", title, frame, shown=shown))
    return parts


_PARTS: dict[type, Callable[[Any], list[Part]]] = {
    Profile: _profile_parts,
    CalibrationTable: _calibration_parts,
    SweepResults: _sweep_parts,
}
