"""Which head layout a model family has, and where its λ is."""

import torch
from torch import nn

from quantdiff.attention.reference import lambda_v1

__all__ = ["FAMILIES", "lambda_of", "layout_of"]

# By config.model_type; every family that is not named has standard heads.
FAMILIES: dict[str, str] = {"diff_v2": "adjacent_shared", "diffllama": "halves"}

VECTORS = ("lambda_q1", "lambda_k1", "lambda_q2", "lambda_k2")


def layout_of(model: nn.Module) -> str:
    """Head layout of a model, by its family."""
    return FAMILIES.get(str(getattr(getattr(model, "config", None), "model_type", "")), "none")


def lambda_of(attention: nn.Module) -> float | None:
    """λ of an attention module where it is one number, as in V1; None where it has none.

    Read from V1's four vectors, which have the same names in the official code, in DiffLlama, in
    Motif's models and in quantdiff's modules. V2's λ depends on the token.
    """
    vectors = [getattr(attention, name, None) for name in VECTORS]
    init = getattr(attention, "lambda_init", None)
    if init is None or any(not isinstance(v, torch.Tensor) or v.dim() != 1 for v in vectors):
        return None
    with torch.no_grad():
        return float(lambda_v1(*(v.detach().float() for v in vectors), float(init)))
