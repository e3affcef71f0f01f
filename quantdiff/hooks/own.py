"""The hook in quantdiff's own attention modules, whatever their backend computes with."""

from typing import Any

from torch import Tensor, nn

from quantdiff.attention.heads import Heads

__all__ = ["HeadsCall", "heads_modules"]


class HeadsCall:
    """One call of a `Heads` module.

    Attributes:
        query: (B, H, N, D).
        key: (B, G, M, D), query head i reading key head i // (H/G); G is H where the layout does
            not have it so by itself.
        mask: (B, M) bool, False at padding; or None.
    """

    __slots__ = ("key", "mask", "query")

    def __init__(self, module: Heads, args: tuple[Any, ...]) -> None:
        self.query, key, _, self.mask = args
        heads, kv_heads = self.query.shape[1], key.shape[1]
        sources = module.layout.key_heads(heads, kv_heads)
        if heads % kv_heads or sources != [head * kv_heads // heads for head in range(heads)]:
            # Detached: a node of ours in the graph would be missed when a checkpoint recomputes.
            key = key.detach()[:, sources]
        self.key: Tensor = key


def heads_modules(model: nn.Module) -> list[tuple[str, Heads]]:
    """The `Heads` of a model, named by the attention modules in which they stand."""
    return [
        (name.rpartition(".")[0] or name, module)
        for name, module in model.named_modules()
        if isinstance(module, Heads)
    ]
