"""Plain references that materialise everything, in fp64."""

import numpy as np
import torch
from torch import Tensor


def logits(q: Tensor, k: Tensor, scale: float) -> Tensor:
    """q·kᵀ·scale in fp64, (B, H, N, M); key heads repeated over their groups."""
    k = k.double().repeat_interleave(q.shape[1] // k.shape[1], 1)
    return torch.einsum("bhnd,bhmd->bhnm", q.double(), k) * scale


def statistics(x: Tensor, seen: Tensor) -> dict[str, np.ndarray]:
    """Per-group statistics of x (G, ...) where `seen` (the same shape) holds."""
    rows = [g[s].numpy() for g, s in zip(x.double(), seen, strict=True)]
    result = {name: np.full(len(rows), np.nan) for name in ("mean", "std", "kurtosis", "median")}
    result["count"] = np.array([len(r) for r in rows])
    result["min"] = np.array([r.min(initial=np.inf) for r in rows])
    result["max"] = np.array([r.max(initial=-np.inf) for r in rows])
    for g, r in enumerate(rows):
        if not len(r):
            continue
        centred = r - r.mean()
        variance = (centred**2).mean()
        result["mean"][g], result["std"][g] = r.mean(), variance**0.5
        if variance > 0:
            result["kurtosis"][g] = (centred**4).mean() / variance**2
        result["median"][g] = np.median(np.abs(r))
    return result
