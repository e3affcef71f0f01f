"""The reference mathematics against loops over heads, literals, and transformers' DiffLlama."""

import math

import pytest
import torch

from quantdiff.attention import LAYOUTS, DifferentialAttentionV1, layout
from quantdiff.attention.backends import visible
from quantdiff.attention.reference import (
    differential_attention,
    differential_maps,
    lambda_init,
    lambda_v1,
    lambda_v2,
    softmax_maps,
    sub_norm,
)
from quantdiff.attention.rotary import rotate
from tests.attention import plain
from tests.tiny import tiny_diffllama

CASES = (
    ("none", 8, 4), ("adjacent", 8, 4), ("halves", 8, 4), ("adjacent_shared", 8, 2),
    ("grouped:2", 12, 4),
)  # fmt: skip


def heads(count, length=9, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(2, count, length, 8, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize(("depth", "value"), [(0, 0.2), (1, 0.3555090676), (11, 0.7778701)])
def test_lambda_init(depth, value):
    assert lambda_init(depth) == pytest.approx(value, rel=1e-6)


def test_lambda_init_is_what_the_modules_and_diffllama_use():
    assert DifferentialAttentionV1(64, 3, 4).lambda_init == lambda_init(3)
    for depth, layer in enumerate(tiny_diffllama().model.layers):
        assert layer.self_attn.lambda_init == lambda_init(depth)


def test_lambda():
    a, b = torch.tensor([0.5, -1.0]), torch.tensor([2.0, 0.25])
    expected = math.exp(0.75) - math.exp(0.5 * 0.5 + 1.0) + 0.2
    assert float(lambda_v1(a, b, a, a, 0.2)) == pytest.approx(expected, rel=1e-6)
    assert float(lambda_v2(torch.tensor(0.0))) == 0.5


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize(("name", "count", "kv"), CASES)
def test_differential_attention(name, count, kv, padded):
    found = layout(name)
    q, k, v = heads(count), heads(kv, seed=1), heads(kv, seed=2)
    kept = torch.ones(2, 9, dtype=torch.bool)
    if padded:
        kept[1, :4] = False
    seen = visible(9, 9, kept)
    left = len(found.pairs(count)[0]) if found.differential else count
    lam = torch.rand(2, left, 9, 1, dtype=torch.float64) if found.differential else None
    result = differential_attention(q, k, v, scale=8**-0.5, seen=seen, layout=found, lam=lam)
    sources, values = found.key_heads(count, kv), found.value_heads(count, kv)
    for b in range(2):
        maps = [plain.one_map(q[b, h], k[b, sources[h]], seen[b, 0]) for h in range(count)]
        if not found.differential:
            expected = [maps[h] @ v[b, values[h][0]] for h in range(count)]
        else:
            expected = []
            for i, (first, second) in enumerate(zip(*found.pairs(count), strict=True)):
                wide = torch.cat([v[b, g] for g in values[first]], -1)
                expected.append((maps[first] - lam[b, i] * maps[second]) @ wide)
        torch.testing.assert_close(result[b], torch.stack(expected), rtol=0, atol=1e-12)


def test_rows_sum_to_one_minus_lambda():
    seen = visible(9, 9, None)
    maps = softmax_maps(heads(8), heads(2, seed=1), 0.3, seen, LAYOUTS["adjacent_shared"])
    lam = torch.rand(2, 4, 9, 1, dtype=torch.float64)
    total = differential_maps(maps, lam, LAYOUTS["adjacent_shared"]).sum(-1, keepdim=True)
    torch.testing.assert_close(total, 1 - lam)


def test_a_missing_lambda_is_named():
    q, kv = heads(8), heads(4)
    with pytest.raises(ValueError, match="lam is missing"):
        differential_attention(
            q, kv, kv, scale=1.0, seen=visible(9, 9, None), layout=LAYOUTS["halves"]
        )


def test_sub_norm():
    x, weight = torch.randn(5, 16, dtype=torch.float64), torch.rand(16, dtype=torch.float64)
    torch.testing.assert_close(sub_norm(x, weight), plain.normed(x, weight))
    torch.testing.assert_close(sub_norm(x, None).square().mean(-1), torch.ones(5).double(),
                               rtol=1e-3, atol=0)  # fmt: skip


@pytest.mark.parametrize("ratio", [1, 2])
def test_halves_is_what_diffllama_computes(ratio):
    model = tiny_diffllama(
        hidden_size=64, num_attention_heads=8, num_key_value_heads=8 // ratio, rms_norm_eps=1e-5
    ).double()
    model.set_attn_implementation("sdpa")
    attention = model.model.layers[1].self_attn
    x = torch.randn(2, 9, 64, dtype=torch.float64)
    cos, sin = plain.table(9, attention)
    q, k, v = (
        proj(x).view(2, 9, -1, 8).transpose(1, 2)
        for proj in (attention.q_proj, attention.k_proj, attention.v_proj)
    )
    q, k = (rotate(t, cos, sin, "half") for t in (q, k))
    names = ("lambda_q1", "lambda_k1", "lambda_q2", "lambda_k2")
    # DiffLlama's exponentials are fp32 whatever its dtype.
    lam = lambda_v1(*(getattr(attention, n).float() for n in names), attention.lambda_init)
    seen = visible(9, 9, None)
    with torch.no_grad():
        out = differential_attention(
            q, k, v, scale=8**-0.5, seen=seen, layout=LAYOUTS["halves"], lam=lam
        )
        out = sub_norm(out, None, 1e-5) * (1 - attention.lambda_init)
        out = attention.o_proj(out.transpose(1, 2).flatten(2))
        both = [torch.cat([t, t], -1)[None].double() for t in (cos, sin)]
        mask = torch.full((9, 9), -torch.inf, dtype=torch.float64).triu(1)[None, None]
        found, _ = attention(x, position_embeddings=both, attention_mask=mask)
    torch.testing.assert_close(found, out, rtol=0, atol=2e-6)


@pytest.mark.parametrize("arrangement", ["interleaved", "half"])
def test_rotary_rounds_once(arrangement):
    x = heads(2).float()
    cos, sin = (torch.rand(9, 4) for _ in range(2))
    for dtype in (torch.bfloat16, torch.float16):
        narrow = x.to(dtype)
        exact = rotate(narrow.float(), cos, sin, arrangement).to(dtype)
        assert torch.equal(rotate(narrow, cos, sin, arrangement), exact)
