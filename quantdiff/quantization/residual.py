"""What reads the residual stream of a Llama-like model, and what writes to it."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from quantdiff.errors import QuantizationError
from quantdiff.hooks.found import Found

__all__ = ["Block", "Residual", "residual_of", "restored"]

_READ = {
    "input_layernorm": (
        "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.lambda_proj",
    ),
    "post_attention_layernorm": ("mlp.gate_proj", "mlp.up_proj"),
}  # fmt: skip
_WRITE = ("self_attn.o_proj", "mlp.down_proj")


@dataclass(eq=False)
class Block:
    """A norm and the linear modules that read its output.

    Attributes:
        norm: an RMS norm with a weight.
        readers: by name.
    """

    norm: Any
    readers: dict[str, nn.Linear]


@dataclass(eq=False)
class Residual:
    """Everything that touches the residual stream.

    Attributes:
        embedding, head: of tokens; they may share their weight.
        last: the norm before the head.
        blocks: in the order of the layers.
        writers: linear modules whose outputs are added to the stream, by name.
        gated: pairs of modules of a feed-forward part (up_proj, down_proj): each channel of the
            first's output is a factor of the second's input.
    """

    embedding: nn.Embedding
    head: nn.Linear
    last: Any
    blocks: list[Block]
    writers: dict[str, nn.Linear]
    gated: list[tuple[nn.Linear, nn.Linear]] = field(default_factory=list)

    @property
    def width(self) -> int:
        """Channels of the stream."""
        return int(self.embedding.weight.shape[1])


def residual_of(model: Any) -> Residual:
    """Find what touches the residual stream of a model.

    Raises:
        QuantizationError: the model is built differently.
    """
    found = Found(model, None)

    def refuse(what: str) -> QuantizationError:
        return QuantizationError(
            f"{type(model).__name__} is not built like Llama around its residual stream ({what}); "
            "migration and rotation know no other"
        )

    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    decoder = getattr(model, "model", None)
    last = getattr(decoder, "norm", None)
    if not isinstance(embedding, nn.Embedding) or not isinstance(head, nn.Linear):
        raise refuse("no plain embedding and output head")
    if last is None or not _is_rms(last):
        raise refuse("no RMS norm before the output head")
    result = Residual(embedding, head, last, [], {})
    for name, layer in found.layers:
        own = dict(layer.named_modules())
        linears = {n for n, m in own.items() if isinstance(m, nn.Linear)}
        known = {n for names in _READ.values() for n in names} | set(_WRITE)
        if linears - known or not set(_WRITE) <= linears:
            raise refuse(f"linear modules {', '.join(sorted(linears - known)) or 'missing'}")
        for norm, readers in _READ.items():
            module = own.get(norm)
            if module is None or not _is_rms(module):
                raise refuse(f"no RMS norm {norm} in {name}")
            there = {f"{name}.{r}": own[r] for r in readers if r in own}
            result.blocks.append(Block(module, there))  # type: ignore[arg-type]
        outside = [n for n, m in own.items() if hasattr(m, "variance_epsilon") and n not in _READ]
        if any("attn" not in n for n in outside):
            raise refuse(f"further norms in {name}")
        result.writers |= {f"{name}.{w}": own[w] for w in _WRITE}  # type: ignore[dict-item]
        result.gated.append((own["mlp.up_proj"], own["mlp.down_proj"]))  # type: ignore[arg-type]
    return result


def _is_rms(module: Any) -> bool:
    """Whether a module computes x / rms(x) · weight, by trying it out."""
    weight = getattr(module, "weight", None)
    if not isinstance(weight, Tensor) or getattr(module, "bias", None) is not None:
        return False
    x = torch.linspace(-1.0, 2.0, len(weight)).to(weight)
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", 0.0)) or 0.0
    plain = x.double() * torch.rsqrt(x.double().square().mean() + eps) * weight.double()
    with torch.no_grad():
        gap = (module(x).double() - plain).abs().max()
    return bool(gap <= 1e-2 * plain.abs().max() + 1e-6)


@contextmanager
def restored(parts: Residual) -> Iterator[None]:
    """Allow in-place changes of weights within, with the head untied; restore all afterwards."""
    modules: list[Any] = [parts.embedding, parts.head, parts.last, *parts.writers.values()]
    for block in parts.blocks:
        modules += [block.norm, *block.readers.values()]
    parameters = {id(p): p for module in modules for p in module.parameters(recurse=False)}
    kept = [(p, p.data) for p in parameters.values()]
    head = parts.head.weight
    try:
        for parameter, data in kept:
            parameter.data = data.clone()
        if head is parts.embedding.weight:
            parts.head.weight = nn.Parameter(head.data.clone(), requires_grad=head.requires_grad)
        yield
    finally:
        parts.head.weight = head
        for parameter, data in kept:
            parameter.data = data
