"""The flash-attn packages: which is installed, which head widths it takes, how it is called.

flash-attn 2 wants equal widths of queries and values. flash-attn 3 (package flash_attn_interface)
takes other value widths for query heads of up to 64, up to 512, but not 128 with 256. flash-attn 4
(flash_attn.cute) takes any from 8 to 256 on Hopper. Differential attention V1 has values of twice
the query's width; where a kernel does not take them, the values are split and it is called twice.
"""

import importlib
import importlib.util
import inspect
import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from quantdiff.errors import UsageError

__all__ = ["KERNELS", "Kernel", "call", "find", "plan"]

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Kernel:
    """One of the packages.

    Attributes:
        name: as people say it.
        module: where its functions are imported from.
        takes: whether it takes these widths of queries and values.
    """

    name: str
    module: str
    takes: Callable[[int, int], bool]

    def installed(self) -> bool:
        """Whether its module can be found, without importing it."""
        try:
            return importlib.util.find_spec(self.module) is not None
        except (ImportError, ValueError):
            return False


def _fits(width: int, most: int = 256) -> bool:
    return 8 <= width <= most and width % 8 == 0


# Newest first.
KERNELS = (
    Kernel("flash-attn 4", "flash_attn.cute", lambda qk, v: _fits(qk) and _fits(v)),
    Kernel(
        "flash-attn 3",
        "flash_attn_interface",
        lambda qk, v: _fits(qk) and (v == qk or (qk <= 64 and _fits(v, 512))),
    ),
    Kernel("flash-attn 2", "flash_attn", lambda qk, v: _fits(qk) and v == qk),
)


def find(qk_width: int, value_width: int) -> tuple[Kernel, int] | None:
    """The installed kernel for these widths and into how many parts the values are split.

    One that takes the values whole comes before one that does not, a newer before an older one.
    """
    installed = [kernel for kernel in KERNELS if kernel.installed()]
    for kernel in installed:
        if kernel.takes(qk_width, value_width):
            return kernel, 1
    if value_width == 2 * qk_width:
        for kernel in installed:
            if kernel.takes(qk_width, qk_width):
                return kernel, 2
    return None


@cache
def plan(qk_width: int, value_width: int) -> tuple[Kernel, int]:
    """`find`, said in one log line the first time.

    Raises:
        UsageError: no package is installed, or none of them takes these widths.
    """
    found = find(qk_width, value_width)
    if found is None:
        installed = [kernel.name for kernel in KERNELS if kernel.installed()]
        if not installed:
            raise UsageError(
                "backend='flash' needs flash-attn, which is not installed: "
                "pip install 'quantdiff[flash]'"
            )
        raise UsageError(
            f"no installed flash-attn package ({', '.join(installed)}) takes query heads of width "
            f"{qk_width} with values of width {value_width}; use backend='sdpa'"
        )
    kernel, parts = found
    whole = "whole" if parts == 1 else f"in {parts} calls"
    log.info("%s: query width %d, values of %d %s", kernel.name, qk_width, value_width, whole)
    return found


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
        UsageError: widths that the kernel does not take.
    """
    widths = query.shape[-1], value.shape[-1]
    if not kernel.takes(*widths):
        raise UsageError(
            f"{kernel.name} does not take query heads of width {widths[0]} with values of width "
            f"{widths[1]}"
        )
    module = importlib.import_module(kernel.module)
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))  # (B, N, H, d)
    if kept is None:
        return _first(module.flash_attn_func(q, k, v, softmax_scale=scale, causal=True)).transpose(
            1, 2
        )
    rows = q.shape[1]
    asking = kept[:, -rows:]
    out = q.new_zeros(*q.shape[:3], v.shape[-1])
    out[asking] = _packed(module.flash_attn_varlen_func, q[asking], k[kept], v[kept], kept, asking,
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
    """The call over real tokens alone, sequence behind sequence: (tokens, H, d) each."""
    queries, keys = (x.sum(1, dtype=torch.int32) for x in (asking, kept))
    given = {
        "cu_seqlens_q": torch.nn.functional.pad(queries.cumsum(0, dtype=torch.int32), (1, 0)),
        "cu_seqlens_k": torch.nn.functional.pad(keys.cumsum(0, dtype=torch.int32), (1, 0)),
        "softmax_scale": scale,
        "causal": True,
    }
    longest = {"max_seqlen_q": int(queries.max()), "max_seqlen_k": int(keys.max())}
    known = inspect.signature(function).parameters  # flash-attn 4 began without them
    given |= {name: value for name, value in longest.items() if name in known}
    return _first(function(query, key, value, **given))


def _first(output: Tensor | tuple[Tensor, ...]) -> Tensor:
    """The output; some versions return their log-sum-exp beside it."""
    return output[0] if isinstance(output, tuple) else output
