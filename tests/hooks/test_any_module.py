"""Models outside of transformers, through torch's scaled_dot_product_attention."""

import copy
import re

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from quantdiff import RecordingError, Scheme, UsageError, fake_quantize, record
from tests import reference

D, H = 16, 4


class Attention(nn.Module):
    """As nanoGPT has it: one projection for q, k and v."""

    def __init__(self, kv_heads=H, **options):
        super().__init__()
        self.kv_heads = kv_heads
        self.qkv = nn.Linear(D, D + 2 * D // H * kv_heads)
        self.out = nn.Linear(D, D)
        self.options = options
        self.seen = []

    def forward(self, x, **options):
        b, n, _ = x.shape
        width = D // H
        q, k, v = self.qkv(x).split([D, width * self.kv_heads, width * self.kv_heads], 2)
        q = q.view(b, n, H, width).transpose(1, 2)
        k, v = (t.view(b, n, self.kv_heads, width).transpose(1, 2) for t in (k, v))
        self.seen.append((q.detach(), k.detach()))
        y = F.scaled_dot_product_attention(q, k, v, **{**self.options, **options})
        return self.out(y.transpose(1, 2).reshape(b, n, D))


class Block(nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.attention = Attention(**options)
        self.mlp = nn.Sequential(nn.Linear(D, 2 * D), nn.GELU(), nn.Linear(2 * D, D))

    def forward(self, x, **options):
        x = x + self.attention(x, **options)
        return x + self.mlp(x)


class NanoGPT(nn.Module):
    def __init__(self, layers=3, **options):
        super().__init__()
        self.embedding = nn.Embedding(50, D)
        self.blocks = nn.ModuleList(Block(**options) for _ in range(layers))
        self.head = nn.Linear(D, 50)

    def forward(self, ids, **options):
        x = self.embedding(ids) * 3
        for block in self.blocks:
            x = block(x, **options)
        return self.head(x)


class VisionTransformer(nn.Module):
    """Patches, a class token, blocks in nn.Sequential, no mask."""

    def __init__(self):
        super().__init__()
        self.patches = nn.Conv2d(3, D, 4, 4)
        self.token = nn.Parameter(torch.randn(1, 1, D))
        self.blocks = nn.Sequential(*(Block() for _ in range(2)))
        self.head = nn.Linear(D, 10)

    def forward(self, images):
        x = self.patches(images).flatten(2).transpose(1, 2) * 3
        x = torch.cat([self.token.expand(len(x), -1, -1), x], 1)
        return self.head(self.blocks(x)[:, 0])


def make(kind, *args, **options):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return kind(*args, **options).eval()


def check(recorder, model, seen, kv=None):
    """Every site against the materialised product of the q and k that its module made."""
    profile = recorder.profile()
    assert [site.layer for site in profile.attention_logits.sites] == list(range(len(model.blocks)))
    for site, block in zip(profile.attention_logits.sites, model.blocks, strict=True):
        assert site.name.endswith("attention")
        q, k = block.attention.seen[-1]
        x = reference.logits(q, k, q.shape[-1] ** -0.5)
        expected = reference.statistics(x.transpose(0, 1), seen.expand(x.shape).transpose(0, 1))
        assert (site.count == expected["count"]).all()
        assert np.allclose(site.min, expected["min"], rtol=1e-4, atol=1e-6)
        assert np.allclose(site.max, expected["max"], rtol=1e-4, atol=1e-6)
        assert np.allclose(site.moments.std, expected["std"], rtol=1e-4)
    return profile


IDS = torch.randint(0, 50, (2, 11), generator=torch.Generator().manual_seed(1))
CAUSAL = torch.ones(11, 11, dtype=torch.bool).tril()
RANDOM = torch.rand(2, 1, 11, 11, generator=torch.Generator().manual_seed(2)) < 0.5
RANDOM[:, :, :, 0] = True
MASKS = {
    "is_causal": ({"is_causal": True}, CAUSAL),
    "everything": ({}, torch.ones(1, 1, dtype=torch.bool)),
    "boolean": ({"attn_mask": RANDOM}, RANDOM),
    "two-dimensional": ({"attn_mask": CAUSAL}, CAUSAL),
    "additive": ({"attn_mask": torch.zeros(2, 1, 11, 11).masked_fill(~RANDOM, -torch.inf)}, RANDOM),
    "scale": ({"is_causal": True, "scale": D**-0.5 * 2}, CAUSAL),
}


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("training", [False, True])
def test_a_nanogpt(name, training):
    options, seen = MASKS[name]
    model = make(NanoGPT, **options)
    model.train(training)
    plain = model(IDS)
    with record(model) as recorder:
        recorded = model(IDS)
    assert torch.equal(plain, recorded)
    profile = check(recorder, model, seen)
    assert profile.data["tokens"] == IDS.numel()
    assert [site.name for site in profile.hidden_states.sites] == [
        "blocks.0",
        "blocks.1",
        "blocks.2",
    ]


def test_biases_are_part_of_the_logits():
    bias = torch.randn(1, H, 11, 11, generator=torch.Generator().manual_seed(3))
    model = make(NanoGPT, layers=1, attn_mask=bias)
    with torch.no_grad(), record(model) as recorder:
        model(IDS)
    q, k = model.blocks[0].attention.seen[-1]
    x = reference.logits(q, k, q.shape[-1] ** -0.5) + bias
    site = recorder.profile().attention_logits.sites[0]
    assert np.allclose(site.max, x.amax((0, 2, 3)), rtol=1e-5)
    assert np.allclose(site.moments.mean, x.mean((0, 2, 3)), atol=1e-6)


@pytest.mark.parametrize("fill", [-1e9, -65504.0, -1e4])
def test_a_fill_that_is_added_is_no_bias(fill):
    model = make(NanoGPT, attn_mask=torch.zeros(11, 11).masked_fill(~CAUSAL, fill))
    contexts = record(model), fake_quantize(model, Scheme("attention_logits", 8))
    words = r"of blocks\.0\.attention .* filled with " + re.escape(f"{fill:g},")
    for context in contexts:
        with torch.no_grad(), context, pytest.raises(RecordingError, match=words):
            model(IDS)


def test_grouped_queries():
    model = make(NanoGPT, kv_heads=2, is_causal=True, enable_gqa=True)
    with torch.no_grad(), record(model) as recorder:
        model(IDS)
    check(recorder, model, CAUSAL)


def test_dropout_in_training_leaves_the_logits():
    model = make(NanoGPT, is_causal=True, dropout_p=0.5).train()
    with record(model) as recorder:
        model(IDS).sum().backward()
    check(recorder, model, CAUSAL)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_mask_that_is_filled_anew_for_each_layer(mode):
    def fill(given, mask):
        given.copy_(mask)

    model = make(NanoGPT)
    seen = [CAUSAL, CAUSAL.T, torch.eye(11, dtype=torch.bool)]
    for block, mask in zip(model.blocks, seen, strict=True):
        block.register_forward_pre_hook(
            lambda block, args, kwargs, mask=mask: fill(kwargs["attn_mask"], mask),
            with_kwargs=True,
        )
    with mode(), record(model) as recorder:
        model(IDS, attn_mask=torch.zeros(1, 1, 11, 11, dtype=torch.bool))
    for site, mask in zip(recorder.profile().attention_logits.sites, seen, strict=True):
        assert site.count.tolist() == [2 * int(mask.sum())] * H


class Padded(NanoGPT):
    """Makes its mask of an argument of its own."""

    def forward(self, ids, pad_mask):
        return super().forward(ids, attn_mask=pad_mask[:, None, None, :] & CAUSAL)


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_that_a_model_tells_its_attention_alone(side):
    model, real = make(Padded), torch.ones(2, 11, dtype=torch.bool)
    real[1, :4] = False
    real = real if side == "left" else real.flip(1)
    with torch.no_grad(), record(model) as recorder:
        model(IDS, real)
    seen = CAUSAL & real[:, None, None, :] & real[:, None, :, None]
    profile = check(recorder, model, seen)
    assert profile.data["tokens"] == 18
    assert profile.data["sequence_length"] == 11
    assert profile.hidden_states.count == 3 * 18 * D


def test_padding_that_is_told_after_something_was_counted_is_refused():
    model, real = make(Padded), torch.ones(2, 11, dtype=torch.bool)
    real[1, 7:] = False
    with torch.no_grad(), record(model, sites=("linear_inputs",)) as recorder:
        model(IDS, torch.ones_like(real))
        with pytest.raises(RecordingError, match="ran before the first attention that reads it"):
            model(IDS, real)
    assert recorder.profile().partial


def test_a_vision_transformer():
    model = make(VisionTransformer)
    images = torch.randn(3, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        plain = model(images)
        with record(model) as recorder:
            recorded = model(images)
    assert torch.equal(plain, recorded)
    profile = check(recorder, model, torch.ones(1, 1, dtype=torch.bool))
    assert profile.data["tokens"] == 3 * 17
    item = profile.attention_logits.top(1)[0]
    q, k = model.blocks[item.layer].attention.seen[-1]
    value = reference.logits(q, k, q.shape[-1] ** -0.5)
    place = item.sequence, item.head, item.query, item.key
    assert abs(value[place]) == pytest.approx(item.value, rel=1e-5)


class Crossing(nn.Module):
    """A block that attends to itself and to something else."""

    def __init__(self):
        super().__init__()
        self.inner = Attention(is_causal=True)
        self.q, self.kv = nn.Linear(D, D), nn.Linear(D, 2 * D)

    def forward(self, x, other):
        x = x + self.inner(x)
        q, (k, v) = self.q(x), self.kv(other).chunk(2, -1)
        q, k, v = (t.unflatten(-1, (H, -1)).transpose(1, 2) for t in (q, k, v))
        return x + F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


class CrossModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Crossing()])

    def forward(self, x, other):
        return self.blocks[0](x, other)


def test_cross_attention_is_named_as_such():
    model = make(CrossModel)
    with torch.no_grad(), record(model) as recorder:
        model(torch.randn(2, 7, D), torch.randn(2, 4, D))
    sites = recorder.profile().attention_logits.sites
    assert [site.name for site in sites] == ["blocks.0.inner", "blocks.0 (cross-attention)"]
    assert sites[1].count.tolist() == [2 * 7 * 4] * H


@pytest.mark.parametrize("compiled", [True, False])
def test_keys_that_all_sequences_share(compiled):
    model = make(CrossModel)
    x, other = torch.randn(3, 7, D), torch.randn(1, 4, D)
    profiles = []
    for given in (other, other.expand(3, -1, -1)):
        with torch.no_grad(), record(model, maps=True, compiled=compiled) as recorder:
            model(x, given)
        profiles.append(recorder.profile())
    one, each = (profile.attention_logits for profile in profiles)
    assert one.sites[1].count.tolist() == [3 * 7 * 4] * H
    assert one.absmax == pytest.approx(each.absmax, rel=1e-6)
    assert [item.key for item in one.top(20)] == [item.key for item in each.top(20)]
    entropy = [profile.maps[1].summary["entropy"] for profile in profiles]
    assert entropy[0] == pytest.approx(entropy[1], rel=1e-6)


class Routed(Block):
    """A block with more experts than the model has layers."""

    def __init__(self, **options):
        super().__init__(**options)
        self.experts = nn.ModuleList(nn.Linear(D, 8 * D) for _ in range(4))

    def forward(self, x, **options):
        x = super().forward(x, **options)
        return x + sum(expert(x).unflatten(-1, (8, D)).mean(-2) for expert in self.experts)


def test_experts_are_not_taken_for_the_layers():
    model = make(NanoGPT, layers=0)
    model.blocks = nn.ModuleList(make(Routed, is_causal=True) for _ in range(2))
    with torch.no_grad(), record(model) as recorder:
        model(IDS)
    profile = check(recorder, model, CAUSAL)
    assert [site.name for site in profile.hidden_states.sites] == ["blocks.0", "blocks.1"]


class Mixing(NanoGPT):
    """Most of its blocks do not attend, and stand in a list beside those that do."""

    def __init__(self, **options):
        super().__init__(**options)
        pair = [(D, 32 * D), (32 * D, D)]
        self.mixers = nn.ModuleList(
            nn.Sequential(*(nn.Linear(*sizes) for sizes in pair)) for _ in range(6)
        )

    def forward(self, ids, **options):
        x = torch.ones(*ids.shape, D)
        for mixer in self.mixers:
            x = mixer(x)
        return super().forward(ids, **options) + x.mean()


def test_blocks_that_do_not_attend_are_not_dropped_in_silence():
    model = make(Mixing, is_causal=True)
    with torch.no_grad(), record(model), pytest.raises(RecordingError, match="outside"):
        model(IDS)
    names = [f"mixers.{i}" for i in range(6)] + [f"blocks.{i}" for i in range(3)]
    with torch.no_grad(), record(model, layers=names) as recorder:
        model(IDS)
    assert [site.name for site in recorder.profile().hidden_states.sites] == names


def test_layers_that_the_user_names():
    model = make(NanoGPT, is_causal=True)
    with torch.no_grad(), record(model, layers=["blocks.0", "blocks.1", "blocks.2"]) as recorder:
        model(IDS)
    check(recorder, model, CAUSAL)
    with pytest.raises(UsageError, match=r"no module 'blocks\.7'"):
        record(model, layers=["blocks.7"])
    with record(model, layers=["blocks.1"]), pytest.raises(RecordingError, match="attends outside"):
        model(IDS)


def test_a_model_that_never_attends_is_refused():
    model = nn.Sequential(nn.Linear(D, D))
    with pytest.raises(RecordingError, match="no attention was seen"), record(model):
        model(torch.randn(1, 3, D))


def test_nothing_is_left_on_the_model():
    model = make(NanoGPT, is_causal=True)

    def state():
        return {
            name: (sorted(vars(m)), len(m._forward_hooks), len(m._forward_pre_hooks))
            for name, m in model.named_modules()
        }

    before = state()
    for error in (ValueError, KeyboardInterrupt):

        def fail(*_, error=error):
            raise error

        handle = model.blocks[1].mlp.register_forward_hook(fail)
        with pytest.raises(error), record(model):
            model(IDS)
        handle.remove()
        assert state() == before
        assert not torch.overrides._get_current_function_mode_stack()


def test_a_model_cannot_be_copied_while_it_is_recorded():
    model = make(NanoGPT, is_causal=True)
    with record(model), pytest.raises(RecordingError, match="cannot be copied"):
        copy.deepcopy(model)
    copy.deepcopy(model)(IDS)


class Pair(nn.Module):
    """Differential attention as four calls: two maps, two halves of V, views made anew."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(D, 2 * D) for _ in range(3))

    def forward(self, x):
        projected = (f(x).unflatten(-1, (2, H, -1)) for f in (self.q, self.k, self.v))
        q, k, v = (t.permute(2, 0, 3, 1, 4) for t in projected)
        a, b, c, d = (
            F.scaled_dot_product_attention(q[i], k[i], v[j], is_causal=True)
            for i, j in ((0, 0), (1, 0), (0, 1), (1, 1))
        )
        return x + (a - 0.5 * b + c - 0.5 * d).transpose(1, 2).flatten(2)


def test_a_pair_of_maps_counts_each_logit_once():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList(Pair() for _ in range(2))

        def forward(self, x):
            for block in self.blocks:
                x = block(x)
            return x

    model = make(Model)
    for grad in (True, False):
        with torch.set_grad_enabled(grad), record(model) as recorder:
            model(torch.randn(2, 5, D))
        sites = recorder.profile().attention_logits.sites
        names = [f"blocks.{i}{second}" for i in range(2) for second in ("", " #1")]
        assert [site.name for site in sites] == names
        assert all((site.count == 2 * 15).all() for site in sites)


def test_keys_of_something_else_keep_their_own_numbers():
    model = make(CrossModel)
    with torch.no_grad(), record(model) as recorder:
        model(torch.randn(2, 7, D), torch.randn(2, 4, D))
    profile = recorder.profile()
    cross = profile.attention_logits.items(profile.attention_logits.sites[1])
    assert {item.key for item in cross} == {0, 1, 2, 3}
    assert {item.query for item in cross} == set(range(7))


class TestRefusals:
    def test_a_block_that_stands_twice(self):
        model = make(NanoGPT, is_causal=True)
        model.blocks = nn.ModuleList([model.blocks[0]] * 3)
        with pytest.raises(RecordingError, match="more than once"):
            record(model)

    def test_multihead_attention_of_torch(self):
        layers = (nn.TransformerEncoderLayer(D, H, 32, batch_first=True) for _ in range(2))
        model = nn.Sequential(*layers)
        for mode in (model.train(), model.eval()):
            with pytest.raises(RecordingError, match="MultiheadAttention"), record(mode):
                mode(torch.randn(2, 5, D))

    @pytest.mark.parametrize(
        "keys", [(3, 4, 5, 8), (2, 5, 8)], ids=["another batch", "another dimension"]
    )
    def test_keys_that_do_not_go_with_the_queries(self, keys):
        class Odd(nn.Module):
            def forward(self, x):
                q = x[:, None, :, :8].repeat(1, 4, 1, 1)
                k = torch.zeros(keys)
                return x + F.scaled_dot_product_attention(q, k, k).mean() * 0

        model = nn.Sequential(Odd(), Odd())
        words = r"queries of shape \(1, 4, 5, 8\), keys of shape \("
        with pytest.raises(RecordingError, match=words), record(model):
            model(torch.randn(1, 5, D))

    def test_more_keys_than_queries_that_nobody_explains(self):
        model = make(CrossModel)
        with pytest.raises(RecordingError, match="3 queries to 9 keys"), record(model):
            model(torch.randn(2, 3, D), torch.randn(2, 9, D))


def test_the_blocks_inside_a_wrapper_are_found():
    model = make(NanoGPT, is_causal=True)
    with torch.no_grad(), record(nn.Sequential(model)) as recorder:
        model_output = recorder._model(IDS)
    assert model_output.shape == (2, 11, 50)
    names = [site.name for site in recorder.profile().hidden_states.sites]
    assert names == ["0.blocks.0", "0.blocks.1", "0.blocks.2"]
