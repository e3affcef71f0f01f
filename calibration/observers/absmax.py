"""Absmax: the range that nothing lies beyond."""

from quantdiff.calibration.observers.observed import Observed, Range

__all__ = ["find"]


def find(observed: Observed, bits: int, symmetric: bool, parameter: float | None) -> Range:
    """The exact minimum and maximum; a symmetric grid uses the larger magnitude.

    Args:
        observed: G groups.
        bits, symmetric, parameter: unused; the extremes depend on none of them.

    Returns:
        (least, most), fp32, (G,).
    """
    return observed.ends
