"""The compiled rounding of logits, where the installation could build it."""

import ctypes
import importlib.util
from functools import cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quantdiff.quantization.grid import Grid, NoGridError, RowGrids
from quantdiff.statistics import native

__all__ = ["available", "round_rows"]


class _Job(ctypes.Structure):
    """Mirrors round_t of _rounding.c."""

    _fields_ = [
        ("x", ctypes.c_void_p),
        *((name, ctypes.c_int32) for name in ("heads", "rows", "keys")),
        ("start", ctypes.c_void_p),
        ("stop", ctypes.c_void_p),
        *((name, ctypes.c_int32) for name in ("own", "symmetric", "clips")),
        *((name, ctypes.c_float) for name in ("low", "high")),
        *((name, ctypes.c_void_p) for name in ("step", "zero", "clipped", "bad")),
        ("threads", ctypes.c_int32),
        ("team", ctypes.c_void_p),
    ]


@cache
def _library() -> Any:
    spec = importlib.util.find_spec("quantdiff.quantization._rounding")
    if spec is None or spec.origin is None:
        return None
    library = ctypes.CDLL(spec.origin)
    built = getattr(library, "quantdiff_round_layout", None)
    if built is None or built() != ctypes.sizeof(_Job):
        return None  # built from other sources
    library.quantdiff_round.argtypes = [ctypes.POINTER(_Job)]
    library.quantdiff_round.restype = None
    return library


def available() -> bool:
    """Whether the compiled rounding was built; without it, plain torch is used."""
    return _library() is not None


def round_rows(
    x: Tensor, start: Tensor, stop: Tensor, grid: Grid | RowGrids, *, clips: bool
) -> NDArray[np.int64]:
    """Round each row's visible values to their grid, in place, and set the others to −inf.

    Args:
        x: (H, n, m) fp32 on the CPU, contiguous.
        start, stop: (n,) int32, contiguous: row i sees the keys start ≤ key < stop.
        grid: one per head, (H, 1, 1); or one per row, from that row's own values.
        clips: whether values may lie beyond the grid.

    Returns:
        How many values of each head were clipped, (H,).

    Raises:
        NoGridError: a row's own range, or a value that the grid may clip, is not finite.
    """
    heads, rows, keys = x.shape
    own = isinstance(grid, RowGrids)
    step = zero = None
    if isinstance(grid, Grid):
        step, zero = (part.expand(heads, 1, 1).contiguous() for part in (grid.step, grid.zero))
    threads = torch.get_num_threads()
    clipped = np.zeros((threads, heads), np.int64)
    bad = ctypes.c_int32(0)
    job = _Job(
        x.data_ptr(), heads, rows, keys,
        start.data_ptr(), stop.data_ptr(),
        int(own), int(grid.low < 0), int(clips), grid.low, grid.high,
        None if step is None else step.data_ptr(), None if zero is None else zero.data_ptr(),
        clipped.ctypes.data, ctypes.addressof(bad), threads, native.team(),
    )  # fmt: skip
    _library().quantdiff_round(ctypes.byref(job))
    if bad.value:
        raise NoGridError("NaN or infinity has no place on a grid")
    return clipped.sum(0)
