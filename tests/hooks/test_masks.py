"""What each implementation's mask means, against masks written out."""

import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.attention.flex_attention import create_block_mask

from quantdiff import RecordingError
from quantdiff.hooks.dispatch import AttentionCall
from quantdiff.hooks.masks import read_mask, read_sdpa
from quantdiff.hooks.sdpa import SdpaCall


class Module(torch.nn.Module):
    is_causal = True


def call(implementation, mask, rows, keys, *, batch=2, heads=4, module=None, **options):
    q, k = torch.zeros(batch, heads, rows, 8), torch.zeros(batch, 2, keys, 8)
    return AttentionCall(module or Module(), implementation, q, k, k, mask, options)


def dense(call, visible):
    """What may be attended, (B, H, N, M)."""
    shape = (*call.query.shape[:3], call.key.shape[2])
    columns = torch.arange(shape[3])
    seen = (columns >= visible.start[:, None, :, None]) & (columns < visible.stop[:, None, :, None])
    extra = visible.mask_rows(0, shape[2])
    return (seen if extra is None else seen & extra).expand(shape)


def random_mask(rows, keys, batch=2, heads=1, share=0.6, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(batch, heads, rows, keys, generator=generator) < share


@given(
    rows=st.integers(1, 600), keys=st.integers(1, 40), heads=st.sampled_from([1, 4]),
    share=st.sampled_from([0.0, 0.5, 1.0]), seed=st.integers(0, 99), lowest=st.booleans(),
)  # fmt: skip
def test_any_additive_and_boolean_mask(rows, keys, heads, share, seed, lowest):
    mask = random_mask(rows, keys, heads=heads, share=share, seed=seed)
    fill = torch.finfo(torch.float32).min if lowest else -torch.inf
    added = torch.zeros(mask.shape).masked_fill(~mask, fill)
    expected = mask.expand(2, 4, rows, keys)
    for one in (call("eager", added, rows, keys), call("sdpa", mask, rows, keys)):
        visible, bias = read_mask(one)
        assert bias is None
        assert torch.equal(dense(one, visible), expected)


@pytest.mark.parametrize("implementation", ["eager", "sdpa", "flex_attention"])
def test_what_is_added_above_the_floor_is_a_bias(implementation):
    mask = random_mask(9, 9)
    slopes = -torch.rand(2, 1, 9, 9) * 50
    one = call(implementation, slopes.masked_fill(~mask, torch.finfo(torch.float32).min), 9, 9)
    visible, bias = read_mask(one)
    assert torch.equal(dense(one, visible), mask.expand(2, 4, 9, 9))
    assert torch.equal(bias(3, 7)[mask[:, :, 3:7]], slopes[:, :, 3:7][mask[:, :, 3:7]])


def test_sums_of_fills_are_masks_too():
    lowest = torch.finfo(torch.float16).min
    added = torch.full((1, 1, 4, 4), lowest, dtype=torch.float16)
    added[0, 0, 0, 0] = -torch.inf
    added[0, 0, :, 1] = 0
    one = call("eager", added, 4, 4, batch=1)
    visible, bias = read_mask(one)
    assert bias is None
    assert dense(one, visible)[0, 0].nonzero()[:, 1].tolist() == [1] * 4


LOWEST = torch.finfo(torch.float32).min
CAUSAL = torch.ones(6, 6, dtype=torch.bool).tril()
FILLS = {
    "causal": (1, 0, 0),
    "padding beside a mask": (torch.inf, 1, 0),
    "causal and padding": (1, 1, 0),
    "on a bias": (1, 0, 1),
}


def filled(fill, causal=1, padding=0, bias=0):
    """A fill at later keys and at the first one, so many times each, and a bias."""
    added = torch.zeros(1, 1, 6, 6).masked_fill(~CAUSAL, fill * causal) + random_bias() * bias
    added[..., 0] += fill * padding
    return added


def random_bias():
    return torch.randn(1, 1, 6, 6, generator=torch.Generator().manual_seed(0)) * 2


def alibi(slopes, rows, keys, lowest=LOWEST):
    """(1, H, N, M); the last query stands at the last key."""
    distance = torch.arange(keys) - torch.arange(keys - rows, keys)[:, None]
    bias = torch.tensor(slopes)[:, None, None] * distance
    return bias.masked_fill(distance > 0, lowest)[None]


class TestFills:
    """A constant that is as good as a mask is no bias, but a bias may be as low."""

    @pytest.mark.parametrize("kind", FILLS)
    @pytest.mark.parametrize("fill", [-1e9, -65504.0, -1e4, -1e3])
    @pytest.mark.parametrize("implementation", ["eager", "sdpa", "flex_attention"])
    def test_is_refused(self, implementation, fill, kind):
        one = call(implementation, filled(fill, *FILLS[kind]), 6, 6)
        value = r"-\d" if kind == "on a bias" else re.escape(f"{fill:g},")
        words = f"{implementation} attention of Module .* filled with {value}.* fill it with -inf"
        with pytest.raises(RecordingError, match=words):
            read_mask(one)

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
    def test_in_any_dtype(self, dtype):
        with pytest.raises(RecordingError, match=r"filled with -(9984|10000),"):
            read_mask(call("sdpa", filled(-1e4).to(dtype), 6, 6))

    @pytest.mark.parametrize("heads", [1, 4])
    @pytest.mark.parametrize("lowest", [LOWEST, -torch.inf, -3.0])
    @pytest.mark.parametrize(
        ("rows", "keys"),
        # Of slope 1/2, 2001 keys are the first of which one entry lies at -1000.
        [(2001, 2001), (1, 2001), (1, 2002), (40, 8400), (1, 9000)],
    )
    def test_a_ramp_is_a_bias(self, rows, keys, lowest, heads):
        added = alibi([0.5**i for i in range(1, heads + 1)], rows, keys, lowest)
        for implementation in ["eager", "sdpa", "flex_attention"][: 3 if heads == 1 else 2]:
            visible, bias = read_mask(call(implementation, added, rows, keys, batch=1))
            assert torch.equal(bias(0, 1), added[:, :, :1])
            assert int((visible.stop - visible.start)[0, -1]) == keys

    @pytest.mark.parametrize(
        ("causal", "padding"), [(-1e9, -1e4), (-1e4, -1e9), (-1e4, -1e4), (-3e9, -1e9)]
    )
    @pytest.mark.parametrize("slopes", [[], [0.5]])
    def test_fills_that_meet_one_another_and_a_ramp(self, causal, padding, slopes):
        later = torch.ones(64, 64, dtype=torch.bool).triu(1)
        added = torch.zeros(1, 1, 64, 64).masked_fill(later, causal)
        added[..., :5] += padding
        if slopes:
            added = added + alibi(slopes, 64, 64, 0.0)
        for implementation in ("eager", "sdpa"):
            with pytest.raises(RecordingError, match="filled with"):
                read_mask(call(implementation, added, 64, 64, batch=1))

    def test_a_mask_that_is_learned(self):
        mask = torch.zeros(1, 1, 6, 6, requires_grad=True)
        assert read_mask(call("sdpa", mask, 6, 6))[1] is not None
        with pytest.raises(RecordingError, match="filled with"):
            read_mask(call("sdpa", mask + filled(-1e9), 6, 6))


class TestNoMask:
    def test_eager_sees_everything(self):
        one = call("eager", None, 3, 5)
        assert dense(one, read_mask(one)[0]).all()

    def test_sdpa_counts_from_the_upper_left(self):
        one = call("sdpa", None, 3, 5)
        assert torch.equal(dense(one, read_mask(one)[0])[0, 0], torch.ones(3, 5).tril().bool())

    def test_sdpa_sees_everything_when_decoding_or_not_causal(self):
        for one in (call("sdpa", None, 1, 5), call("sdpa", None, 3, 5, is_causal=False)):
            assert dense(one, read_mask(one)[0]).all()

    @pytest.mark.parametrize("window", [None, 3])
    @pytest.mark.parametrize("kind", ["left", "right", "holes", "empty"])
    def test_flash_leaves_padding_out(self, kind, window):
        mask = torch.ones(2, 6, dtype=torch.long)
        mask[
            1, {"left": [0, 1], "right": [4, 5], "holes": [0, 3], "empty": list(range(6))}[kind]
        ] = 0
        one = call("flash_attention_2", mask, 6, 6, sliding_window=window)
        visible, _ = read_mask(one)
        place = torch.arange(6)
        seen = (place <= place[:, None]) & (place > place[:, None] - (window or 6))
        expected = (seen & mask.bool()[:, None, None]).expand(2, 4, 6, 6).clone()
        for b, told in enumerate(mask.bool()):
            # The kernel is given the real tokens alone, one behind the other.
            real = told.nonzero()[:, 0]
            rows = torch.zeros(len(real), 6, dtype=torch.bool)
            rows[:, real] = seen[: len(real), : len(real)]
            expected[b, :, real] = rows
        assert torch.equal(dense(one, visible), expected)
        # Padding at the ends is an interval, which a flash kernel can take too.
        assert (visible.mask is None) == (kind in ("left", "right"))

    def test_flash_counts_from_the_lower_right(self):
        one = call("flash_attention_2", None, 3, 5)
        expected = torch.ones(3, 5).tril(2).bool()
        assert torch.equal(dense(one, read_mask(one)[0])[0, 0], expected)


class TestFlash:
    @pytest.mark.parametrize("window", [1, 2, 4, 100])
    def test_a_window_holds_that_many_keys(self, window):
        one = call("flash_attention_3", None, 6, 6, sliding_window=window)
        expected = torch.ones(6, 6).tril().triu(1 - window).bool()
        assert torch.equal(dense(one, read_mask(one)[0])[0, 0], expected)

    def test_a_window_that_is_not_causal_has_two_sides(self):
        one = call("flash_attention_2", None, 6, 6, sliding_window=2, is_causal=False)
        expected = torch.ones(6, 6).tril(1).triu(-1).bool()
        assert torch.equal(dense(one, read_mask(one)[0])[0, 0], expected)

    def test_padding_and_the_unused_end_of_a_static_cache(self):
        mask = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]])
        one = call("flash_attention_2", mask, 2, 8)
        seen = dense(one, read_mask(one)[0])[:, 0]
        assert seen[0].int().tolist() == [[0, 0, 1, 1, 0, 0, 0, 0], [0, 0, 1, 1, 1, 0, 0, 0]]
        assert seen[1].int().tolist() == [[1, 1, 1, 1, 0, 0, 0, 0], [1, 1, 1, 1, 1, 0, 0, 0]]

    @pytest.mark.parametrize("causal", [True, False])
    def test_a_window_over_holes_counts_real_tokens(self, causal):
        mask = torch.tensor([[1, 1, 1, 0, 0, 1, 1, 0]])
        one = call(
            "flash_attention_2", mask, 3, 9, batch=1, sliding_window=3, is_causal=causal
        )  # the queries stand at 5, 6, 7; the last key is unused
        seen = dense(one, read_mask(one)[0])[0, 0].int()
        assert seen[0].tolist() == [0, 1, 1, 0, 0, 1, int(not causal), 0, 0]
        assert seen[1].tolist() == [0, 0, 1, 0, 0, 1, 1, 0, 0]

    def test_packed_sequences_are_refused(self):
        positions = torch.tensor([[0, 1, 2, 0, 1, 2]])
        one = call("flash_attention_2", None, 6, 6, batch=1, position_ids=positions)
        with pytest.raises(RecordingError, match="pack several sequences"):
            read_mask(one)
        read_mask(
            call("flash_attention_2", None, 6, 6, batch=1, position_ids=torch.arange(6)[None])
        )

    def test_other_masks_are_refused(self):
        with pytest.raises(RecordingError, match="4 dimensions"):
            read_mask(call("flash_attention_2", torch.ones(2, 1, 3, 3), 3, 3))


@pytest.mark.parametrize("heads", [None, 4])
def test_block_masks(heads):
    mask = random_mask(200, 200, heads=heads or 1)

    def rule(b, h, q, k):
        return mask[b, h if heads else 0, q, k]

    block = create_block_mask(rule, 2, heads, 200, 200, device="cpu")
    one = call("flex_attention", block, 200, 200)
    assert torch.equal(dense(one, read_mask(one)[0]), mask.expand(2, 4, 200, 200))


class TestBareSdpa:
    def read(self, rows, keys, **options):
        q, k = torch.zeros(2, 4, rows, 8), torch.zeros(2, 4, keys, 8)
        one = SdpaCall((q, k, k), options)
        visible, bias = read_sdpa(one, "attention")
        return dense(one, visible), bias

    @pytest.mark.parametrize("shape", [(5, 6), (1, 6), (2, 1, 5, 6), (2, 4, 5, 6), (1, 4, 5, 6)])
    def test_masks_of_every_shape_that_broadcasts(self, shape):
        mask = torch.rand(shape) < 0.5
        seen, bias = self.read(5, 6, attn_mask=mask)
        assert bias is None
        assert torch.equal(seen, mask.expand(2, 4, 5, 6))

    @pytest.mark.parametrize(("rows", "keys"), [(4, 4), (2, 5), (5, 2), (1, 3)])
    def test_the_causal_flag_counts_from_the_upper_left(self, rows, keys):
        seen, _ = self.read(rows, keys, is_causal=True)
        assert torch.equal(seen[0, 0], torch.ones(rows, keys).tril().bool())


class TestRefusals:
    def test_an_unknown_implementation(self):
        with pytest.raises(RecordingError, match="'strange'"):
            read_mask(call("strange", None, 3, 3))

    @pytest.mark.parametrize(
        "shape", [(3, 3), (2, 1, 3, 2), (2, 3, 3, 3), (5, 1, 3, 3), (2, 1, 2, 3)]
    )
    def test_a_mask_that_does_not_fit(self, shape):
        with pytest.raises(RecordingError, match="not known"):
            read_mask(call("eager", torch.zeros(shape), 3, 3))

    @pytest.mark.parametrize("implementation", ["eager", "flex_attention"])
    def test_a_boolean_mask_that_would_be_added(self, implementation):
        with pytest.raises(RecordingError, match="mask nothing"):
            read_mask(call(implementation, torch.ones(2, 1, 3, 3, dtype=torch.bool), 3, 3))
