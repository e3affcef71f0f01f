"""torch's flash kernels, used for their log-sum-exp and not for their output."""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from quantdiff.statistics.precision import true_fp32

__all__ = ["kernel_takes", "log_sum_exp"]

VECTOR = 8  # half-precision values that the GPU kernel loads at a time
WIDEST = 256  # widest head that it supports


def kernel_takes(q: Tensor, k: Tensor) -> bool:
    """Whether there is a kernel for tensors of this dtype, device and width, (B, H, N, D)."""
    half = q.dtype == k.dtype and q.dtype in (torch.float16, torch.bfloat16)
    if q.device.type == "cpu":
        return half or q.dtype == k.dtype == torch.float32
    return (
        q.is_cuda
        and half
        and q.shape[-1] <= WIDEST
        and torch.version.hip is None
        and torch.backends.cuda.is_flash_attention_available()
        and torch.cuda.get_device_capability(q.device) >= (8, 0)
    )


def log_sum_exp(q: Tensor, k: Tensor, scale: float, causal: bool) -> Tensor:
    """ln Σ exp(q·kᵀ·scale) of every row, as the kernel computes it alongside the output.

    Args:
        q: (B, H, N, D), for which `kernel_takes` holds.
        k: (B, H, M, D).
        scale: factor of q·kᵀ, 0 or more: kernels interpret a negative one differently.
        causal: row n sees the keys up to n; requires N = M, or kernels disagree on which keys these
            are.

    Returns:
        (B, H, N) fp32.
    """
    if q.is_cuda and q.shape[-1] % VECTOR:
        q, k = (F.pad(x, (0, -x.shape[-1] % VECTOR)) for x in (q, k))
    q, k = (
        x if _is_read_rightly(x) else x.clone(memory_format=torch.contiguous_format) for x in (q, k)
    )
    aten: Any = torch.ops.aten
    if q.is_cuda:
        kernel = aten._scaled_dot_product_flash_attention
    else:
        kernel = aten._scaled_dot_product_flash_attention_for_cpu
    with true_fp32():
        # The keys stand in for the values, which must have the same width.
        result: Tensor = kernel(q, k, k, 0.0, causal, scale=scale)[1]
    return result


def _is_read_rightly(x: Tensor) -> bool:
    """Whether the strides of x suit its kernel.

    The CPU's misreads a strided last dimension; a GPU's loads whole vectors.
    """
    steps = (*x.stride()[:-1], x.storage_offset()) if x.is_cuda else ()
    return x.stride(-1) == 1 and all(step % VECTOR == 0 for step in steps)
