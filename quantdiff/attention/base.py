"""What all attention modules share: projections, rotary embedding, cache, heads, output."""

from typing import Any, Protocol

from torch import Tensor, nn

from quantdiff.attention.heads import Heads
from quantdiff.attention.layouts import Layout
from quantdiff.attention.rotary import ROTARY, rotate
from quantdiff.errors import UsageError

__all__ = ["Attention", "LayerCache"]


class LayerCache(Protocol):
    """Keys and values of one layer, for example transformers' `DynamicLayer()`."""

    def update(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Append (B, G, N, d) each, and return all of them, (B, G, M, d)."""


class Attention(nn.Module):
    """What the modules share: projections, rotary embedding, cache, heads, output projection."""

    output_name = "out_proj"

    def __init__(
        self,
        embed_dim: int,
        heads: int,
        kv_heads: int,
        head_dim: int,
        head_layout: Layout,
        *,
        rotary: str,
        backend: str,
    ) -> None:
        super().__init__()
        try:
            head_layout.check(heads, kv_heads)
        except ValueError as error:
            raise UsageError(str(error)) from None
        if rotary not in ROTARY:
            raise UsageError(f"rotary is one of {', '.join(ROTARY)}, not {rotary!r}")
        if head_dim < 2 or head_dim % 2:
            raise UsageError(f"head_dim is even, for the rotary embedding, not {head_dim}")
        self.embed_dim, self.head_dim = embed_dim, head_dim
        self.query_heads, self.kv_heads = heads, kv_heads
        self.rotary = rotary
        left = len(head_layout.pairs(heads)[0]) if head_layout.differential else heads
        self.q_proj = nn.Linear(embed_dim, heads * head_dim, bias=False)
        self.k_proj = nn.Linear(embed_dim, kv_heads * head_dim, bias=False)
        self.v_proj = nn.Linear(embed_dim, kv_heads * head_dim, bias=False)
        width = left * head_layout.value_width * head_dim
        setattr(self, self.output_name, nn.Linear(width, embed_dim, bias=False))
        self.heads = Heads(head_layout, head_dim**-0.5, backend)

    def forward(
        self,
        x: Tensor,
        rel_pos: tuple[Tensor, Tensor],
        attention_mask: Tensor | None = None,
        cache: LayerCache | None = None,
    ) -> Tensor:
        """Causal self-attention.

        Args:
            x: (B, N, C).
            rel_pos: cosine and sine of the tokens' positions, (N, d/2) or (B, N, d/2) each; see
                `rotary_table`.
            attention_mask: (B, M), 1 for tokens and 0 for padding, cached tokens included.
            cache: keys and values of earlier tokens, to which those of `x` are appended.

        Returns:
            (B, N, C).

        Raises:
            UsageError: `x`, `rel_pos` or the mask has the wrong shape, or the cache is that of a
                whole model.
        """
        if x.dim() != 3 or x.shape[2] != self.embed_dim:
            raise UsageError(
                f"x is {tuple(x.shape)}; it is (sequences, tokens, {self.embed_dim} channels)"
            )
        batch, rows, _ = x.shape
        q, k, v = (
            proj(x).view(batch, rows, -1, self.head_dim).transpose(1, 2)  # (B, H, N, d)
            for proj in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = (rotate(t, *rel_pos, self.rotary) for t in (q, k))
        if hasattr(cache, "layers"):
            raise UsageError(
                f"{type(cache).__name__} holds all layers; give an attention module the cache of "
                "its own layer, for example transformers' DynamicLayer()"
            )
        if cache is not None:
            k, v = cache.update(k, v)
        kept = None
        if attention_mask is not None:
            if tuple(attention_mask.shape) != (batch, k.shape[2]):
                raise UsageError(
                    f"attention_mask is {tuple(attention_mask.shape)}; over {batch} sequences of "
                    f"{k.shape[2]} tokens, cached ones included, it is {(batch, k.shape[2])}"
                )
            kept = attention_mask
        out = self.combine(self.heads(q, k, v, kept), x)  # (B, h, N, w)
        output: nn.Module = getattr(self, self.output_name)
        result: Tensor = output(out.transpose(1, 2).flatten(2))
        return result

    def combine(self, out: Tensor, x: Tensor) -> Tensor:
        """Reduce the outputs of all query heads (B, H, N, w) to those left (B, h, N, w)."""
        return out

    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        """As in torch; with `strict`, an unexpected or missing name is reported in one sentence."""
        own = set(self.state_dict())
        kind, given = type(self).__name__, set(state_dict)
        if strict and given - own:
            raise UsageError(
                f"the state dict holds {min(given - own)}, which {kind} does not have: it is of "
                "another kind of attention"
            )
        if strict and own - given:
            raise UsageError(f"the state dict lacks {min(own - given)} of {kind}")
        return super().load_state_dict(state_dict, strict=strict, assign=assign)

    # torch calls this for a module inside a model too, but always with strict=True.
    def _load_from_state_dict(self, state_dict: Any, prefix: str, *rest: Any) -> None:
        """Refuse parameters of another shape, which come from other head counts, by name."""
        for name, parameter in self.state_dict().items():
            given = state_dict.get(prefix + name)
            if isinstance(given, Tensor) and given.shape != parameter.shape:
                raise UsageError(
                    f"{prefix}{name} is {tuple(given.shape)} in the state dict and "
                    f"{tuple(parameter.shape)} in this {type(self).__name__}: the head counts or "
                    "the layout are others"
                )
        super()._load_from_state_dict(state_dict, prefix, *rest)
