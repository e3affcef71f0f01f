"""Observers: from what a calibration saw to the range that a static scheme uses.

An observer is one file here whose `find` computes the range, and one line in `OBSERVERS`.
"""

from importlib import import_module
from typing import Protocol

from quantdiff.calibration.observers.observed import Observed, Range
from quantdiff.errors import UsageError

__all__ = ["OBSERVERS", "Observed", "Range", "observe"]


class Find(Protocol):
    """The function that an observer's file provides."""

    def __call__(
        self, observed: Observed, bits: int, symmetric: bool, parameter: float | None
    ) -> Range: ...


# Name -> module of this package. The parameters that names may carry are documented with
# `quantdiff.Scheme`, through which all observers are requested.
OBSERVERS = {
    "absmax": "absmax",
    "percentile": "percentile",
    "mse": "mse",
    "entropy": "entropy",
}


def observe(
    name: str, observed: Observed, bits: int, symmetric: bool, parameter: float | None = None
) -> Range:
    """The range that an observer finds.

    Args:
        name: name of the observer.
        observed: G groups of values as histograms with exact extremes.
        bits: width of the grid, 2 or more.
        symmetric: whether the grid is symmetric.
        parameter: the observer's, if it has one; None for its default.

    Returns:
        (least, most), fp32, (G,) each, finite; 0 and 0 for an empty group.
        `Grid.of(least, most, bits, symmetric)` is the grid.

    Raises:
        UsageError: an unknown observer, or a parameter outside its bounds.
    """
    if name not in OBSERVERS:
        raise UsageError(f"unknown observer {name!r}; known: {', '.join(OBSERVERS)}")
    find: Find = import_module(f"{__name__}.{OBSERVERS[name]}").find
    return find(observed, bits, symmetric, parameter)
