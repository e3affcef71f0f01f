"""Checks of a conversion: attention of both kinds is computed and compared."""

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from quantdiff.attention import DifferentialAttentionV1, DifferentialAttentionV2
from quantdiff.errors import UsageError
from quantdiff.models.checks import check_keys, library_errors
from quantdiff.models.conversion import VECTORS, Heads, convert_state
from quantdiff.models.converting_config import attention_prefix, official_counts
from quantdiff.models.converting_files import same_bits, tensors

__all__ = [
    "TOLERANCE",
    "Check",
    "attention_as_stored",
    "check_attention",
    "official_module",
    "reloaded",
]

# Largest difference in fp64, relative to the outputs' root mean square; a correct conversion stays
# below 1e-13 or so, a head or channel in the wrong place gives 1e-1.
TOLERANCE = 1e-10

TOKENS = 16  # of the random hidden states, in each of two sequences

State = dict[str, Tensor]


@dataclass(frozen=True)
class Check:
    """How far apart the outputs of source and target are.

    Attributes:
        layers: those whose attention was compared.
        difference: largest difference of an output, relative to the root mean square of the
            layer's outputs, in fp64 and before anything is rounded.
        stored: the same with the target's weights as stored; larger where a folded norm was
            rounded to the weights' dtype.
    """

    layers: tuple[int, ...]
    difference: float
    stored: float


def official_module(
    kind: str, config: Any, heads: Heads, layer: int
) -> DifferentialAttentionV1 | DifferentialAttentionV2:
    """The official code's attention of a layer, without weights, in fp64.

    Args:
        kind: `official-v1` or `official-v2`.
        config: of the transformers model; V1's sub-layer norm has its `rms_norm_eps` too.
        heads: of the layer.
        layer: its index, which sets V1's λ_init.
    """
    query, kv = official_counts(heads, kind)
    with torch.device("meta"):
        if kind == "official-v1":
            module = DifferentialAttentionV1(config.hidden_size, layer, query, kv, backend="eager")
            module.subln.eps = config.rms_norm_eps
        else:
            module = DifferentialAttentionV2(
                config.hidden_size, query, kv, heads.width, backend="eager"
            )
    return _fp64(module)


def check_attention(
    source: Mapping[str, Tensor],
    target: Mapping[str, Tensor],
    kinds: tuple[str, str],
    heads: Heads,
    model: Any,
) -> Check:
    """Compare the attention of the first, a middle and the last layer on random hidden states.

    The official kind is computed by quantdiff's modules, the other one by transformers' layers.
    V1's λ is compared by its four vectors, which both kinds share and keep: DiffLlama takes the
    exponentials in fp32 whatever its dtype, so outputs could agree to seven digits only. The
    outputs are therefore computed with λ = λ_init.

    Args:
        source: parameters of a whole model.
        target: those of the converted model, as read from its files.
        kinds: of both.
        heads: of every layer.
        model: the transformers model of either; its weights are not used.

    Raises:
        UsageError: the outputs or λ's vectors differ, a stored parameter is not the converted one
            rounded to its dtype, or the source is not finite; the message names the layer.
    """
    depth = model.config.num_hidden_layers
    layers = tuple(sorted({0, depth // 2, depth - 1}))
    largest, stored = 0.0, 0.0
    for layer in layers:
        prefix = attention_prefix(layer)
        own = _own(source, prefix)
        for name, value in own.items():
            if not value.isfinite().all():
                raise UsageError(
                    f"{prefix}{name} of the source holds NaN or infinity: it is damaged"
                )
        exact = convert_state(own, *kinds)
        written = _own(target, prefix, keep_dtype=True)
        for name in sorted({*exact, *written}):
            if name not in exact or name not in written:
                raise _wrong(layer, f"{name} is there in one of the two only")
            if not same_bits(exact[name].to(written[name].dtype), written[name]):
                raise _wrong(layer, f"the stored {name} is not the converted one")
        for name in VECTORS:
            if name in own and not (name in exact and torch.equal(own[name], exact[name])):
                raise _wrong(layer, f"{name} has changed")
        expected = _outputs(kinds[0], _without_vectors(own), heads, model, layer)
        found = _outputs(kinds[1], _without_vectors(exact), heads, model, layer)
        off = _difference(found, expected)
        if not off <= TOLERANCE:
            raise _wrong(layer, f"outputs differ by {off:.1e} of their root mean square")
        largest = max(largest, off)
        kept = {name: value.double() for name, value in written.items()}
        if any(not torch.equal(kept[name], exact[name]) for name in exact):
            found = _outputs(kinds[1], _without_vectors(kept), heads, model, layer)
            off = _difference(found, expected)
        stored = max(stored, off)
    return Check(layers, largest, stored)


def attention_as_stored(folder: Path, converted: State) -> State:
    """Read the written files, compare every bit, and return the attention modules' parameters.

    Raises:
        UsageError: a parameter is missing or differs.
    """
    kept, seen = {}, set()
    for name, value in tensors(folder):
        if name not in converted or not same_bits(value, converted[name]):
            raise UsageError(f"{name} was not written as it was converted; nothing is left")
        seen.add(name)
        if ".self_attn." in name:
            kept[name] = value
    if len(seen) < len(converted):
        raise UsageError(f"{min(converted.keys() - seen)} was not written; nothing is left")
    return kept


def reloaded(folder: Path, converted: State) -> Any:
    """Open the written model with transformers, and compare it with what was written.

    Raises:
        UsageError: it cannot be opened, or a parameter differs.
    """
    with library_errors("the converted model cannot be loaded"):
        model, found = AutoModelForCausalLM.from_pretrained(
            folder,
            dtype="auto",
            attn_implementation="sdpa",
            use_safetensors=True,
            trust_remote_code=False,
            output_loading_info=True,
        )
        check_keys(str(folder), found)
    for name, value in model.state_dict().items():
        written = converted.get(name, converted["model.embed_tokens.weight"])
        if not same_bits(value, written.to(value.dtype)):
            raise UsageError(f"{name} is not what was written once the model is loaded")
    return model


def _own(state: Mapping[str, Tensor], prefix: str, *, keep_dtype: bool = False) -> State:
    return {
        name.removeprefix(prefix): value if keep_dtype else value.double()
        for name, value in state.items()
        if name.startswith(prefix)
    }


def _without_vectors(state: State) -> State:
    """The state with both of λ's exponentials at 1, which fp32 represents exactly."""
    zeroed = {n: torch.zeros_like(state[n]) for n in ("lambda_q1", "lambda_q2") if n in state}
    return state | zeroed


def _outputs(kind: str, state: State, heads: Heads, model: Any, layer: int) -> Tensor:
    """Outputs (2, N, C) in fp64, from hidden states that are the same for every kind."""
    config = model.config
    generator = torch.Generator().manual_seed(layer)
    x = torch.randn(2, TOKENS, config.hidden_size, generator=generator, dtype=torch.float64)
    rotary = type(model.model.rotary_emb)(config)
    with torch.no_grad():
        cos, sin = rotary(x, torch.arange(TOKENS)[None])  # (1, N, d), its halves the same
        if kind.startswith("official"):
            module = official_module(kind, config, heads, layer)
            module.load_state_dict(state)
            half = heads.width // 2
            result: Tensor = module(x, (cos[..., :half], sin[..., :half]))
            return result
        attention = _fp64(copy.deepcopy(model.model.layers[layer].self_attn))
        attention.load_state_dict(state)
        outputs: Tensor = attention(x, position_embeddings=(cos, sin), attention_mask=None)[0]
        return outputs


def _fp64(module: Any) -> Any:
    """The module on the CPU in fp64, its parameters yet to be loaded."""
    return module.double().to_empty(device="cpu").eval()


def _difference(found: Tensor, expected: Tensor) -> float:
    scale = expected.square().mean().sqrt().clamp(min=torch.finfo(torch.float64).tiny)
    return float((found - expected).abs().max() / scale)


def _wrong(layer: int, what: str) -> UsageError:
    return UsageError(
        f"the converted model is not the source, and nothing was written: in the attention of "
        f"layer {layer} {what}; please report it with the versions of torch and transformers"
    )
