"""Products in true fp32, whatever the process allows for its own."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

__all__ = ["exact_product", "true_fp32"]

_lock = threading.RLock()


@contextmanager
def true_fp32() -> Iterator[None]:
    """Products of fp32 are not rounded to TF32 or bf16 in here.

    The settings are read and written one by one: torch's older setting for all of them raises
    where one was set by itself, which `torch.backends.cuda.matmul.fp32_precision` is for.
    """
    with _lock:  # settings of the process: two recordings must not take turns at them
        changed = []
        for products in (torch.backends.cuda.matmul, torch.backends.mkldnn.matmul):
            allowed = products.fp32_precision
            if allowed not in ("ieee", "none"):
                changed.append((products, allowed))
        try:
            for products, _ in changed:
                products.fp32_precision = "ieee"
            yield
        finally:
            for products, allowed in changed:
                products.fp32_precision = "none"  # follows the setting above it, if there is one
                if products.fp32_precision != allowed:
                    products.fp32_precision = allowed


def exact_product(a: Tensor, b: Tensor) -> Tensor:
    """a·bᵀ in true fp32: (..., N, D) and (..., M, D) to (..., N, M)."""
    with true_fp32():
        return a @ b.mT
