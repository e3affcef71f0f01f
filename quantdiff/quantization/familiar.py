"""Check that attention computes what is assumed, before it is quantized."""

from typing import Any

import torch
from torch import Tensor

from quantdiff.errors import QuantizationError
from quantdiff.hooks.logits import Logits, as_multiplied
from quantdiff.quantization.attention import attend
from quantdiff.quantization.seen import has_choice
from quantdiff.quantization.softmax import Softmax

__all__ = ["check_familiar"]

_CLOSE = {torch.float64: 1e-8, torch.float32: 1e-3, torch.float16: 1e-2, torch.bfloat16: 5e-2}


def check_familiar(name: str, output: Any, logits: Logits, value: Tensor) -> bool:
    """Refuse a module whose output differs from that of `attend` without a grid.

    Args:
        name: of the module.
        output: the module's own, (B, N, H, w), or a tuple that begins with it.
        logits: of the call.
        value: (B, G, M, w).

    Returns:
        Whether that proves anything: where each query sees only one key, logits do not matter.

    Raises:
        QuantizationError: something unknown happens between q·kᵀ and the values.
    """
    theirs = (output[0] if isinstance(output, tuple) else output).detach().transpose(1, 2)
    with torch.no_grad():
        plain = Softmax(logits.scale, logits.visible, logits.softcap, logits.bias)
        query, key = as_multiplied(logits.query, logits.key)
        ours = attend(query, key, value, plain, logits.sinks)
    if theirs.shape != ours.shape:
        raise QuantizationError(
            f"the attention of {name} gives {tuple(theirs.shape)} where {tuple(ours.shape)} is "
            "known"
        )
    close = _CLOSE.get(query.dtype, 5e-2)
    tf32 = torch.backends.cuda.matmul.fp32_precision == "tf32"
    if query.is_cuda and query.dtype == torch.float32 and tf32:
        close = _CLOSE[torch.float16]  # TF32 has as many digits as fp16
    real = (logits.visible.stop > logits.visible.start).to(ours.device)[:, None, :, None]
    gap = torch.where(real, (ours.float() - theirs.float()).abs(), 0.0).max()
    size = torch.where(real, theirs.float().abs(), 0.0).max()
    # A NaN passes here; it is refused where it is quantized, with another message.
    if float(gap) > close * (1e-3 + float(size)):
        raise QuantizationError(
            f"the attention of {name} is not the softmax of q·kᵀ·scaling with its mask times "
            "the values; something in between is not known to quantdiff"
        )
    return has_choice(logits.visible, key.shape[2])
