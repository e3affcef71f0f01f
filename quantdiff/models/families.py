"""Which head layout a model's attention has, and where its λ is.

Attention is recognised by the class of its module or by the model's family. Anything else is taken
to have standard heads; `calls_itself_differential` finds where names or parameters suggest
otherwise.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from quantdiff.attention.layouts import layout

__all__ = [
    "FAMILIES",
    "MODULES",
    "STANDARD",
    "Family",
    "calls_itself_differential",
    "family_of",
    "given_family",
    "lambda_of",
    "lambda_projection",
    "looks_differential",
]

VECTORS = ("lambda_q1", "lambda_k1", "lambda_q2", "lambda_k2")


@dataclass(frozen=True)
class Family:
    """How a kind of attention computes its maps.

    Attributes:
        layout: name of the head layout, or a function that reads it from a module or a config.
        apart: map 1 and map 2 are separate attention calls, in this order; otherwise one call
            computes all heads, in the order of their projection.
    """

    layout: str | Callable[[Any], str]
    apart: bool = False

    def at(self, source: Any) -> "Family":
        """The same family with the layout of `source`, a module or a config."""
        return self if isinstance(self.layout, str) else Family(self.layout(source), self.apart)


STANDARD = Family("none")


def _motif(config: Any) -> str:
    """Motif-2.6B pairs neighbours; Motif-2-12.7B has noise heads, each after its signal heads."""
    noise = getattr(config, "num_noise_heads", None)
    if not noise:
        return "adjacent"
    return f"grouped:{(config.num_attention_heads - noise) // noise}"


def _official_v2(module: Any) -> str:
    """The official V2 module is also the baseline, depending on a flag."""
    return "adjacent_shared" if getattr(module, "use_diff_v2", True) else "none"


# By config.model_type in lower case.
FAMILIES: dict[str, Family] = {
    "diff_v2": Family("adjacent_shared"),
    "diffllama": Family("halves"),
    "motif": Family(_motif, apart=True),
    "phi4flash": Family("adjacent", apart=True),
}

# By the class of the attention module, with its package before it where others use the name too:
# timm's, and the official ones (microsoft/unilm), whose file people copy.
MODULES: dict[str, Family] = {
    "timm.DiffAttention": Family("adjacent", apart=True),
    "timm.DiffParallelScalingBlock": Family("adjacent", apart=True),
    "MultiheadFlashDiff1": Family("adjacent", apart=True),
    "MultiheadFlashDiff2": Family("adjacent", apart=True),
    "MultiheadFlashDiffV2": Family(_official_v2),
}


def family_of(model: nn.Module, module: nn.Module) -> Family | None:
    """The kind of attention that a module of a model computes; None if it is not known."""
    kind = type(module)
    package = kind.__module__.partition(".")[0]
    known = MODULES.get(kind.__name__) or MODULES.get(f"{package}.{kind.__name__}")
    if known is not None:
        return known.at(module)
    # The module's own config first: the model may be a wrapper around several.
    for config in (getattr(module, "config", None), getattr(model, "config", None)):
        known = FAMILIES.get(str(getattr(config, "model_type", "")).lower())
        if known is not None:
            return known.at(config)
    return None


def given_family(name: str) -> Family:
    """The kind of attention for a layout that the user names.

    `adjacent` and `grouped:R` are two calls, as in all known code; the others are one.

    Raises:
        ValueError: no such layout.
    """
    heads = layout(name)
    return Family(name, apart=heads.differential and heads.own_keys and name != "halves")


_DIFFERENTIAL = re.compile(r"differential|diff[-_]?(att|former|transformer|head|llama|v\d)", re.I)


def calls_itself_differential(model: nn.Module, module: nn.Module) -> bool:
    """Whether an attention module, or its model, presents itself as differential."""
    family = str(getattr(getattr(model, "config", None), "model_type", ""))
    named = _DIFFERENTIAL.search(type(model).__name__) or _DIFFERENTIAL.search(family)
    return bool(named) or looks_differential(module)


def looks_differential(module: nn.Module) -> bool:
    """Whether a module's class or its parameters suggest differential attention."""
    return (
        bool(_DIFFERENTIAL.search(type(module).__name__))
        or type(module).__name__ in MODULES
        or isinstance(getattr(module, VECTORS[0], None), torch.Tensor)
        or lambda_projection(module) is not None
    )


def lambda_of(attention: nn.Module, dtype: torch.dtype = torch.float32) -> float | None:
    """λ of an attention module where it is one number, as in V1; None where it has none.

    It is rounded where the model rounds it. The official code, Motif, Phi-4 and quantdiff's modules
    sum the products in the parameters' dtype, take the exponentials in fp32, and cast them to the
    queries' dtype before the subtraction; DiffLlama sums in fp32, and timm casts λ as a whole.

    It is read from V1's four vectors, which have the same names in all of these, or from timm's two
    scalars. V2's λ depends on the token.

    Args:
        attention: the module.
        dtype: of its queries.
    """
    init = getattr(attention, "lambda_init", None)
    if init is None:
        return None
    found = [getattr(attention, name, None) for name in VECTORS]
    vectors = [v.detach() for v in found if isinstance(v, torch.Tensor) and v.dim() == 1]
    if len(vectors) == len(VECTORS):
        q1, k1, q2, k2 = vectors
        family = str(getattr(getattr(attention, "config", None), "model_type", "")).lower()
        summed = torch.float32 if family == "diffllama" else q1.dtype
        cast = torch.float32 if type(attention).__module__.startswith("timm.") else dtype
        first, second = (
            (q * k).sum(dtype=summed).float().exp().to(cast) for q, k in ((q1, k1), (q2, k2))
        )
        return float((first - second + float(init)).to(dtype))
    pair = [getattr(attention, name, None) for name in ("lambda_a", "lambda_b")]
    scalars = [s.detach() for s in pair if isinstance(s, torch.Tensor) and s.dim() == 0]
    if len(scalars) == len(pair):
        first, second = (scalar.exp() for scalar in scalars)
        return float((first - second + float(init)).to(dtype))
    return None


def lambda_projection(attention: nn.Module) -> nn.Module | None:
    """The projection whose sigmoid is V2's λ per token and pair, if there is one."""
    found = getattr(attention, "lambda_proj", None)
    return found if isinstance(found, nn.Module) else None
