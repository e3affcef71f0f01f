"""The main figures of a comparison, one by one."""

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from quantdiff.analysis.compare.alike import Group
from quantdiff.analysis.compare.difference_figure import difference_data, difference_page
from quantdiff.analysis.compare.differences import Differences
from quantdiff.analysis.compare.differential import lambdas, maps
from quantdiff.analysis.compare.differential_figures import draw_lambda, lambda_page, maps_page
from quantdiff.analysis.compare.measured import Measured
from quantdiff.analysis.compare.outlier_figures import draw_panel, heads_page, lines_page
from quantdiff.analysis.compare.outliers import curves
from quantdiff.analysis.compare.recorded import Recorded
from quantdiff.analysis.frames import activations_of
from quantdiff.analysis.style import style
from quantdiff.analysis.sweep.figure import plot_sweep
from quantdiff.errors import UsageError

__all__ = ["KINDS", "MEASURED", "plot_measured", "plot_recorded"]

Axes: TypeAlias = Any  # matplotlib's, which has no types here
Colors: TypeAlias = Mapping[str, Any]

MEASURED = ("bits", "differences")
KINDS = ("layers", "heads", "magnitudes", "lambda", "maps", *MEASURED)

_OWN = ("heads", "maps", "differences")  # figures with panels of their own


def plot_recorded(
    group: Group[Recorded], kind: str, colors: Colors, activation: str | None, ax: Axes | None
) -> Any:
    """Draw a figure of profiles; see `Comparison.plot`.

    Raises:
        UsageError: the profiles lack what is to be drawn, or `ax` is given for several panels.
    """
    _check_axes(kind, ax)
    if kind == "lambda":
        depth = lambdas(group)
        _check(len(depth), kind, "none of the models is known to have λ")
        if ax is None:
            return lambda_page(depth, colors)
        with style():
            draw_lambda(ax, depth, colors)
            for text in ax.legend().get_texts():
                text.set_parse_math(False)
        return ax
    data = curves(group, kind)
    if kind == "maps":
        _check(len(data), kind, "the maps were not measured: quantdiff profile --maps")
        longest = int(group.members[0].profile.data["sequence_length"])
        return maps_page(data, longest, maps(group), colors)
    if kind == "heads":
        _check(data["absmax"].gt(0).any(), kind, "no attention logits were recorded")
        return heads_page(group, colors)
    _check(len(data), kind, "the profiles hold extremes only; record them with detail='full'")
    if ax is None:
        return lines_page(group, kind, colors)
    return draw_panel(
        ax, group, kind, activations_of(group.members[0].profile, activation)[0], colors
    )


def plot_measured(
    some: Sequence[tuple[Measured, Differences]],
    kind: str,
    colors: Colors,
    evaluation: str | None,
    ax: Axes | None,
    *,
    published: bool,
) -> Any:
    """Draw a figure of sweeps; see `Comparison.plot`.

    Raises:
        UsageError: an unknown evaluation, nothing to draw, or `ax` for several panels.
    """
    _check_axes(kind, ax)
    known = {one.source: (one, found) for one, found in reversed(some)}
    if evaluation is not None and evaluation not in known:
        raise UsageError(
            f"there is no evaluation {evaluation!r} in this comparison; there are "
            f"{', '.join(reversed(known)) or 'none'}"
        )
    _check(some, kind, "no sweep was given")
    one, found = some[0] if evaluation is None else known[evaluation]
    if kind == "bits":
        names = {label: label for label in one.results.models}
        return plot_sweep(one.results, published=published, names=names, ax=ax)
    _check(len(found.models), kind, "no two models were measured on the same items")
    return difference_page(difference_data(found.models), colors)


def _check_axes(kind: str, ax: Axes | None) -> None:
    if ax is not None and kind in _OWN:
        raise UsageError(f"the figure {kind!r} has panels of its own: leave ax out")


def _check(there: object, kind: str, why: str) -> None:
    if not there:
        raise UsageError(f"there is no figure {kind!r}: {why}")
