"""Conversion of the official DIFF code's weights to transformers models and back.

Official attention modules are part of a decoder with Llama's names. From V1 to DiffLlama, heads of
map 1 move before those of map 2, channel pairs of the rotary embedding change from neighbours to
halves, and the sub-layer norm's weight, which DiffLlama lacks, is folded into the output
projection. From V2 to DiffV2, only the channel pairs move.

Official V2 and DiffV2 weights have the same names and shapes: the caller must know which of them a
file holds, and converting twice scrambles it.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from quantdiff.attention.layouts import LAYOUTS, layout
from quantdiff.errors import UsageError

__all__ = [
    "CONVERSIONS",
    "VECTORS",
    "Conversion",
    "Heads",
    "attention_heads",
    "attention_prefixes",
    "convert_state",
    "find_conversion",
]

State = dict[str, Tensor]

VECTORS = ("lambda_q1", "lambda_k1", "lambda_q2", "lambda_k2")  # of V1's λ
_QKV = ("q_proj.weight", "k_proj.weight", "v_proj.weight")
# Old checkpoints hold the frequencies of the rotary embedding, which are not parameters.
_BUFFER = ".inv_freq"


@dataclass(frozen=True)
class Heads:
    """Counts of one attention module, in the order of its projections.

    Attributes:
        query, kv: heads of the projections.
        width: d.
    """

    query: int
    kv: int
    width: int


@dataclass(frozen=True)
class Conversion:
    """From one kind of weights to another.

    Attributes:
        source, target: names of the kinds.
        marker: a parameter of every attention module of the source, used to find them.
        names: the other parameters of such a module.
        heads: the counts, read from the module's shapes.
        attention: converts the parameters of one module.
        lossy: what cannot be undone, for the model card; empty if everything can.
    """

    source: str
    target: str
    marker: str
    names: tuple[str, ...]
    heads: Callable[[State], Heads]
    attention: Callable[[State, Heads], State]
    lossy: str = ""


def rotary_order(width: int, to: str) -> Tensor:
    """Where each channel of a head comes from: new[i] = old[order[i]]."""
    order = torch.arange(width)
    halves = torch.cat([order[0::2], order[1::2]])
    return halves if to == "half" else halves.argsort()


def _rows(weight: Tensor, heads: int, order: list[int], channels: Tensor | None) -> Tensor:
    """Reorder a projection's rows by head and within each head."""
    parts = weight.view(heads, -1, *weight.shape[1:])[order]
    if channels is not None:
        parts = parts[:, channels]
    return parts.reshape(weight.shape)


def _first_then_second(heads: int) -> list[int]:
    """Heads of map 1, then those of map 2, of adjacent pairs."""
    first, second = LAYOUTS["adjacent"].pairs(heads)
    return [*first, *second]


def _inverse(order: list[int]) -> list[int]:
    return sorted(range(len(order)), key=order.__getitem__)


def _move(state: State, heads: Heads, *, to: str, order: Callable[[int], list[int]]) -> State:
    """q, k and v with heads reordered and the rotary channels of q and k rearranged."""
    channels = rotary_order(heads.width, to)
    moved = dict(state)
    for name, count, turn in (
        ("q_proj", heads.query, channels),
        ("k_proj", heads.kv, channels),
        ("v_proj", heads.kv, None),
    ):
        key = f"{name}.weight"
        moved[key] = _rows(state[key], count, order(count), turn)
    return moved


def _v1_heads(state: State) -> Heads:
    width = state["lambda_q1"].shape[0]
    return Heads(
        state["q_proj.weight"].shape[0] // width, state["k_proj.weight"].shape[0] // width, width
    )


def _v2_heads(state: State) -> Heads:
    query = 2 * state["lambda_proj.weight"].shape[0]
    width = state["q_proj.weight"].shape[0] // query
    return Heads(query, state["k_proj.weight"].shape[0] // width, width)


def _v1_to_diffllama(state: State, heads: Heads) -> State:
    moved = _move(state, heads, to="half", order=_first_then_second)
    weight, norm = moved.pop("out_proj.weight"), moved.pop("subln.weight")
    # Each head's output of 2d channels is scaled just before the projection. In fp64 the
    # product of any two narrower floats is exact, so that it is rounded once.
    folded = weight.double() * norm.double().repeat(heads.query // 2)
    moved["o_proj.weight"] = folded.to(weight.dtype)
    if weight.isfinite().all() and not moved["o_proj.weight"].isfinite().all():
        raise UsageError(
            f"out_proj.weight times subln.weight goes beyond the range of {weight.dtype}: convert "
            "the weights to float32 or bfloat16 first"
        )
    return moved


def _diffllama_to_v1(state: State, heads: Heads) -> State:
    moved = _move(
        state, heads, to="interleaved", order=lambda count: _inverse(_first_then_second(count))
    )
    weight = moved.pop("o_proj.weight")
    moved["out_proj.weight"] = weight
    moved["subln.weight"] = torch.ones(2 * heads.width, dtype=weight.dtype, device=weight.device)
    return moved


def _same(count: int) -> list[int]:
    return list(range(count))


CONVERSIONS: dict[tuple[str, str], Conversion] = {
    (c.source, c.target): c
    for c in (
        Conversion(
            "official-v1", "diffllama", "subln.weight",
            (*_QKV, "out_proj.weight", *VECTORS), _v1_heads, _v1_to_diffllama,
            lossy="the weight of the sub-layer norm was folded into the output projection",
        ),
        Conversion(
            "diffllama", "official-v1", "lambda_q1", (*_QKV, "o_proj.weight", *VECTORS),
            _v1_heads, _diffllama_to_v1,
        ),
        Conversion(
            "official-v2", "diff_v2", "lambda_proj.weight", (*_QKV, "o_proj.weight"), _v2_heads,
            lambda state, heads: _move(state, heads, to="half", order=_same),
        ),
        Conversion(
            "diff_v2", "official-v2", "lambda_proj.weight", (*_QKV, "o_proj.weight"), _v2_heads,
            lambda state, heads: _move(state, heads, to="interleaved", order=_same),
        ),
    )
}  # fmt: skip


def attention_prefixes(state: Mapping[str, Any], marker: str) -> list[str]:
    """Prefixes of the attention modules in a state dict: what comes before `marker`."""
    return [name.removesuffix(marker) for name in state if name.endswith(marker)]


def find_conversion(source: str, target: str) -> Conversion:
    """The conversion between two kinds of weights.

    Raises:
        UsageError: there is none.
    """
    conversion = CONVERSIONS.get((source, target))
    if conversion is None:
        known = "; ".join(f"{a} to {b}" for a, b in CONVERSIONS)
        raise UsageError(f"no conversion from {source!r} to {target!r} is known; known: {known}")
    return conversion


def attention_heads(state: Mapping[str, Tensor], conversion: Conversion) -> dict[str, Heads]:
    """The attention modules in a state dict of the conversion's source.

    Returns:
        Prefix of their parameters' names → their head counts, read from the shapes.

    Raises:
        UsageError: there is none, one lacks a parameter or has an unknown one, or shapes do not
            fit together.
    """
    prefixes = attention_prefixes(state, conversion.marker)
    if not prefixes:
        raise UsageError(
            f"there is no {conversion.marker} among the weights: they hold no attention of the "
            f"kind {conversion.source}"
        )
    found = {}
    for prefix in prefixes:
        own = _own(state, prefix)
        for name in conversion.names:
            if name not in own:
                raise UsageError(f"{prefix}{name} is missing among the weights")
        for name in own:
            if name not in (conversion.marker, *conversion.names) and not name.endswith(_BUFFER):
                raise UsageError(
                    f"{prefix}{name} is no parameter that {conversion.source} and "
                    f"{conversion.target} share, so these weights cannot be converted"
                )
        heads = conversion.heads(own)
        _check(own, heads, prefix)
        try:
            kind = "adjacent_shared" if "v2" in conversion.source else "adjacent"
            layout(kind).check(heads.query, heads.kv)
        except ValueError as error:
            raise UsageError(f"{prefix.rstrip('.') or conversion.source}: {error}") from None
        found[prefix] = heads
    return found


def convert_state(state: Mapping[str, Tensor], source: str, target: str) -> State:
    """Convert the attention modules in a state dict; everything else stays unchanged.

    Args:
        state: of one attention module, or of a whole model; not changed.
        source, target: `official-v1` and `diffllama`, or `official-v2` and `diff_v2`.

    Returns:
        Tensors of the same dtypes; permutations are exact, a folded norm is rounded once.

    Raises:
        UsageError: an unknown pair, no attention module of the source's kind, parameters that one
            of the kinds lacks (official modules have no biases), or head counts that do not fit
            the layout.
    """
    conversion = find_conversion(source, target)
    modules = attention_heads(state, conversion)
    converted = {
        name: value for name, value in state.items() if not name.startswith(tuple(modules))
    }
    for prefix, heads in modules.items():
        new = conversion.attention(_own(state, prefix), heads)
        converted |= {prefix + name: value for name, value in new.items()}
    return converted


def _own(state: Mapping[str, Tensor], prefix: str) -> State:
    """The parameters of one module."""
    return {
        name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)
    }


def _check(state: State, heads: Heads, prefix: str) -> None:
    """Refuse shapes that do not fit together, which a reshape might silently accept."""
    width = heads.width
    shapes = {
        "q_proj.weight": (heads.query * width, None),
        "k_proj.weight": (heads.kv * width, None),
        "v_proj.weight": (heads.kv * width, None),
        "subln.weight": (2 * width,),
        **dict.fromkeys(VECTORS, (width,)),
    }
    left = heads.query // 2 * (1 if "lambda_proj.weight" in state else 2) * width
    shapes |= dict.fromkeys(("out_proj.weight", "o_proj.weight"), (None, left))
    for name, expected in shapes.items():
        given = tuple(state[name].shape) if name in state else ()
        if given and (
            len(given) != len(expected)
            or any(e not in (None, g) for g, e in zip(given, expected, strict=True))
        ):
            told = " × ".join("any" if e is None else str(e) for e in expected)
            raise UsageError(f"{prefix}{name} is {given}; with heads of width {width} it is {told}")
