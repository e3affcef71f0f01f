"""Products in true fp32, whatever precision the process allows elsewhere."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

__all__ = ["exact_product", "true_fp32"]

_lock = threading.RLock()


@contextmanager
def true_fp32() -> Iterator[None]:
    """Keep fp32 products from being rounded to TF32 or bf16 in this context.

    The settings are read and written one by one: torch's older setting for all of them raises
    if one was set separately, as `torch.backends.cuda.matmul.fp32_precision` allows.
    """
    with _lock:  # process-wide settings: two recordings must not interleave here
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
                products.fp32_precision = "none"  # inherits the parent setting, if there is one
                if products.fp32_precision != allowed:
                    products.fp32_precision = allowed


def exact_product(a: Tensor, b: Tensor) -> Tensor:
    """a·bᵀ in true fp32: (..., N, D) and (..., M, D) to (..., N, M)."""
    with true_fp32():
        return a @ b.mT
