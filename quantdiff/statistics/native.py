"""The compiled kernels, if the installation could build them."""

import ctypes
import importlib.util
import warnings
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

__all__ = ["ITEM", "PARTIAL", "available", "run", "team"]

BINS = 65536
LANES = 16  # fp32 lanes of the widest vectors that may be used; the machine may offer fewer

PARTIAL = np.dtype(
    [("count", "i8"), ("moment", "f8", 4), ("min", "f4"), ("max", "f4"), ("bad", "i4")], align=True
)
ITEM = np.dtype([("value", "f4"), ("head", "i4"), ("batch", "i4"), ("row", "i4"), ("column", "i4")])


class _Job(ctypes.Structure):
    """Mirrors job_t of _native.h."""

    _fields_ = [
        ("q", ctypes.c_void_p),
        ("k", ctypes.c_void_p),
        ("q_stride", ctypes.c_int64 * 3),
        ("k_stride", ctypes.c_int64 * 3),
        *((name, ctypes.c_int32) for name in "BHGNMD"),
        ("scale", ctypes.c_float),
        ("start", ctypes.c_void_p),
        ("stop", ctypes.c_void_p),
        ("mask", ctypes.c_void_p),
        ("mask_stride", ctypes.c_int64 * 3),
        ("unit", ctypes.c_void_p),
        ("full", ctypes.c_int32),
        ("rank", ctypes.c_int32),
        ("threshold", ctypes.c_float),
        ("threads", ctypes.c_int32),
        ("lanes", ctypes.c_int32),
        ("out", ctypes.c_void_p),
        ("histogram", ctypes.c_void_p),
        ("bins", ctypes.c_void_p),
        ("team", ctypes.c_void_p),
        ("top", ctypes.c_void_p),
        ("top_count", ctypes.c_void_p),
    ]


@cache
def _library() -> Any:
    spec = importlib.util.find_spec("quantdiff.statistics._native")
    if spec is None or spec.origin is None:
        return None
    library = ctypes.CDLL(spec.origin)
    layout = ctypes.sizeof(_Job) * 1_000_000 + PARTIAL.itemsize * 1000 + ITEM.itemsize
    if not hasattr(library, "quantdiff_layout") or library.quantdiff_layout() != layout:
        warnings.warn(
            "quantdiff's compiled kernels were built from other sources and are not used; "
            "install quantdiff again to have them",
            stacklevel=2,
        )
        return None
    library.quantdiff_run.argtypes = [ctypes.POINTER(_Job)]
    return library


@cache
def team() -> int | None:
    """Address of the function that runs code on torch's compute threads, or None."""
    bundled = sorted((Path(torch.__file__).parent / "lib").glob("libgomp*"))
    for name in (*map(str, bundled), None):
        try:
            return ctypes.cast(ctypes.CDLL(name).GOMP_parallel, ctypes.c_void_p).value
        except (AttributeError, OSError):
            continue
    return None


def available() -> bool:
    """Whether the compiled kernels were built; otherwise plain torch is used."""
    return _library() is not None


def run(
    q: Tensor,
    k: Tensor | None,
    *,
    scale: float,
    start: Tensor,
    stop: Tensor,
    mask: Tensor | None,
    unit: NDArray[np.float32],
    full: bool,
    rank: int,
    threshold: float,
    histogram: NDArray[np.int64],
) -> tuple[NDArray[Any], NDArray[np.int32], NDArray[Any]]:
    """One pass over the logits of q and k, or over the rows of q if k is None.

    Args:
        q: (B, H, N, D) fp32 on the CPU, last dimension contiguous.
        k: (B, G, M, D) likewise, H a multiple of G.
        scale: factor of q·k.
        start, stop: (B, N) int32, contiguous: row n counts keys start ≤ m < stop.
        mask: (B or 1, H or 1, N, M) bool, last dimension contiguous; False entries do not count.
        unit: (B·H, 2) fp32: weight and weighted pivot of the moments.
        full: compute moments and histogram too.
        rank: how many of the largest magnitudes are needed.
        threshold: smaller magnitudes are not needed.
        histogram: (H, 65536) int64, all zero; counts are added to it.

    Returns:
        One record of PARTIAL per sequence and head, (B·H,); the lowest and highest magnitude bin
        in use per head, (H, 2); the largest magnitudes, unordered, as records of ITEM.

    Raises:
        MemoryError: the kernels could not allocate their scratch memory.
    """
    batch, heads, rows, width = q.shape
    assert k is None or (k.shape[0], k.shape[3]) == (batch, width), (k.shape, q.shape)
    assert start.shape == stop.shape == (batch, rows), (start.shape, stop.shape, q.shape)
    if mask is not None:
        keys = width if k is None else k.shape[2]
        assert mask.shape[2:] == (rows, keys), (mask.shape, q.shape)
        assert mask.shape[0] in (1, batch), (mask.shape, q.shape)
        assert mask.shape[1] in (1, heads), (mask.shape, q.shape)
    threads = torch.get_num_threads()
    out = np.zeros(batch * heads, PARTIAL)
    out["min"], out["max"] = np.inf, -np.inf
    bins = np.tile(np.array([[BINS, -1]], np.int32), (heads, 1))
    top = np.zeros((threads, max(rank, 1)), ITEM)
    top_count = np.zeros(threads, np.int32)
    unit = np.ascontiguousarray(unit, np.float32)
    if mask is not None:
        # A stride of 0 reads the same mask for every head.
        head_stride = mask.stride(1) if mask.shape[1] > 1 else 0
        batch_stride = mask.stride(0) if mask.shape[0] > 1 else 0
        mask_stride = (batch_stride, head_stride, mask.stride(2))
    job = _Job(
        q.data_ptr(),
        None if k is None else k.data_ptr(),
        (q.stride(0), q.stride(1), q.stride(2)),
        (0, 0, 0) if k is None else (k.stride(0), k.stride(1), k.stride(2)),
        batch,
        heads,
        1 if k is None else k.shape[1],
        rows,
        width if k is None else k.shape[2],
        width,
        scale,
        start.data_ptr(),
        stop.data_ptr(),
        None if mask is None else mask.data_ptr(),
        (0, 0, 0) if mask is None else mask_stride,
        unit.ctypes.data,
        int(full),
        rank,
        threshold,
        threads,
        LANES,
        out.ctypes.data,
        histogram.ctypes.data,
        bins.ctypes.data,
        team(),
        top.ctypes.data,
        top_count.ctypes.data,
    )
    if _library().quantdiff_run(ctypes.byref(job)):
        raise MemoryError("the streaming kernels ran out of memory")
    return out, bins, np.concatenate([top[t, :n] for t, n in enumerate(top_count)])
