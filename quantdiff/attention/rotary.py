"""Rotary position embedding, in both arrangements of the channels (arXiv 2104.09864)."""

import torch
from torch import Tensor

from quantdiff.errors import UsageError

__all__ = ["ROTARY", "rotary_table", "rotate"]

# How a head's channels form the pairs that are rotated: neighbours, as in the official DIFF code,
# or channel i with channel i + d/2, as in transformers.
ROTARY = ("interleaved", "half")


def rotary_table(positions: Tensor, width: int, base: float = 10000.0) -> tuple[Tensor, Tensor]:
    """Cosine and sine of every rotation.

    Args:
        positions: (...), of the tokens.
        width: d, of a head.
        base: the longest wavelength is about 2π·base tokens.

    Returns:
        Two tensors, (..., d/2), fp32.
    """
    frequencies = base ** (-torch.arange(0, width, 2, device=positions.device).double() / width)
    angles = positions[..., None].double() * frequencies  # fp32 would lose far positions
    return angles.cos().float(), angles.sin().float()


def rotate(x: Tensor, cos: Tensor, sin: Tensor, arrangement: str = "interleaved") -> Tensor:
    """Rotate the channel pairs of every head by its token's angles.

    Args:
        x: (B, H, N, d).
        cos, sin: (N, d/2) or (B, N, d/2).
        arrangement: one of `ROTARY`.

    Returns:
        (B, H, N, d), computed in fp32 (fp64 for fp64) and rounded once, as in the official kernel.

    Raises:
        UsageError: an unknown arrangement, or a table that does not fit.
    """
    if arrangement not in ROTARY:
        raise UsageError(f"rotary is one of {', '.join(ROTARY)}, not {arrangement!r}")
    if cos.shape[-2:] != (x.shape[-2], x.shape[-1] // 2) or cos.shape != sin.shape:
        raise UsageError(
            f"rel_pos holds cos {tuple(cos.shape)} and sin {tuple(sin.shape)}; for {x.shape[-2]} "
            f"tokens and heads of width {x.shape[-1]} it is {(x.shape[-2], x.shape[-1] // 2)} each"
        )
    upper = torch.float64 if x.dtype == torch.float64 else torch.float32
    cos, sin = (t.to(upper)[..., None, :, :] for t in (cos, sin))  # (1 or B, 1, N, d/2)
    wide = x.to(upper)
    if arrangement == "interleaved":
        a, b = wide[..., 0::2], wide[..., 1::2]
        turned = torch.stack([a * cos - b * sin, a * sin + b * cos], -1).flatten(-2)
    else:
        a, b = wide.chunk(2, -1)
        turned = torch.cat([a * cos - b * sin, a * sin + b * cos], -1)
    return turned.to(x.dtype)
