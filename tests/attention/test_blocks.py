"""Masks made of blocks: the same blocks as torch finds by looking at every query and key."""

import shutil

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from quantdiff.attention.backends import BACKENDS, visible
from quantdiff.attention.blocks import BLOCK, block_mask, causal_blocks

CPU = torch.device("cpu")
FULL = "full_kv_num_blocks", "full_kv_indices"
PARTIAL = "kv_num_blocks", "kv_indices"


def padded(batch, keys, seed):
    """Some tokens at either side, or in the middle, are padding; some sequences have none."""
    dice = torch.Generator().manual_seed(seed)
    kept = torch.ones(batch, keys, dtype=torch.bool)
    for row in kept[1:]:
        first, last = sorted(torch.randint(keys, (2,), generator=dice).tolist())
        row[first:last] = False
    return kept


def rule(rows, kept):
    past = kept.shape[1] - rows

    def rule(b, h, n, m):
        return ((m <= n + past) & kept[b, m] & kept[b, n + past]) | (m == n + past)

    return rule


def listed(mask, names):
    """The listed blocks of every row of blocks."""
    count, order = (getattr(mask, name) for name in names)
    return [
        [set(order[b, 0, r, :n].tolist()) for r, n in enumerate(of_one[0].tolist())]
        for b, of_one in enumerate(count)
    ]


@settings(deadline=None, max_examples=40)
@given(
    rows=st.integers(1, 3 * BLOCK + 5), past=st.integers(0, 2 * BLOCK + 5),
    batch=st.integers(1, 3), seed=st.integers(0, 1000),
)  # fmt: skip
def test_blocks_are_those_that_torch_finds(rows, past, batch, seed):
    kept = padded(batch, rows + past, seed)
    mask_mod = rule(rows, kept)
    shape = rows, rows + past
    found = block_mask(*causal_blocks(*shape, kept, CPU), shape, mask_mod)
    expected = create_block_mask(mask_mod, batch, None, *shape, device="cpu", BLOCK_SIZE=BLOCK)
    assert found.seq_lengths == expected.seq_lengths
    whole, of_torch = listed(found, FULL), listed(expected, FULL)
    if bool(kept.all()):
        assert whole == of_torch
    for mine, theirs in zip(whole, of_torch, strict=True):
        assert all(a <= b for a, b in zip(mine, theirs, strict=True))
    # Blocks that hold nothing but padding may be listed: the rule decides there.
    seen, by_torch = found.to_dense() > 0, expected.to_dense() > 0
    assert bool((seen >= by_torch).all())
    if bool(kept.all()):
        assert torch.equal(seen, by_torch.expand_as(seen))


def test_without_padding_one_mask_serves_all_sequences():
    kept = torch.ones(1, 300, dtype=torch.bool)
    for rows in (1, 128, 200, 300):
        shape = rows, 300
        plain = block_mask(*causal_blocks(*shape, None, CPU), shape, rule(rows, kept))
        same = block_mask(*causal_blocks(*shape, kept, CPU), shape, rule(rows, kept))
        assert [listed(plain, names) for names in (FULL, PARTIAL)] == [
            listed(same, names) for names in (FULL, PARTIAL)
        ]


@pytest.mark.skipif(shutil.which("g++") is None, reason="compiles with g++")
@pytest.mark.parametrize("past", [0, 70])
def test_compiled_attention_reads_the_blocks(past, monkeypatch):
    """Eager flex attention does not: it looks at the rule alone."""
    rows, width = 300, 32
    kept = padded(2, rows + past, 3)
    torch.manual_seed(0)
    query, key, value = (torch.randn(2, 2, n, width) for n in (rows, rows + past, rows + past))
    monkeypatch.setattr(
        "torch.nn.attention.flex_attention.flex_attention", torch.compile(flex_attention)
    )
    with torch.no_grad(), torch.compiler.set_stance("default"):
        found = BACKENDS["flex"](query, key, value, 0.25, kept)
    logits = (query.double() @ key.double().mT) * 0.25  # (B, H, N, M)
    seen = visible(rows, rows + past, kept)  # (B, 1, N, M)
    real = seen.any(-1, keepdim=True)
    expected = logits.masked_fill(~seen, -torch.inf).softmax(-1) @ value.double()
    torch.testing.assert_close(
        found.double()[real.expand_as(found)], expected[real.expand_as(expected)],
        rtol=1e-5, atol=1e-6,
    )  # fmt: skip
