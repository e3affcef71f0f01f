"""The hook in quantdiff's own attention modules, whatever their backend."""

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
        key: (B, G, M, D); query head i reads key head i // (H/G). If the layout pairs them
            differently, key heads are repeated so that G is H.
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
            # Detached: recomputation by a checkpoint would miss a node of ours in the graph.
            key = key.detach()[:, sources]
        self.key: Tensor = key


def heads_modules(model: nn.Module) -> list[tuple[str, Heads]]:
    """The `Heads` of a model, named by the attention modules that contain them.

    If a module contains several, each is a site under its own full name.

    Raises:
        RecordingError: one is in several places, so whose logits it computes is ambiguous.
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
