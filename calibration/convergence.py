"""Whether a calibration has seen enough data: how much its ranges still moved near the end."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from quantdiff.calibration.observers import Range

__all__ = ["LARGEST", "MEDIAN", "Moved", "movement"]

# A range that is off by a fraction x changes the squared rounding error by about 2x. So at these
# bounds half of the heads may be off by 4 % of the error, which is less than the choice of observer
# changes, and the worst one by 20 %. The last quarter of the data shows about what another third of
# the data would still change.
MEDIAN, LARGEST = 0.02, 0.10


@dataclass(frozen=True)
class Moved:
    """How much the ranges of one scheme changed between the first part of the data and all of it.

    Attributes:
        largest: relative change of the range that moved most, over all sites and heads.
        median: median relative change of all of them.
        site: name of the site that moved most.
        layer: its layer.
        head: its head; None if a range spans all heads.
    """

    largest: float
    median: float
    site: str
    layer: int
    head: int | None


def movement(
    sites: Sequence[tuple[str, int]],
    earlier: Sequence[Range],
    whole: Sequence[Range],
    *,
    symmetric: bool,
    per_head: bool,
) -> Moved:
    """Compare two sets of ranges.

    The change of a range is how far its ends moved (the farther of the two), relative to the larger
    magnitude of its final ends; a range that was zero before moved by 1, one still zero by 0.

    Args:
        sites: name and layer of each site, at least one.
        earlier, whole: (least, most) of each site, (H,) or (H, C) each.
        symmetric: whether only the magnitude counts.
        per_head: whether the ranges within a site differ.
    """
    changes = [
        _change(before, after, symmetric) for before, after in zip(earlier, whole, strict=True)
    ]
    if not per_head:
        changes = [change[:1] for change in changes]
    s = int(np.argmax([change.max() for change in changes]))
    worst = int(changes[s].argmax())
    head = worst // (changes[s].size // len(whole[s][0]) or 1)
    name, layer = sites[s]
    return Moved(
        largest=float(changes[s][worst]),
        median=float(np.median(np.concatenate(changes))),
        site=name,
        layer=layer,
        head=head if per_head else None,
    )


def _change(before: Range, after: Range, symmetric: bool) -> NDArray[np.float64]:
    old, new = (
        np.stack(ends).astype(np.float64).reshape(2, -1) for ends in (before, after)
    )  # (2, H·C)
    if symmetric:
        old, new = np.abs(old).max(0, keepdims=True), np.abs(new).max(0, keepdims=True)
    size = np.abs(new).max(0)
    change = np.abs(new - old).max(0)
    return np.divide(change, size, out=np.zeros_like(size), where=size > 0)
