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
    vectors = [
        vector.detach().float()
        for name in VECTORS
        if isinstance(vector := getattr(attention, name, None), torch.Tensor) and vector.dim() == 1
    ]
    init = getattr(attention, "lambda_init", None)
    if init is None or len(vectors) < len(VECTORS):
        return None
    q1, k1, q2, k2 = vectors
    return float(lambda_v1(q1, k1, q2, k2, float(init)))
