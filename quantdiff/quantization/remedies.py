"""Remedies against outliers that leave a model's function unchanged: migration and rotation.

Both change weights in place within a context. Neither affects q·kᵀ: projections give the same
queries and keys as before, so neither helps the attention logits.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from quantdiff.errors import QuantizationError, UsageError
from quantdiff.quantization.layerwise import real_of
from quantdiff.quantization.quantizer import refuse_quantized
from quantdiff.quantization.residual import Residual, residual_of, restored

__all__ = ["orthogonal", "rotated", "smoothed"]

# Relative to the largest logit; norms compute in fp32 whatever the model's dtype.
_CLOSE = {torch.float64: 1e-4, torch.float32: 1e-4}


@contextmanager
def smoothed(
    model: Any, batches: Iterable[Mapping[str, Any]], alpha: float = 0.5
) -> Iterator[None]:
    """Move outlier channels of the linear modules' inputs into their weights.

    SmoothQuant (arXiv 2211.10438, equation 4): channel j of the input is divided by
    s_j = max|X_j|^α / max|W_j|^(1−α) and the weight's column multiplied by it. Applied after both
    norms of a layer, and between up_proj and down_proj.

    Args:
        model: Llama-like; Llama, DiffLlama and DIFF V2 are.
        batches: inputs of the model, to measure the channels; padding does not count.
        alpha: in [0, 1]; 0 puts all difficulty on the activations, 1 on the weights.

    Raises:
        UsageError: α outside [0, 1], or no batches.
        QuantizationError: a model that is built differently, whose function changed, or that is
            quantized already; a batch whose padding cannot be determined.
    """
    if not 0 <= alpha <= 1:
        raise UsageError(f"alpha lies in [0, 1], not {alpha}")
    refuse_quantized(model)
    parts = residual_of(model)
    work = list(batches)
    if not work:
        raise UsageError("migration needs a batch of text to see how large the channels get")
    most = _largest(model, parts, work)
    with restored(parts):
        with torch.no_grad(), _unchanged(model, work[0]):
            for block in parts.blocks:
                readers = list(block.readers.values())
                s = _factors(most[readers[0]], [r.weight for r in readers], alpha)
                block.norm.weight.data = (block.norm.weight.double() / s).to(readers[0].weight)
                for reader in readers:
                    reader.weight.data = (reader.weight.double() * s).to(reader.weight)
            for up, down in parts.gated:
                s = _factors(most[down], [down.weight], alpha)
                up.weight.data = (up.weight.double() / s[:, None]).to(up.weight)
                if up.bias is not None:
                    up.bias.data = (up.bias.double() / s).to(up.bias)
                down.weight.data = (down.weight.double() * s).to(down.weight)
        yield


@contextmanager
def rotated(model: Any, batch: Mapping[str, Any] | None = None, *, seed: int = 0) -> Iterator[None]:
    """Rotate the residual stream, which spreads an outlier channel over all channels.

    As in QuaRot (arXiv 2404.00456) and SliceGPT, the norms' weights are folded into the modules
    after them; then the weights that read the stream are multiplied by an orthogonal Q and those
    that write to it by its transpose. A tied output head is untied meanwhile.

    Args:
        model: Llama-like; Llama, DiffLlama and DIFF V2 are.
        batch: for checking that the function is unchanged; some tokens by default.
        seed: of the random signs of Q's rows.

    Raises:
        QuantizationError: a model that is built differently, whose function changed, or that is
            quantized already.
    """
    refuse_quantized(model)
    parts = residual_of(model)
    device = parts.embedding.weight.device
    if batch is None:
        count = parts.embedding.num_embeddings
        batch = {"input_ids": torch.arange(min(16, count), device=device)[None]}
    q = orthogonal(parts.width, seed).to(device)
    with restored(parts):
        with torch.no_grad(), _unchanged(model, batch):
            _fold(parts)
            parts.embedding.weight.data = _times(parts.embedding.weight, q)
            parts.head.weight.data = _times(parts.head.weight, q)
            for block in parts.blocks:
                for reader in block.readers.values():
                    reader.weight.data = _times(reader.weight, q)
            for writer in parts.writers.values():
                turn = q.to(writer.weight.device)
                writer.weight.data = (turn.T @ writer.weight.double()).to(writer.weight)
                if writer.bias is not None:
                    writer.bias.data = _times(writer.bias, q)
        yield


def orthogonal(width: int, seed: int = 0) -> Tensor:
    """An orthogonal matrix that mixes all channels about equally, (width, width) fp64.

    The Kronecker product of a Hadamard matrix, for the largest power of two that divides the width,
    and a cosine transform for the remaining factor (1 for powers of two); rows have random signs.
    """
    odd = width
    while odd % 2 == 0:
        odd //= 2
    hadamard = torch.ones(1, 1, dtype=torch.float64)
    while len(hadamard) * odd < width:
        hadamard = torch.cat([torch.cat([hadamard, hadamard], 1),
                              torch.cat([hadamard, -hadamard], 1)])  # fmt: skip
    hadamard /= math.sqrt(len(hadamard))
    n = torch.arange(odd, dtype=torch.float64)
    cosine = torch.cos(math.pi / odd * (n[None] + 0.5) * n[:, None]) * math.sqrt(2 / odd)
    cosine[0] /= math.sqrt(2)
    generator = torch.Generator().manual_seed(seed)
    signs = torch.randint(0, 2, (width, 1), generator=generator).double() * 2 - 1
    return torch.kron(hadamard, cosine) * signs


def _times(weight: Tensor, q: Tensor) -> Tensor:
    return (weight.double() @ q.to(weight.device)).to(weight)


def _fold(parts: Residual) -> None:
    """Fold the norms' weights into the modules after them."""
    behind = [(block.norm, list(block.readers.values())) for block in parts.blocks]
    for norm, readers in [*behind, (parts.last, [parts.head])]:
        for reader in readers:
            scale = norm.weight.to(reader.weight.device).double()
            reader.weight.data = (reader.weight.double() * scale).to(reader.weight)
        norm.weight.data = torch.ones_like(norm.weight)


def _factors(most: Tensor, weights: list[Any], alpha: float) -> Tensor:
    """s, fp64; 1 where a channel is always zero, or all its weights are."""
    columns = torch.stack([w.double().abs().amax(0) for w in weights]).amax(0)
    s = most.double() ** alpha / columns ** (1 - alpha)
    return torch.where((most > 0) & (columns > 0), s, 1.0)


@torch.no_grad()
def _largest(model: Any, parts: Residual, work: list[Mapping[str, Any]]) -> dict[nn.Linear, Tensor]:
    """Largest magnitude of each input channel over the real tokens, (in,) fp32."""
    first = [next(iter(block.readers.values())) for block in parts.blocks]
    modules = [*first, *(down for _, down in parts.gated)]
    most = {m: torch.zeros(m.in_features, device=m.weight.device) for m in modules}
    kept: dict[str, Any] = {}

    def hook(module: Any, args: Any) -> None:
        x = args[0].detach().float()  # (B, N, d)
        if kept["mask"] is not None:
            x = x * kept["mask"].to(x.device)[..., None]
        most[module] = torch.maximum(most[module], x.abs().flatten(0, -2).amax(0))

    handles = [module.register_forward_pre_hook(hook) for module in modules]
    try:
        for batch in work:
            kept["mask"] = real_of(batch)
            model(**batch)
    finally:
        for handle in handles:
            handle.remove()
    return most


@contextmanager
def _unchanged(model: Any, batch: Mapping[str, Any]) -> Iterator[None]:
    """Refuse changes within that alter the model's logits by more than rounding."""
    before = model(**batch).logits
    yield
    after = model(**batch).logits
    bound = _CLOSE.get(before.dtype, 5e-2) * float(before.abs().max())
    gap = float((after - before).abs().max())
    if not gap <= bound:
        raise QuantizationError(
            f"{type(model).__name__} computes something else after the change, by {gap:.2g} in the "
            "logits: it is not built as was supposed"
        )
