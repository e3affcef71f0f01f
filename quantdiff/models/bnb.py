"""bitsandbytes' 4-bit modules, computed on a CPU with the weights as stored."""

from typing import Any

import torch
from bitsandbytes.functional import dequantize_blockwise
from bitsandbytes.nn.modules import Linear4bit, fix_4bit_weight_quant_state_from_module
from torch import Tensor, nn

__all__ = ["StoredLinear4bit", "compute_as_stored", "unpacked"]


class StoredLinear4bit(Linear4bit):
    """A `Linear4bit` that gives the same result on every CPU.

    bitsandbytes 0.50 does not. With AVX-512 it uses the scales of the wrong blocks wherever the row
    length is not a multiple of the block (64 weights), so that a feed-forward layer of width 688
    returns noise. With AVX512-BF16 it rearranges the weights in the first pass without gradients,
    rounds scales and inputs to bf16 whatever the model's dtype, and fails unless the inputs are a
    multiple of 64 and the outputs of 32.
    """

    def forward(self, x: Tensor) -> Tensor:
        """Multiply by the weights.

        Args:
            x: (…, K).

        Returns:
            (…, N), computed in the module's compute dtype, in the dtype of `x`.
        """
        if x.device.type != "cpu":
            result: Tensor = super().forward(x)
            return result
        fix_4bit_weight_quant_state_from_module(self)
        if not self.compute_type_is_set:
            self.set_compute_type(x)  # type: ignore[no-untyped-call]
            self.compute_type_is_set = True
        dtype = x.dtype if self.compute_dtype is None else self.compute_dtype
        bias = None if self.bias is None else self.bias.to(dtype)
        out: Tensor = _Product.apply(x.to(dtype), self.weight, bias)  # type: ignore[no-untyped-call]
        return out.to(x.dtype)


class _Product(torch.autograd.Function):
    """x·Wᵀ + b; W is unpacked again for the gradient, rather than kept until then."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Any, bias: Tensor | None) -> Tensor:
        ctx.weight = weight
        return nn.functional.linear(x, unpacked(weight, x.dtype), bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, Tensor | None]:
        (gradient,) = gradients  # (…, N)
        of_bias = gradient.flatten(0, -2).sum(0) if ctx.needs_input_grad[2] else None  # (N,)
        return gradient @ unpacked(ctx.weight, gradient.dtype), None, of_bias


def unpacked(weight: Any, dtype: torch.dtype) -> Tensor:
    """The values of a 4-bit weight on a CPU.

    Args:
        weight: of a `Linear4bit`, with its `quant_state`.
        dtype: of the result.

    Returns:
        (N, K).
    """
    state = weight.quant_state
    scales = state.absmax
    if state.nested:
        scales = dequantize_blockwise(scales, state.state2) + state.offset
    # As one row: blocks are counted over all weights, but the AVX-512 kernels count them per row.
    values: Tensor = torch.ops.bitsandbytes.dequantize_4bit.default(
        weight.data, scales.float(), state.blocksize, state.quant_type,
        [state.shape.numel()], dtype,
    )  # fmt: skip
    return values.view(state.shape)


def compute_as_stored(model: nn.Module) -> None:
    """Turn a model's 4-bit modules into `StoredLinear4bit`, before its first forward pass."""
    for module in model.modules():
        if isinstance(module, Linear4bit):
            module.__class__ = StoredLinear4bit
