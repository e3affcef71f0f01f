"""A comparison as an object: its frames, its figures, and its report."""

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import pandas as pd

from quantdiff.analysis.compare.accuracy_section import accuracy_section
from quantdiff.analysis.compare.alike import Group
from quantdiff.analysis.compare.differences import Differences, differences
from quantdiff.analysis.compare.differential import branches, lambdas, maps, noise
from quantdiff.analysis.compare.differential_section import differential_section
from quantdiff.analysis.compare.measured import Measured, measured_groups
from quantdiff.analysis.compare.outlier_section import outlier_section
from quantdiff.analysis.compare.outliers import curves, outliers, places
from quantdiff.analysis.compare.parts import Keys, joined, numbered, together, warned
from quantdiff.analysis.compare.plotting import KINDS, MEASURED, plot_measured, plot_recorded
from quantdiff.analysis.compare.provenance import provenance
from quantdiff.analysis.compare.reading import Source, find_runs
from quantdiff.analysis.compare.recorded import recorded_groups
from quantdiff.analysis.compare.runs import Names, told_runs
from quantdiff.analysis.compare.stored import (
    calibration_groups,
    calibrations,
    checkpoint_groups,
    checkpoints,
)
from quantdiff.analysis.compare.stored_sections import (
    calibration_section,
    checkpoint_section,
    provenance_section,
)
from quantdiff.analysis.report import Part, Prose, Report, Section, Warned, html_of, write_report
from quantdiff.errors import UsageError
from quantdiff.versions import versions

__all__ = ["Comparison", "compare"]

_NOISE = "noise"  # the evaluation that does not measure accuracy
_NAMED = 4  # models named in a title


def compare(*runs: Source, out: str | Path | None = None, published: bool = False) -> "Comparison":
    """Put the results of profile, sweep, export and calibrate side by side.

    Args:
        runs: folders that quantdiff wrote, in any mix, or folders of such folders; profiles,
            results of sweeps, and calibration tables. The first model named is the one that the
            others are compared with.
        out: a folder for `report.html`, tables and figures; None writes nothing.
        published: whether accuracies with quantized logits are drawn with the paper's Figure 8.

    Returns:
        The comparison. What could not be read or compared is in its `warnings` and its report.

    Raises:
        UsageError: there is nothing that can be read.
    """
    comparison = Comparison(runs, published=published)
    if out is not None:
        comparison.save(out)
    return comparison


class Comparison:
    """Any models side by side.

    All frames but `provenance` have a column `group`, counted from 1, as not all runs can be
    compared: runs of different groups differ in data, tokens, definitions, detail, layers or dtype,
    sweeps also in device, attention or versions. In frames of sweeps it numbers the evaluations.

    Attributes:
        runs: the runs that were read, in order.
        names: the models' names in all frames and figures.
        colors: the models' colours in all figures.
    """

    def __init__(
        self, runs: Sequence[Source], *, published: bool = False, command: str | None = None
    ) -> None:
        """Read the runs.

        Args:
            runs, published: as in `compare`.
            command: the command line that requested it, if any.

        Raises:
            UsageError: there is nothing that can be read.
        """
        found = find_runs(runs)
        self.runs, self._unread = found.runs, found.warnings
        self._published, self._command = published, command
        self._called = Names(self.runs)
        self.names, self.colors = self._called.labels, self._called.colors

    def outliers(self) -> pd.DataFrame:
        """The largest magnitudes and medians, as `outliers.outliers` gives them."""
        return numbered(self._recorded, outliers)

    def places(self) -> pd.DataFrame:
        """Where the largest magnitudes sit, as `outliers.places` gives it."""
        return numbered(self._recorded, places)

    def layers(self) -> pd.DataFrame:
        """The largest magnitude of each layer and branch."""
        return numbered(self._recorded, lambda group: curves(group, "layers"))

    def accuracy(self) -> pd.DataFrame:
        """Results of sweeps, one row per cell and metric, as `SweepResults.frame` gives them."""
        return numbered(self._measured, lambda one: one.results.frame())

    def differences(self) -> pd.DataFrame:
        """Paired differences with 95 % intervals, between models and from 16 bits."""
        known = {one: [found.models, found.widths] for one, found in self._accuracies}
        return numbered(self._measured, lambda one: together(known.get(one, [])))

    def lambdas(self) -> pd.DataFrame:
        """λ by depth, as `differential.lambdas` gives it."""
        return numbered(self._recorded, lambdas)

    def branches(self) -> pd.DataFrame:
        """Branch 1 beside branch 2, as `differential.branches` gives it."""
        return numbered(self._recorded, branches)

    def maps(self) -> pd.DataFrame:
        """Measures of the attention maps, as `differential.maps` gives them."""
        return numbered(self._recorded, maps)

    def noise(self) -> pd.DataFrame:
        """Signal to noise before and after the subtraction, as `differential.noise` gives it."""
        return numbered(
            self._measured, lambda one: noise(one) if one.evaluation == _NOISE else pd.DataFrame()
        )

    def checkpoints(self) -> pd.DataFrame:
        """Size, loss and verification of exported checkpoints."""
        return numbered(self._checkpoints, lambda group: checkpoints(group, self._called))

    def calibrations(self) -> pd.DataFrame:
        """Ranges of calibrations by observer, and how much they still moved."""
        return numbered(self._calibrations, lambda group: calibrations(group, self._called))

    def provenance(self) -> pd.DataFrame:
        """Model, data, tokens, scheme, versions and command of every run."""
        return provenance(self.runs, self._called)

    def frames(self) -> dict[str, pd.DataFrame]:
        """All non-empty frames, by the names of the methods that return them."""
        found = {name: getattr(self, name)() for name in _FRAMES}
        return {name: frame for name, frame in found.items() if len(frame)}

    @property
    def warnings(self) -> list[str]:
        """What could not be read, is missing or must not be compared, one sentence each."""
        return [
            part.text
            for section in self.tables().sections
            for part in section.parts
            if isinstance(part, Warned)
        ]

    def report(self) -> Report:
        """Everything as one report."""
        return self._drawn

    def tables(self) -> Report:
        """The report without its figures, which take longest."""
        return self._undrawn

    def save(self, folder: str | Path) -> list[Path]:
        """Write `report.html`, every table as CSV, Markdown and LaTeX, every figure as PNG and SVG.

        Args:
            folder: made if missing; files of the same names are replaced.

        Returns:
            The files, the page first.
        """
        return write_report(self.report(), folder)

    def plot(
        self,
        kind: str = "layers",
        *,
        activation: str | None = None,
        evaluation: str | None = None,
        group: int = 1,
        ax: Any = None,
    ) -> Any:
        """Draw a figure.

        Args:
            kind: for profiles "layers", "heads", "magnitudes", "lambda" or "maps"; for sweeps
                "bits" or "differences".
            activation: with `ax`, what to draw for layers or magnitudes; the attention logits by
                default.
            evaluation: for sweeps, such as "choice:questions.jsonl"; the first by default.
            group: the group of comparable profiles, counted from 1.
            ax: axes for one panel, instead of a new figure.

        Returns:
            The new matplotlib Figure (outside of pyplot; notebooks show it, `savefig` writes it),
            or `ax`.

        Raises:
            UsageError: the kind is unknown, or the runs have no data for it.
        """
        if kind not in KINDS:
            raise UsageError(f"there is no figure {kind!r}; choose one of {', '.join(KINDS)}")
        if kind in MEASURED:
            return plot_measured(
                self._accuracies, kind, self.colors, evaluation, ax, published=self._published
            )
        if not 1 <= group <= len(self._recorded):
            raise UsageError(
                f"there is no group {group} of profiles here; there are {len(self._recorded)}"
            )
        return plot_recorded(self._recorded[group - 1], kind, self.colors, activation, ax)

    def __repr__(self) -> str:
        return f"Comparison of {told_runs(self.runs)}: {', '.join(self.names)}"

    def _repr_html_(self) -> str:
        parts: list[Part] = [Prose(repr(self))]
        for section in self.report().sections:
            parts += [part for part in section.parts if not isinstance(part, Prose)]
        return html_of(parts)

    @cached_property
    def _recorded(self) -> list[Any]:
        return recorded_groups(self.runs, self._called)

    @cached_property
    def _found(self) -> tuple[list[Measured], list[str]]:
        return measured_groups(self.runs, self._called)

    @property
    def _measured(self) -> list[Measured]:
        return self._found[0]

    @cached_property
    def _accuracies(self) -> list[tuple[Measured, Differences]]:
        some = [one for one in self._measured if one.evaluation != _NOISE]
        return [(one, differences(one)) for one in some]

    @cached_property
    def _checkpoints(self) -> list[Group[Any]]:
        return checkpoint_groups(self.runs)

    @cached_property
    def _calibrations(self) -> list[Group[Any]]:
        return calibration_groups(self.runs)

    @cached_property
    def _drawn(self) -> Report:
        return self._report(drawn=True)

    @cached_property
    def _undrawn(self) -> Report:
        return self._report(drawn=False)

    def _lacking(self) -> list[str]:
        """Which models were only profiled, or only swept, where others were both."""
        profiled = {one.label for group in self._recorded for one in group.members}
        swept = {label for one in self._measured for label in one.labels}
        lacking = []
        for there, what in ((profiled, "profile"), (swept, "sweep")):
            # Where two profiles share a name, a sweep under that name counts for both.
            written = {self._called.as_written[label] for label in there}
            without = [
                label
                for label in self.names
                if there and self._called.as_written[label] not in written
            ]
            lacking += [f"There is no {what} of {joined(without)}."] if without else []
        return lacking

    def _report(self, *, drawn: bool) -> Report:
        keys = Keys()
        noises = [one for one in self._measured if one.evaluation == _NOISE]
        told = warned([*self._unread, *self._called.warnings, *self._lacking()])
        overview = Section("overview", "Overview", (Prose(f"{self!r}."), *told))
        sections = [
            overview,
            outlier_section(self._recorded, self.colors, keys, drawn=drawn),
            accuracy_section(
                self._accuracies,
                self._found[1],
                self.colors,
                keys,
                published=self._published,
                drawn=drawn,
            ),
            differential_section(self._recorded, noises, self.colors, keys, drawn=drawn),
        ]
        if self._checkpoints:
            sections.append(checkpoint_section(self._checkpoints, self._called, keys))
        if self._calibrations:
            sections.append(calibration_section(self._calibrations, self._called, keys))
        sections.append(provenance_section(self.runs, self._called, keys))
        few = self.names[:_NAMED]
        more = len(self.names) - len(few)
        called = joined([*few, f"{more} more"] if more else few) if few else "checkpoints"
        return Report(
            title=f"Comparison of {called}" if len(self.names) != 1 else str(called),
            sections=tuple(section for section in sections if section is not None),
            command=self._command,
            versions=versions(),
        )


_FRAMES = (
    "outliers", "places", "layers", "accuracy", "differences", "lambdas", "branches", "maps",
    "noise", "checkpoints", "calibrations", "provenance",
)  # fmt: skip
