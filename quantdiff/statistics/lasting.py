"""Memory for what is kept, apart from the heap that the model's activations come and go in."""

import mmap
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

__all__ = ["lasting_zeros"]


def lasting_zeros(shape: tuple[int, ...], dtype: DTypeLike) -> NDArray[Any]:
    """Zeros in pages of their own.

    Between two layers the heap is full of holes that the next layer's activations would fill.
    An array kept in one of them for good breaks it, and the heap grows by a whole activation:
    about 10 MB a layer were measured on SmolLM2-135M at 2,048 tokens.
    """
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    if not size:
        return np.zeros(shape, dtype)
    return np.frombuffer(mmap.mmap(-1, size), dtype).reshape(shape)
