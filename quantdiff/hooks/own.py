"""The hook in quantdiff's own attention modules, whatever their backend computes with."""

from collections import Counter
from typing import Any

from torch import Tensor, nn

from quantdiff.attention.heads import Heads
from quantdiff.errors import RecordingError

__all__ = ["HeadsCall", "heads_modules"]


class HeadsCall:
    """One call of a `Heads` module.

    Attributes:
        query: (B, H, N, D).
        key: (B, G, M, D), query head i reading key head i // (H/G); G is H where the layout does
            not have it so by itself.
        cached: keys and values as a cache holds them, (B, G, M, D) each.
        mask: (B, M), 0 or False at padding; or None.
    """

    __slots__ = ("cached", "key", "mask", "query")

    def __init__(self, module: Heads, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = dict(zip(("query", "key", "value", "kept"), args, strict=False)) | kwargs
        self.query, key, self.mask = given["query"], given["key"], given["kept"]
        self.cached: tuple[Tensor, Tensor] = key, given["value"]
        heads, kv_heads = self.query.shape[1], key.shape[1]
        sources = module.layout.key_heads(heads, kv_heads)
        if heads % kv_heads or sources != [head * kv_heads // heads for head in range(heads)]:
            # Detached: a node of ours in the graph would be missed when a checkpoint recomputes.
            key = key.detach()[:, sources]
        self.key: Tensor = key


def heads_modules(model: nn.Module) -> list[tuple[str, Heads]]:
    """The `Heads` of a model, by the attention modules in which they stand.

    A module that holds several has a site for each, by its full name.

    Raises:
        RecordingError: one stands in several places; whose logits it computes cannot be told.
    """
    found = [
        (name, module)
        for name, module in model.named_modules(remove_duplicate=False)
        if isinstance(module, Heads)
    ]
    if len({id(module) for _, module in found}) < len(found):
        raise RecordingError(
            "an attention module of quantdiff's stands in several places of the model; which layer "
            "its logits belong to cannot be told"
        )
    owners = Counter(name.rpartition(".")[0] for name, _ in found)
    named = [(name.rpartition(".")[0], name, module) for name, module in found]
    return [(owner if owner and owners[owner] == 1 else name, m) for owner, name, m in named]
