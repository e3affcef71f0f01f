"""Plain references that materialise everything, in fp64."""

import importlib

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


def multiply(query: Tensor, key: Tensor) -> Tensor:
    """q·kᵀ in fp32 of the values as they enter the product, which autocast may round."""
    if torch.is_autocast_enabled("cpu"):
        dtype = torch.get_autocast_dtype("cpu")
        query, key = query.to(dtype), key.to(dtype)
    with torch.autocast("cpu", enabled=False):
        key = key.float().repeat_interleave(query.shape[1] // key.shape[1], 1)
        return query.float() @ key.transpose(2, 3)


class Materialised:
    """Attention logits and hidden states of a Llama-like model, all of them kept.

    The logits are taken where the family's own eager function multiplies q and k, which is replaced
    for the time; nothing of quantdiff has a part in it.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self.model = model
        self.logits: dict[int, list[tuple[Tensor, Tensor]]] = {}  # (H, N, M), (N, M) a sequence
        self.hidden: dict[int, list[Tensor]] = {}  # (N, C) a sequence

    def run(self, batches: list[dict[str, Tensor]]) -> "Materialised":
        """Run the batches; padding is found by their 2-D masks."""
        model = self.model
        module = importlib.import_module(type(model).__module__)
        eager = module.eager_attention_forward
        implementation = model.config._attn_implementation
        handles = []
        for i, layer in enumerate(model.model.layers):

            def keep(_module, _args, output, i=i):
                hidden = output if isinstance(output, Tensor) else output[0]
                for b, real in enumerate(self.real):
                    self.hidden.setdefault(i, []).append(hidden[b, real].float())

            handles.append(layer.register_forward_hook(keep))
        taken = set()

        def attend(attention, query, key, value, attention_mask, scaling, **kwargs):
            layer = attention.layer_idx
            if layer not in taken:
                taken.add(layer)
                product = multiply(query, key) * scaling  # (B, H, N, M)
                for b, real in enumerate(self.real):
                    seen = attention_mask[b, 0] > torch.finfo(attention_mask.dtype).min / 2
                    pair = product[b][:, real][:, :, real], seen[real][:, real]
                    self.logits.setdefault(layer, []).append(pair)
            return eager(attention, query, key, value, attention_mask, scaling=scaling, **kwargs)

        module.eager_attention_forward = attend
        model.set_attn_implementation("eager")
        try:
            with torch.no_grad():
                for batch in batches:
                    self.real = batch["attention_mask"].bool()
                    taken.clear()
                    model(**batch)
        finally:
            module.eager_attention_forward = eager
            model.set_attn_implementation(implementation)
            for handle in handles:
                handle.remove()
        return self

    def heads(self, layer: int) -> tuple[Tensor, Tensor]:
        """All logits of a layer that count, (H, n), and a mask of ones."""
        flat = torch.cat([product[:, seen] for product, seen in self.logits[layer]], 1)
        return flat, torch.ones_like(flat, dtype=torch.bool)

    def channels(self, layer: int) -> tuple[Tensor, Tensor]:
        """All hidden states of a layer, (1, n), and a mask of ones."""
        flat = torch.cat(self.hidden[layer]).reshape(1, -1)
        return flat, torch.ones_like(flat, dtype=torch.bool)

    def top_logits(self, n: int) -> list[tuple[float, int, int, int, int, int]]:
        """(magnitude, layer, head, sequence, query, key), the n largest."""
        found = []
        for layer, sequences in self.logits.items():
            for sequence, (product, seen) in enumerate(sequences):
                magnitude = torch.where(seen, product.abs(), -1.0)
                values, places = magnitude.flatten().topk(min(n, magnitude.numel()))
                for value, place in zip(values.tolist(), places.tolist(), strict=True):
                    head, query, key = np.unravel_index(place, magnitude.shape)
                    if value >= 0:
                        found.append((value, layer, int(head), sequence, int(query), int(key)))
        return sorted(found, key=lambda item: (-item[0], *item[1:]))[:n]

    def top_hidden(self, n: int) -> list[tuple[float, int, int, int, int]]:
        """(magnitude, layer, sequence, token, channel), the n largest."""
        found = []
        for layer, sequences in self.hidden.items():
            for sequence, hidden in enumerate(sequences):
                values, places = hidden.abs().flatten().topk(min(n, hidden.numel()))
                for value, place in zip(values.tolist(), places.tolist(), strict=True):
                    token, channel = np.unravel_index(place, hidden.shape)
                    found.append((value, layer, sequence, int(token), int(channel)))
        return sorted(found, key=lambda item: (-item[0], *item[1:]))[:n]


def check_profile(content: dict, expected: Materialised) -> None:
    """Every number of a profile.json against everything materialised.

    Extremes to 1e-4 relative, means to 1e-4 of the standard deviation, medians to 0.5 %, kurtosis
    to 1 %.
    """
    for kind, groups, name in (
        ("attention_logits", expected.heads, "heads"),
        ("hidden_states", expected.channels, None),
    ):
        part = content[kind]
        total, layers = [], sorted(expected.logits)
        assert [site["layer"] for site in part["sites"]] == layers
        for site in part["sites"]:
            values, seen = groups(site["layer"])
            total.append(values.abs().flatten())
            exact = statistics(values, seen)
            rows = site[name] if name else [site]
            assert len(rows) == len(values)
            for g, row in enumerate(rows):
                absmax = max(abs(exact["min"][g]), abs(exact["max"][g]))
                # The smaller of the two extremes may be a sum that nearly cancels.
                close = {"rtol": 1e-4, "atol": 1e-5 * absmax}
                assert np.isclose(row["absmax"], absmax, rtol=1e-4)
                assert np.isclose(row["min"], exact["min"][g], **close)
                assert np.isclose(row["max"], exact["max"][g], **close)
                assert abs(row["mean"] - exact["mean"][g]) <= 1e-4 * exact["std"][g]
                assert np.isclose(row["std"], exact["std"][g], rtol=1e-4)
                assert np.isclose(row["kurtosis"], exact["kurtosis"][g], rtol=1e-2)
        everything = torch.cat(total)
        assert part["count"] == len(everything)
        assert np.isclose(part["median"], np.median(everything.numpy()), rtol=5e-3)
        largest = everything.topk(100).values
        for n in (1, 2, 3, 10, 100):
            assert np.isclose(part[f"top{n}"], float(largest[n - 1]), rtol=1e-4)
    _check_top(
        [
            tuple(item[n] for n in ("value", "layer", "head", "sequence", "query", "key"))
            for item in content["attention_logits"]["top"]
        ],
        expected.top_logits(400),
    )
    _check_top(
        [
            tuple(item[n] for n in ("value", "layer", "sequence", "token", "channel"))
            for item in content["hidden_states"]["top"]
        ],
        expected.top_hidden(400),
    )


def _check_top(found: list[tuple], expected: list[tuple]) -> None:
    """The same items; only items whose magnitudes agree to rounding may change places."""
    exact = {item[1:]: item[0] for item in expected}
    assert len(found) == 100
    assert len({item[1:] for item in found}) == 100
    values = [item[0] for item in found]
    assert values == sorted(values, reverse=True)
    for item, place in zip(found, expected[:100], strict=True):
        assert np.isclose(item[0], place[0], rtol=1e-4)
        assert item[1:] in exact, f"{item} is not among the largest"
        assert np.isclose(item[0], exact[item[1:]], rtol=1e-4)
