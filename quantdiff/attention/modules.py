"""Attention modules: the baseline, DIFF V1, DIFF V2 and grouped DIFF.

Parameter names and shapes are those of the official code (microsoft/unilm, Diff-Transformer; for
the grouped module, Motif-2-12.7B's), so that its state dicts load with `strict=True`.
"""

from typing import Any

import torch
from torch import Tensor, nn

from quantdiff.attention.base import Attention
from quantdiff.attention.layouts import LAYOUTS, layout
from quantdiff.attention.reference import lambda_init
from quantdiff.errors import UsageError

__all__ = [
    "DifferentialAttentionV1",
    "DifferentialAttentionV2",
    "GroupedDifferentialAttention",
    "MultiheadAttention",
]

NORM_EPS = 1e-5  # of the sub-layer norm in the official code


class MultiheadAttention(Attention):
    """Standard attention, the baseline of the official code.

    Args:
        embed_dim: C; a head is C / num_heads wide.
        depth: of the layer; has no effect here.
        num_heads: query heads.
        num_kv_heads: key-value heads; None for as many as `num_heads`.
        rotary: `interleaved` as in the official code, or `half` as in transformers.
        backend: `eager`, `sdpa`, `flex`, `flash`, or `auto`.

    Raises:
        UsageError: head counts that do not divide, or an unknown backend or arrangement.
    """

    def __init__(
        self,
        embed_dim: int,
        depth: int,
        num_heads: int,
        num_kv_heads: int | None = None,
        *,
        rotary: str = "interleaved",
        backend: str = "auto",
    ) -> None:
        super().__init__(
            embed_dim,
            num_heads,
            num_heads if num_kv_heads is None else num_kv_heads,
            _divide(embed_dim, num_heads),
            LAYOUTS["none"],
            rotary=rotary,
            backend=backend,
        )


class _LambdaVectors(Attention):
    """V1's λ, sub-layer norm and subtraction."""

    def __init__(self, *args: Any, depth: float, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.lambda_init = lambda_init(depth)

        def vector() -> nn.Parameter:
            return nn.Parameter(torch.randn(self.head_dim, dtype=torch.float32) * 0.1)

        for name in ("lambda_q1", "lambda_k1", "lambda_q2", "lambda_k2"):
            self.register_parameter(name, vector())
        self.subln = nn.RMSNorm(2 * self.head_dim, eps=NORM_EPS)

    def lambda_full(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """λ of the layer: each exponential in fp32 (fp64 for fp64), cast before the subtraction."""
        upper = torch.float64 if dtype == torch.float64 else torch.float32
        first, second = (
            torch.exp((q * k).sum().to(upper)).to(dtype)
            for q, k in ((self.lambda_q1, self.lambda_k1), (self.lambda_q2, self.lambda_k2))
        )
        return first - second + self.lambda_init

    def combine(self, out: Tensor, x: Tensor) -> Tensor:
        """Subtract, normalize each head, scale: (B, H, N, 2d) to (B, h, N, 2d)."""
        first, second = self.heads.layout.pairs(out.shape[1])
        out = out[:, first] - self.lambda_full(out.dtype) * out[:, second]
        normed: Tensor = self.subln(out)
        return normed * (1 - self.lambda_init)


class DifferentialAttentionV1(_LambdaVectors):
    """DIFF Transformer's attention (arXiv 2410.05258), heads as in its official flash code.

    Args:
        embed_dim: C; a head is C / num_heads / 2 wide, its values twice that.
        depth: of the layer, from 0; sets λ_init. Some checkpoints were trained with depth − 1.
        num_heads: differential heads, half of a Transformer's; there are twice as many maps.
        num_kv_heads: differential key-value heads; None for as many as `num_heads`.
        rotary, backend: as in `MultiheadAttention`.

    Raises:
        UsageError: head counts that do not divide, or an unknown backend or arrangement.
    """

    def __init__(
        self,
        embed_dim: int,
        depth: float,
        num_heads: int,
        num_kv_heads: int | None = None,
        *,
        rotary: str = "interleaved",
        backend: str = "auto",
    ) -> None:
        head_dim = _divide(embed_dim, 2 * num_heads)
        super().__init__(
            embed_dim,
            2 * num_heads,
            2 * _kv(num_heads, num_kv_heads),
            head_dim,
            LAYOUTS["adjacent"],
            depth=depth,
            rotary=rotary,
            backend=backend,
        )


class GroupedDifferentialAttention(_LambdaVectors):
    """Grouped differential attention (arXiv 2510.06949), heads as in Motif-2-12.7B.

    Args:
        embed_dim: C.
        depth: sets λ_init; Motif passes depth − 1.
        num_heads: all query heads, signal and noise.
        num_noise_heads: noise heads among them, one after each group of signal heads.
        num_kv_heads: all key-value heads; even ones are read by signal heads, odd ones by noise
            heads, and values are two of them side by side.
        head_dim: d.
        rotary, backend: as in `MultiheadAttention`; Motif's rotary is `half`.

    Raises:
        UsageError: head counts that do not divide, or an unknown backend or arrangement.
    """

    output_name = "o_proj"

    def __init__(
        self,
        embed_dim: int,
        depth: float,
        num_heads: int,
        num_noise_heads: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        rotary: str = "half",
        backend: str = "auto",
    ) -> None:
        signal = num_heads - num_noise_heads
        if num_noise_heads < 1 or signal < num_noise_heads or signal % num_noise_heads:
            raise UsageError(
                f"num_noise_heads = {num_noise_heads} does not divide the other "
                f"{signal} of {num_heads} heads into groups"
            )
        super().__init__(
            embed_dim,
            num_heads,
            num_kv_heads,
            head_dim,
            layout(f"grouped:{signal // num_noise_heads}"),
            depth=depth,
            rotary=rotary,
            backend=backend,
        )


class DifferentialAttentionV2(Attention):
    """DIFF V2's attention: twice the query heads, shared keys and values, λ per token.

    Args:
        d_model: C.
        num_heads: heads left after the subtraction; there are twice as many query heads.
        num_kv_heads: key-value heads; None for as many as `num_heads`.
        head_dim: d.
        rotary, backend: as in `MultiheadAttention`.

    Raises:
        UsageError: head counts that do not divide, or an unknown backend or arrangement.
    """

    output_name = "o_proj"

    def __init__(
        self,
        d_model: int,
        num_heads: int,
        num_kv_heads: int | None,
        head_dim: int,
        *,
        rotary: str = "interleaved",
        backend: str = "auto",
    ) -> None:
        super().__init__(
            d_model,
            2 * num_heads,
            _kv(num_heads, num_kv_heads),
            head_dim,
            LAYOUTS["adjacent_shared"],
            rotary=rotary,
            backend=backend,
        )
        self.lambda_proj = nn.Linear(d_model, num_heads, bias=False)

    def combine(self, out: Tensor, x: Tensor) -> Tensor:
        """Subtract λ, per token and pair, times the second map: (B, 2h, N, d) to (B, h, N, d)."""
        lam = torch.sigmoid(self.lambda_proj(x)).transpose(1, 2)[..., None]  # (B, h, N, 1)
        return out[:, 0::2] - lam * out[:, 1::2]


def _kv(num_heads: int, num_kv_heads: int | None) -> int:
    """Key-value heads of differential heads; checked here, to report the caller's numbers."""
    if num_heads < 1:
        raise UsageError(f"num_heads is 1 or more, not {num_heads}")
    count = num_heads if num_kv_heads is None else num_kv_heads
    if count < 1 or num_heads % count:
        raise UsageError(f"num_kv_heads = {count} does not divide num_heads = {num_heads}")
    return count


def _divide(embed_dim: int, heads: int) -> int:
    if heads < 1 or embed_dim % heads:
        raise UsageError(f"embed_dim = {embed_dim} is not divided by {heads} heads")
    return embed_dim // heads
