"""Observers: from what a calibration saw to the range that a static scheme uses.

An observer is one file here whose `find` makes the range, and one line in `OBSERVERS`.
"""

from importlib import import_module
from typing import Protocol

from quantdiff.calibration.observers.observed import Observed, Range
from quantdiff.errors import UsageError

__all__ = ["OBSERVERS", "Observed", "Range", "observe"]


class Find(Protocol):
    """The function of an observer's file."""

    def __call__(
        self, observed: Observed, bits: int, symmetric: bool, parameter: float | None
    ) -> Range: ...


# Name -> module of this package. What a name may carry as its parameter is said beside
# `quantdiff.Scheme`, which every one of them is asked for by.
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
        name: of the observer.
        observed: G groups of values as histograms with exact extremes.
        bits: width of the grid, 2 or more.
        symmetric: whether the grid is.
        parameter: the observer's, where it has one; None for its default.

    Returns:
        (least, most), fp32, (G,) each, finite; 0 and 0 for a group that holds nothing.
        `Grid.of(least, most, bits, symmetric)` is the grid.

    Raises:
        UsageError: an unknown observer, or a parameter outside its bounds.
    """
    if name not in OBSERVERS:
        raise UsageError(f"unknown observer {name!r}; known: {', '.join(OBSERVERS)}")
    find: Find = import_module(f"{__name__}.{OBSERVERS[name]}").find
    return find(observed, bits, symmetric, parameter)
