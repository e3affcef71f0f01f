"""Stand-ins for differential models that cannot be had here: of the same structure, made anew."""

import contextlib
from types import SimpleNamespace

import torch
from torch import nn
from torch.nn import functional as F

C, D = 48, 8


class Base(nn.Module):
    """Projections and λ; keeps every head's queries and keys for the test."""

    def __init__(self, heads, kv_heads, depth=0):
        super().__init__()
        self.heads, self.kv_heads = heads, kv_heads
        self.q, self.k = nn.Linear(C, heads * D), nn.Linear(C, kv_heads * D)
        self.v = nn.Linear(C, kv_heads * D)
        for name in ("lambda_q1", "lambda_k1", "lambda_q2", "lambda_k2"):
            self.register_parameter(name, nn.Parameter(torch.randn(D) * 0.3))
        self.lambda_init = 0.8 - 0.6 * 2.718281828 ** (-0.3 * depth)
        self.seen = None

    def project(self, x):
        q, k, v = (f(x).unflatten(-1, (-1, D)).transpose(1, 2) for f in (self.q, self.k, self.v))
        self.seen = q.detach(), k.detach()
        return q, k, v

    def lam(self):
        first, second = (self.lambda_q1 @ self.lambda_k1).exp(), self.lambda_q2 @ self.lambda_k2
        return first - second.exp() + self.lambda_init


TIMM = "timm.layers.diff_attention"


class DiffAttention(Base):
    """As timm's: two calls of heads that stand side by side, values of two heads' width."""

    __module__ = TIMM

    def __init__(self, depth, **options):
        super().__init__(6, 6, depth)
        self.out = nn.Linear(6 * D, C)
        self.options = options

    def forward(self, x, mask=None):
        q, k, v = self.project(x)
        v = torch.cat([v[:, 0::2], v[:, 1::2]], -1)
        given = {"attn_mask": mask, **self.options}
        (q1, q2), (k1, k2) = (t.unflatten(1, (-1, 2)).unbind(2) for t in (q, k))
        first = F.scaled_dot_product_attention(q1, k1, v, **given)
        second = F.scaled_dot_product_attention(q2, k2, v, **given)
        return self.out((first - self.lam() * second).transpose(1, 2).flatten(2))


class MotifAttention(Base):
    """As Motif-2.6B's: four calls, two maps by two halves of the values, keys repeated."""

    def __init__(self, depth):
        super().__init__(8, 4, depth)
        self.out = nn.Linear(8 * D, C)

    def forward(self, x, mask=None):
        q, k, v = self.project(x)
        k, v = (t.unflatten(1, (-1, 2)) for t in (k, v))
        q1, q2 = q[:, 0::2], q[:, 1::2]
        k1, k2, v1, v2 = (
            t.repeat_interleave(2, 1) for t in (k[:, :, 0], k[:, :, 1], v[:, :, 0], v[:, :, 1])
        )
        given = {"attn_mask": mask} if mask is not None else {"is_causal": True}
        maps = [
            torch.cat([F.scaled_dot_product_attention(q, k, v, **given) for v in (v1, v2)], -1)
            for q, k in ((q1, k1), (q2, k2))
        ]
        return self.out((maps[0] - self.lam() * maps[1]).transpose(1, 2).flatten(2))


class Grouped(Base):
    """As Motif-2-12.7B's: r signal heads to one noise head, which may be repeated for them."""

    def __init__(self, depth, ratio=2, repeated=False):
        super().__init__(2 * (ratio + 1), 4, depth)
        self.out, self.ratio, self.repeated = nn.Linear(2 * ratio * 2 * D, C), ratio, repeated

    def forward(self, x, mask=None):
        q, k, v = self.project(x)
        groups = q.unflatten(1, (-1, self.ratio + 1))
        signal, noise = groups[:, :, :-1].flatten(1, 2), groups[:, :, -1]
        k1, k2, v = k[:, 0::2], k[:, 1::2], torch.cat([v[:, 0::2], v[:, 1::2]], -1)
        many = [t.repeat_interleave(self.ratio, 1) for t in (k1, v)]
        first = F.scaled_dot_product_attention(signal, *many, is_causal=True)
        if self.repeated:
            noise, k2 = (t.repeat_interleave(self.ratio, 1) for t in (noise, k2))
            second = F.scaled_dot_product_attention(noise, k2, many[1], is_causal=True)
        else:
            second = F.scaled_dot_product_attention(noise, k2, v, is_causal=True)
            second = second.repeat_interleave(self.ratio, 1)
        return self.out((first - self.lam() * second).transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, attention):
        super().__init__()
        self.attn = attention
        self.mlp = nn.Linear(C, C)

    def forward(self, x, mask):
        return self.mlp(x) if self.attn is None else x + self.attn(x, mask)


class Model(nn.Module):
    """Blocks around `attention(depth)`; None makes a block without."""

    def __init__(self, attention, layers=2, **config):
        super().__init__()
        self.embedding = nn.Embedding(300, C)
        self.blocks = nn.ModuleList(Block(attention(i)) for i in range(layers))
        if config:
            self.config = SimpleNamespace(**config)

    def forward(self, input_ids, attention_mask=None, mask=None):
        x = self.embedding(input_ids) * 3
        if attention_mask is not None and mask is None:
            mask = attention_mask
        for block in self.blocks:
            x = block(x, mask)
        return x


def make(attention, **options):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Model(attention, **options).eval()


class TwoWidths(nn.Module):
    """A block of two attentions, of four heads and of two."""

    def __init__(self):
        super().__init__()
        self.wide, self.narrow = (Plain(heads) for heads in (4, 2))

    def forward(self, x):
        return self.narrow(self.wide(x))


class Plain(nn.Module):
    def __init__(self, heads):
        super().__init__()
        self.heads, self.qkv = heads, nn.Linear(16, 48)

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + out.transpose(1, 2).flatten(2)


def two_widths():
    """Layers with attentions of other head counts; takes (batch, tokens, 16)."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(TwoWidths(), TwoWidths()).eval()


IDS = torch.randint(0, 300, (2, 11), generator=torch.Generator().manual_seed(1))
CAUSAL = torch.ones(11, 11, dtype=torch.bool).tril()


# flash-attn, called by the model itself


@contextlib.contextmanager
def flash_attn(calls):
    """flash-attn 2's operators, computed in plain torch; `calls` gets their names."""

    def attend(q, k, v, causal, left, right, scale):
        rows, keys = q.shape[1], k.shape[1]
        here = torch.arange(keys - rows, keys)[:, None]
        there = torch.arange(keys)
        seen = torch.ones(rows, keys, dtype=torch.bool)
        right = 0 if causal else right
        if left >= 0:
            seen &= there >= here - left
        if right >= 0:
            seen &= there <= here + right
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        k, v = (t.repeat_interleave(q.shape[1] // k.shape[1], 1) for t in (k, v))
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=scale)
        return out.transpose(1, 2).contiguous()

    def dense(q, k, v, dropout, scale, causal, left, right, softcap, alibi, returned):
        calls.append("dense")
        empty = torch.empty(0)
        return attend(q, k, v, causal, left, right, scale), empty, empty.clone(), empty.clone()

    def packed(q, k, v, lengths_q, lengths_k, most_q, most_k, dropout, scale, causal,
               left=-1, right=-1, softcap=0.0, alibi=None):  # fmt: skip
        calls.append("packed")
        ends = zip(*(x.tolist() for x in (lengths_q[:-1], lengths_q[1:], lengths_k[:-1],
                                          lengths_k[1:])), strict=True)  # fmt: skip
        outs = [
            attend(q[None, a:b], k[None, c:d], v[None, c:d], causal, left, right, scale)[0]
            for a, b, c, d in ends
        ]
        empty = torch.empty(0)
        return torch.cat(outs), empty, empty.clone(), empty.clone()

    with torch.library._scoped_library("flash_attn", "FRAGMENT") as library:
        library.define(
            "_flash_attn_forward(Tensor q, Tensor k, Tensor v, float dropout_p, float "
            "softmax_scale, bool causal, SymInt window_size_left, SymInt window_size_right, float "
            "softcap, Tensor? alibi_slopes, bool return_softmax) -> (Tensor, Tensor, Tensor, "
            "Tensor)"
        )
        library.define(
            "_flash_attn_varlen_forward(Tensor q, Tensor k, Tensor v, Tensor cu_seqlens_q, Tensor "
            "cu_seqlens_k, SymInt max_seqlen_q, SymInt max_seqlen_k, float dropout_p, float "
            "softmax_scale, bool causal, SymInt window_size_left=-1, SymInt window_size_right=-1, "
            "float softcap=0.0, Tensor? alibi_slopes=None) -> (Tensor, Tensor, Tensor, Tensor)"
        )
        library.impl("_flash_attn_forward", dense, "CompositeExplicitAutograd")
        library.impl("_flash_attn_varlen_forward", packed, "CompositeExplicitAutograd")
        yield


def call_flash(q, k, v, *, window=(-1, -1), kept=None, **more):
    """(B, N, H, D) each, padding taken out where there is any."""
    scale = q.shape[-1] ** -0.5
    ops = torch.ops.flash_attn
    if kept is None or bool(kept.all()):
        return ops._flash_attn_forward(
            q, k, v, 0.0, scale, causal=True, window_size_left=window[0],
            window_size_right=window[1], softcap=0.0, alibi_slopes=more.get("alibi"),
            return_softmax=False,
        )[0]  # fmt: skip
    ends = F.pad(kept.sum(1).cumsum(0), (1, 0)).int()
    longest = int(kept.sum(1).max())
    out = torch.zeros_like(q[..., :1]).expand(*q.shape[:3], v.shape[-1]).clone()
    out[kept] = ops._flash_attn_varlen_forward(
        q[kept], k[kept], v[kept], ends, ends, longest, longest, 0.0, scale, True, *window
    )[0]
    return out


class Inner(nn.Module):
    """As Phi-4-mini-flash's: λ stands in it, and it makes four calls."""

    def __init__(self, outer):
        super().__init__()
        for name in ("lambda_q1", "lambda_k1", "lambda_q2", "lambda_k2", "lambda_init"):
            setattr(self, name, getattr(outer, name))

    def forward(self, q, k, v, lam, window, kept):
        (q1, q2), (k1, k2), (v1, v2) = ((t[:, :, 0::2], t[:, :, 1::2]) for t in (q, k, v))
        maps = [
            torch.cat([call_flash(q, k, v, window=window, kept=kept) for v in (v1, v2)], -1)
            for q, k in ((q1, k1), (q2, k2))
        ]
        return maps[0] - lam * maps[1]


class Phi(Base):
    def __init__(self, depth, window=(-1, -1)):
        super().__init__(8, 4, depth)
        self.out, self.window = nn.Linear(8 * D, C), window
        self.inner_cross_attn = Inner(self)

    def forward(self, x, mask=None):
        q, k, v = (t.transpose(1, 2) for t in self.project(x))
        kept = None if mask is None else mask.bool()
        return self.out(self.inner_cross_attn(q, k, v, self.lam(), self.window, kept).flatten(2))
