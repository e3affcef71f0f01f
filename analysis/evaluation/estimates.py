"""Means with their standard errors, and the refusal of values that are not finite."""

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quantdiff.errors import QuantizationError

__all__ = ["check_finite", "mean", "ratio"]


def mean(values: NDArray[Any]) -> tuple[float, float | None]:
    """Mean and its standard error: sample standard deviation over √n, as lm-eval's.

    Args:
        values: (n,), one for each question.

    Returns:
        The standard error is None for a single value.
    """
    values = values.astype(np.float64)
    if len(values) < 2:
        return float(values.mean()), None
    return float(values.mean()), float(values.std(ddof=1)) / math.sqrt(len(values))


def ratio(sums: NDArray[Any], counts: NDArray[Any]) -> tuple[float, float | None]:
    """Mean over all tokens and its standard error, with the windows as independent draws.

    Tokens of one window depend on each other, so an error over tokens would be too small. The
    error is that of a ratio of two sums: √(w / (w − 1) · Σ (sᵢ − m·nᵢ)²) / Σ nᵢ for w windows with
    sums sᵢ over nᵢ tokens, and m = Σ sᵢ / Σ nᵢ.

    Args:
        sums: of each window, (w,).
        counts: tokens of each window, (w,).

    Returns:
        The standard error is None for a single window.
    """
    total = float(counts.sum())
    value = float(sums.sum()) / total
    windows = len(sums)
    if windows < 2:
        return value, None
    spread = float(((sums - value * counts) ** 2).sum())
    return value, math.sqrt(windows / (windows - 1) * spread) / total


def check_finite(values: NDArray[Any], what: str, thing: str) -> None:
    """Refuse NaN and infinity.

    Args:
        values: (n, …).
        what: what the values are, for example "the log-likelihood".
        thing: what the first dimension counts, for example "window".

    Raises:
        QuantizationError: a value is not finite; names the first of the n, counted from 0.
    """
    broken = ~np.isfinite(values.reshape(len(values), -1)).all(1)
    if broken.any():
        raise QuantizationError(
            f"{what} of {thing} {int(broken.argmax())} is not finite: the model "
            f"gives NaN or infinity ({int(broken.sum())} of {len(values)} {thing}s)"
        )
