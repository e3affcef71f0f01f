"""Attention head by head, in loops: nothing of quantdiff has a part in it."""

import math

import torch

from quantdiff.attention import rotary_table


def rotated(x, positions, arrangement):
    """(N, d) with its channel pairs turned, pair by pair."""
    width = x.shape[-1]
    out = torch.empty_like(x)
    for i in range(width // 2):
        a, b = (2 * i, 2 * i + 1) if arrangement == "interleaved" else (i, i + width // 2)
        angle = positions.double() * 10000.0 ** (-2 * i / width)
        cos, sin = angle.cos().float().to(x.dtype), angle.sin().float().to(x.dtype)
        out[:, a] = x[:, a] * cos - x[:, b] * sin
        out[:, b] = x[:, a] * sin + x[:, b] * cos
    return out


def one_map(q, k, seen):
    """Softmax map of one head, (N, M); a row that sees nothing is zeros."""
    logits = (q @ k.T) / math.sqrt(q.shape[-1])
    logits = logits.masked_fill(~seen, -math.inf)
    return logits.softmax(-1).nan_to_num(0.0)


def projected(module, x, positions):
    """q, k (rotated) and v of one sequence: lists of (N, d), one a head of the projection."""
    found = []
    for name in ("q_proj", "k_proj", "v_proj"):
        heads = (x @ getattr(module, name).weight.T).split(module.head_dim, -1)
        if name != "v_proj":
            heads = [rotated(head, positions, module.rotary) for head in heads]
        found.append(list(heads))
    return found


def normed(x, weight):
    return x / (x.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * weight


def vector_lambda(module, dtype):
    first = torch.exp((module.lambda_q1 * module.lambda_k1).sum())
    second = torch.exp((module.lambda_q2 * module.lambda_k2).sum())
    return (first - second).to(dtype) + module.lambda_init


def standard(module, x, positions, seen):
    q, k, v = projected(module, x, positions)
    group = len(q) // len(k)
    outs = [one_map(q[j], k[j // group], seen) @ v[j // group] for j in range(len(q))]
    return torch.cat(outs, -1) @ module.out_proj.weight.T


def v1(module, x, positions, seen):
    """As the official flash code pairs heads, map by map."""
    q, k, v = projected(module, x, positions)
    heads, kv = len(q) // 2, len(k) // 2
    lam = vector_lambda(module, x.dtype)
    outs = []
    for i in range(heads):
        g = i // (heads // kv)
        weights = one_map(q[2 * i], k[2 * g], seen) - lam * one_map(
            q[2 * i + 1], k[2 * g + 1], seen
        )
        value = torch.cat([v[2 * g], v[2 * g + 1]], -1)
        outs.append(normed(weights @ value, module.subln.weight) * (1 - module.lambda_init))
    return torch.cat(outs, -1) @ module.out_proj.weight.T


def naive_v1(module, x, positions, seen):
    """As the official naive code pairs heads: the interleaved key heads are repeated one by one."""
    q, k, v = projected(module, x, positions)
    heads, kv = len(q) // 2, len(k) // 2
    group = heads // kv
    lam = vector_lambda(module, x.dtype)
    outs = []
    for i in range(heads):
        first = one_map(q[2 * i], k[2 * i // group], seen)
        second = one_map(q[2 * i + 1], k[(2 * i + 1) // group], seen)
        g = i // group
        value = torch.cat([v[2 * g], v[2 * g + 1]], -1)
        out = (first - lam * second) @ value
        outs.append(normed(out, module.subln.weight) * (1 - module.lambda_init))
    return torch.cat(outs, -1) @ module.out_proj.weight.T


def v2(module, x, positions, seen, first=None, second=None):
    """`first` and `second` may name other heads than 0, 2, … and 1, 3, … as maps 1 and 2."""
    q, k, v = projected(module, x, positions)
    group = len(q) // len(k)
    outs = [one_map(q[j], k[j // group], seen) @ v[j // group] for j in range(len(q))]
    first = range(0, len(q), 2) if first is None else first
    second = range(1, len(q), 2) if second is None else second
    lam = torch.sigmoid(x @ module.lambda_proj.weight.T)  # (N, h)
    left = [
        outs[a] - lam[:, i, None] * outs[b]
        for i, (a, b) in enumerate(zip(first, second, strict=True))
    ]
    return torch.cat(left, -1) @ module.o_proj.weight.T


def grouped(module, x, positions, seen):
    q, k, v = projected(module, x, positions)
    kv = len(k) // 2
    size = module.heads.layout.ratio + 1
    groups = len(q) // size
    lam = vector_lambda(module, x.dtype)
    outs = []
    for n in range(groups):
        g = n * kv // groups
        value = torch.cat([v[2 * g], v[2 * g + 1]], -1)
        noise = one_map(q[n * size + size - 1], k[2 * g + 1], seen)
        for s in range(size - 1):
            weights = one_map(q[n * size + s], k[2 * g], seen) - lam * noise
            outs.append(normed(weights @ value, module.subln.weight) * (1 - module.lambda_init))
    return torch.cat(outs, -1) @ module.o_proj.weight.T


def run(form, module, x, attention_mask=None):
    """A whole batch (B, N, C), sequence by sequence, positions counted from the first column."""
    outs = []
    positions = torch.arange(x.shape[1])
    causal = positions[None, :] <= positions[:, None]
    for b, sequence in enumerate(x):
        seen = causal
        if attention_mask is not None:
            real = attention_mask[b].bool()
            seen = causal & real[None, :] & real[:, None]
        outs.append(form(module, sequence, positions, seen))
    return torch.stack(outs)


def table(length, module, first=0):
    """rel_pos of the tokens from `first` on."""
    cos, sin = rotary_table(torch.arange(first, length), module.head_dim)
    return cos, sin
