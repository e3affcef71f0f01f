"""The flash-attn packages: which works here, which head widths it supports, how it is called.

flash-attn 2 requires equal widths of queries and values. flash-attn 3 (package
flash_attn_interface) supports other value widths, up to 512, only on Hopper and for query heads of
up to 64, so not 128 with 256. flash-attn 4 (flash_attn.cute) supports any from 8 to 256 on Hopper
and up to 128 on later GPUs. Differential attention V1 has values of twice the query's width; where
a kernel does not support them, the values are split and it is called twice.
"""

import importlib
import inspect
import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from quantdiff.errors import UsageError

__all__ = ["KERNELS", "Kernel", "call", "capability", "find", "forget", "plan"]

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Kernel:
    """One of the packages.

    Attributes:
        name: as shown to users.
        module: where its functions are imported from.
        takes: whether it supports these widths of queries and values on a GPU whose compute
            capability begins with that number.
    """

    name: str
    module: str
    takes: Callable[[int, int, int], bool]


def _fits(width: int, most: int = 256) -> bool:
    return 8 <= width <= most and width % 8 == 0


def _four(qk: int, v: int, major: int) -> bool:
    return 9 <= major <= 12 and all(_fits(width, 256 if major == 9 else 128) for width in (qk, v))


def _three(qk: int, v: int, major: int) -> bool:
    return major >= 8 and _fits(qk) and (v == qk or (major == 9 and qk <= 64 and _fits(v, 512)))


def _two(qk: int, v: int, major: int) -> bool:
    return major >= 8 and _fits(qk) and v == qk


# Newest first.
KERNELS = (
    Kernel("flash-attn 4", "flash_attn.cute", _four),
    Kernel("flash-attn 3", "flash_attn_interface", _three),
    Kernel("flash-attn 2", "flash_attn", _two),
)


@cache
def _functions(module: str) -> tuple[Any, Any] | None:
    """A package's two functions, or None where it is missing or does not work.

    Importing is the only reliable test: flash-attn 2 ships a folder of version 4 without what that
    needs, and version 4 alone leaves a package of version 2's name without its functions.
    """
    try:
        found = importlib.import_module(module)
        return found.flash_attn_func, found.flash_attn_varlen_func
    except (ImportError, AttributeError, OSError, RuntimeError):
        return None


def capability(tensor: Tensor) -> int:
    """First number of the compute capability of the GPU that a tensor lies on.

    Raises:
        UsageError: it lies elsewhere, or is in a precision that flash-attn does not support.
    """
    if not tensor.is_cuda or tensor.dtype not in (torch.float16, torch.bfloat16):
        raise UsageError(
            f"flash-attn takes float16 and bfloat16 on a CUDA GPU, not {tensor.dtype} on "
            f"{tensor.device.type}; use backend='sdpa'"
        )
    return torch.cuda.get_device_capability(tensor.device)[0]


@cache
def find(qk_width: int, value_width: int, major: int) -> tuple[Kernel, int] | None:
    """The kernel for these widths and how many parts the values are split into, or None.

    A kernel that takes the values whole is preferred, then a newer one.
    """
    working = [kernel for kernel in KERNELS if _functions(kernel.module) is not None]
    for kernel in working:
        if kernel.takes(qk_width, value_width, major):
            return kernel, 1
    if value_width == 2 * qk_width:
        for kernel in working:
            if kernel.takes(qk_width, qk_width, major):
                return kernel, 2
    return None


@cache
def plan(qk_width: int, value_width: int, major: int) -> tuple[Kernel, int]:
    """`find`, reported in one log line the first time.

    Raises:
        UsageError: no package works here, or none of them supports these widths on this GPU.
    """
    found = find(qk_width, value_width, major)
    if found is None:
        working = [kernel.name for kernel in KERNELS if _functions(kernel.module) is not None]
        if not working:
            raise UsageError(
                "backend='flash' needs flash-attn, which is not installed or does not work: "
                "pip install flash-attn --no-build-isolation"
            )
        raise UsageError(
            f"no installed flash-attn package ({', '.join(working)}) takes query heads of width "
            f"{qk_width} with values of width {value_width} on this GPU; use backend='sdpa'"
        )
    kernel, parts = found
    whole = "whole" if parts == 1 else f"in {parts} calls"
    log.info("%s: query width %d, values of %d %s", kernel.name, qk_width, value_width, whole)
    return found


def forget() -> None:
    """Look for the packages again, after one was installed or removed."""
    for known in (_functions, find, plan):
        known.cache_clear()


def call(
    kernel: Kernel, query: Tensor, key: Tensor, value: Tensor, scale: float, kept: Tensor | None
) -> Tensor:
    """One causal call.

    Args:
        kernel: of `KERNELS`.
        query: (B, H, N, d); key: (B, G, M, d); value: (B, G, M, w).
        scale: of the logits.
        kept: (B, M) bool, False at padding; None where there is none.

    Returns:
        (B, H, N, w), zeros in the rows of padded queries.

    Raises:
        UsageError: the kernel does not support these widths here, or does not work here.
    """
    widths = query.shape[-1], value.shape[-1]
    if not kernel.takes(*widths, capability(query)):
        raise UsageError(
            f"{kernel.name} does not take query heads of width {widths[0]} with values of width "
            f"{widths[1]} on this GPU"
        )
    functions = _functions(kernel.module)
    if functions is None:
        raise UsageError(f"{kernel.name} is not installed or does not work")
    dense, packed = functions
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))  # (B, N, H, d)
    if kept is None:
        return _first(dense(q, k, v, softmax_scale=scale, causal=True)).transpose(1, 2)
    rows = q.shape[1]
    asking = kept[:, -rows:]
    out = q.new_zeros(*q.shape[:3], v.shape[-1])
    out[asking] = _packed(packed, q[asking], k[kept], v[kept], kept, asking,
                          scale)  # fmt: skip
    return out.transpose(1, 2)


def _packed(
    function: Callable[..., Tensor],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    kept: Tensor,
    asking: Tensor,
    scale: float,
) -> Tensor:
    """The call over real tokens only, one sequence after another: (tokens, H, d) each."""
    queries, keys = (x.sum(1, dtype=torch.int32) for x in (asking, kept))
    given = {
        "cu_seqlens_q": torch.nn.functional.pad(queries.cumsum(0, dtype=torch.int32), (1, 0)),
        "cu_seqlens_k": torch.nn.functional.pad(keys.cumsum(0, dtype=torch.int32), (1, 0)),
        "softmax_scale": scale,
        "causal": True,
    }
    longest = {"max_seqlen_q": int(queries.max()), "max_seqlen_k": int(keys.max())}
    known = inspect.signature(function).parameters  # early flash-attn 4 lacks them
    given |= {name: value for name, value in longest.items() if name in known}
    return _first(function(query, key, value, **given))


def _first(output: Tensor | tuple[Tensor, ...]) -> Tensor:
    """The output; some versions return the log-sum-exp with it."""
    return output[0] if isinstance(output, tuple) else output
