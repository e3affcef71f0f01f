"""Differential models by their families, on stand-ins of the same structure."""

import types
import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.functional import scaled_dot_product_attention as sdpa

from quantdiff import RecordingError, UsageError, record
from quantdiff.attention import DifferentialAttentionV1, layout
from quantdiff.errors import UnknownLayoutWarning
from tests import reference
from tests.standins import (
    CAUSAL,
    IDS,
    TIMM,
    Base,
    C,
    D,
    DiffAttention,
    Grouped,
    MotifAttention,
    Phi,
    call_flash,
    flash_attn,
    make,
)
from tests.tiny import tiny_diffllama, tiny_llama


def check(profile, model, name, seen=CAUSAL, padding=0):
    """Every head against the product of the queries and keys that its module made, once each.

    `padding` tokens stand before the second sequence.
    """
    logits = profile.attention_logits
    blocks = [(i, block) for i, block in enumerate(model.blocks) if block.attn is not None]
    assert [site.layer for site in logits.sites] == [i for i, _ in blocks]
    assert profile.model["layout"] == name
    for site, (_, block) in zip(logits.sites, blocks, strict=True):
        q, k = block.attn.seen
        heads, kv_heads = q.shape[1], k.shape[1]
        k = k[:, layout(name).key_heads(heads, kv_heads)]
        x = reference.logits(q, k, D**-0.5)
        shown = seen.expand(x.shape)
        expected = reference.statistics(x.transpose(0, 1), shown.transpose(0, 1))
        assert site.count.tolist() == expected["count"].tolist()
        for mine, theirs in ((site.min, "min"), (site.max, "max"), (site.moments.mean, "mean")):
            wanted = torch.as_tensor(expected[theirs])
            torch.testing.assert_close(
                torch.as_tensor(mine, dtype=torch.float64), wanted, rtol=1e-4, atol=1e-5
            )
        assert logits.branches[site.name] == layout(name).branches(heads)
        assert (site.histogram.count == site.count).all()
        largest = max(logits.items(site), key=lambda item: item.value)
        shift = padding * largest.sequence  # places are counted among the real tokens
        found = x[largest.sequence, largest.head, largest.query + shift, largest.key + shift]
        assert abs(found.item()) == pytest.approx(largest.value, rel=1e-4)
        assert largest.value == pytest.approx(abs(x[shown]).max().item(), rel=1e-4)
    for layer, block in blocks:
        told = profile.model["lambda"][layer]
        assert told == pytest.approx(block.attn.lam().item(), rel=1e-5)


def recorded(model, *args, **options):
    ids = options.pop("ids", IDS)
    with torch.no_grad():
        before = model(ids, *args)
        with record(model, **options) as recorder:
            during = model(ids, *args)
    assert torch.equal(before, during)
    return recorder.profile()


def test_timm():
    model = make(DiffAttention)
    check(recorded(model), model, "adjacent", torch.ones(11, 11, dtype=torch.bool))
    model = make(lambda i: DiffAttention(i, is_causal=True))
    check(recorded(model), model, "adjacent")


def test_timm_with_two_scalars_for_lambda():
    model = make(DiffAttention)
    for block in model.blocks:
        for name in ("lambda_q1", "lambda_k1", "lambda_q2", "lambda_k2"):
            setattr(block.attn, name, None)
        block.attn.lambda_a = nn.Parameter(torch.tensor(0.3))
        block.attn.lambda_b = nn.Parameter(torch.tensor(-0.2))
        a = block.attn
        a.lam = lambda a=a: a.lambda_a.exp() - a.lambda_b.exp() + a.lambda_init
    check(recorded(model), model, "adjacent", torch.ones(11, 11, dtype=torch.bool))


@pytest.mark.parametrize("masked", [False, True])
def test_motif(masked):
    model = make(MotifAttention, model_type="Motif")
    mask = CAUSAL[None, None].repeat(2, 1, 1, 1)
    if masked:
        mask[1, :, :, :4] = False
        mask[1, :, :4] = False
        mask[1, :, range(4), range(4)] = True  # as transformers fills rows of padding
    real = torch.ones(2, 11, dtype=torch.long)
    real[1, :4] = 0 if masked else 1
    profile = recorded(model, real, mask) if masked else recorded(model)
    seen = mask.clone()
    seen[1, :, :4] &= not masked
    check(profile, model, "adjacent", seen, padding=4 * masked)


@pytest.mark.parametrize("repeated", [False, True])
@pytest.mark.parametrize("ratio", [1, 2, 4])
def test_motif_grouped(ratio, repeated):
    heads = 2 * (ratio + 1)
    config = {"model_type": "Motif", "num_noise_heads": 2, "num_attention_heads": heads}
    model = make(lambda i: Grouped(i, ratio, repeated), **config)
    check(recorded(model), model, f"grouped:{ratio}")


@pytest.mark.parametrize("window", [(-1, -1), (3, 0)])
@pytest.mark.parametrize("padded", ["no", "left", "right"])
def test_phi_4_flash(padded, window):
    calls = []
    model = make(lambda i: Phi(i, window) if i % 2 else None, layers=4, model_type="phi4flash")
    mask = torch.ones(2, 11, dtype=torch.long)
    mask[1, : 4 * (padded == "left")] = 0
    mask[1, 11 - 4 * (padded == "right") :] = 0
    with flash_attn(calls):
        profile = recorded(model, mask)
    assert set(calls) == {"dense" if padded == "no" else "packed"}
    seen = CAUSAL.triu(-3) if window[0] == 3 else CAUSAL
    real = mask.bool()
    seen = seen & real[:, None, None] & real[:, None, :, None]
    check(profile, model, "adjacent", seen, padding=4 * (padded == "left"))


def test_alibi_in_flash_attn_is_refused():
    class Attention(Base):
        def forward(self, x, mask=None):
            q, k, v = (t.transpose(1, 2) for t in self.project(x))
            return x + call_flash(q, k, v, alibi=torch.ones(6)).flatten(2)

    model = make(lambda i: Attention(6, 6))
    with flash_attn([]), pytest.raises(RecordingError, match="alibi_slopes"), record(model):
        model(IDS)


def test_packing_that_the_pass_does_not_know_is_refused():
    class Attention(Base):
        def forward(self, x, mask=None):
            q, k, v = (t.transpose(1, 2) for t in self.project(x))
            kept = torch.ones(2, 11, dtype=torch.bool)
            kept[0, 5:] = False
            return x + call_flash(q, k, v, kept=kept).flatten(2)

    model = make(lambda i: Attention(6, 6))
    with flash_attn([]), pytest.raises(RecordingError, match="packed sequences"), record(model):
        model(IDS)


class MultiheadFlashDiffV2(Base):
    """As the official V2 module: one call, λ from a projection; by a flag the baseline."""

    def __init__(self, use_diff_v2):
        super().__init__(8, 2)
        self.use_diff_v2 = use_diff_v2
        self.lambda_proj = nn.Linear(C, 4, bias=False) if use_diff_v2 else None
        self.out = nn.Linear((4 if use_diff_v2 else 8) * D, C)
        del self.lambda_init

    def forward(self, x, mask=None):
        q, k, v = (t.transpose(1, 2) for t in self.project(x))
        out = call_flash(q, k, v)
        if self.use_diff_v2:
            out = out[:, :, 0::2] - self.lambda_proj(x).sigmoid()[..., None] * out[:, :, 1::2]
        return self.out(out.flatten(2))


@pytest.mark.parametrize("flag", [True, False])
def test_the_official_v2_module(flag):
    model = make(lambda i: MultiheadFlashDiffV2(flag))
    with flash_attn([]), warnings.catch_warnings():
        warnings.simplefilter("error")
        profile = recorded(model, maps=True)
    assert profile.model["layout"] == ("adjacent_shared" if flag else "none")
    branches = profile.attention_logits.branches["blocks.1.attn"]
    assert branches == ([1, 2] * 4 if flag else [None] * 8)
    assert profile.attention_logits.count == 2 * 2 * 8 * 66
    for site, block in zip(profile.attention_logits.sites, model.blocks, strict=True):
        x = reference.logits(*block.attn.seen, D**-0.5)[:, :, CAUSAL]  # (B, H, n)
        assert torch.allclose(torch.from_numpy(site.max).double(), x.amax((0, 2)), rtol=1e-5)
        assert torch.allclose(torch.from_numpy(site.min).double(), x.amin((0, 2)), rtol=1e-5)
    if flag:
        assert [site.groups for site in profile.lambdas] == [4, 4]
        assert [site.kind for site in profile.maps] == ["branch 1", "branch 2", "difference"] * 2
    else:
        assert not profile.lambdas


# What calls itself differential and is not known


class DifferentialHeads(MotifAttention):
    """A name that promises something."""


def test_an_unknown_kind_is_recorded_as_plain_heads_with_a_warning():
    model = make(DifferentialHeads)
    with pytest.warns(UnknownLayoutWarning, match=r"blocks\.0\.attn \(DifferentialHeads\)"):
        profile = recorded(model)
    assert profile.model["layout"] == "none"
    assert {item.branch for item in profile.attention_logits.top(100)} == {None}
    # Two calls with other queries and keys: two sites, each logit once.
    assert profile.attention_logits.count == 2 * 2 * 8 * 66
    check(recorded(model, layout="adjacent"), model, "adjacent")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert recorded(model, layout="none").model["layout"] == "none"


def test_no_warning_without_a_reason():
    class DiffusionAttention(Base):
        def forward(self, x, mask=None):
            q, k, v = self.project(x)
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            return out.transpose(1, 2).flatten(2)

    model = make(lambda i: DiffusionAttention(6, 6))
    for block in model.blocks:
        for name in ("lambda_q1", "lambda_k1", "lambda_q2", "lambda_k2"):
            setattr(block.attn, name, None)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert recorded(model).model["layout"] == "none"


def test_heads_that_do_not_fit_are_plain_with_a_warning():
    config = {"model_type": "Motif", "num_noise_heads": 2, "num_attention_heads": 8}
    model = make(lambda i: Grouped(i, 2), **config)  # four signal heads, no groups of three
    with pytest.warns(UnknownLayoutWarning, match=r"does not fit the head layout grouped:3"):
        profile = recorded(model)
    assert profile.model["layout"] == "none"
    assert profile.attention_logits.count == 2 * 2 * 6 * 66


def test_a_map_that_is_missing_is_refused():
    class DiffAttention(Base):
        __module__ = TIMM

        def forward(self, x, mask=None):
            q, k, v = self.project(x)
            return x + F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)

    model = make(lambda i: DiffAttention(6, 6))
    with pytest.raises(RecordingError, match="1 attention calls for map 1 and 0 for map 2"):
        recorded(model)
    assert recorded(model, layout="none").attention_logits.count == 2 * 2 * 6 * 121


def test_a_map_too_many_is_refused():
    class DiffAttention(Base):
        __module__ = TIMM

        def forward(self, x, mask=None):
            q, k, v = self.project(x)
            for shift in range(3):
                out = F.scaled_dot_product_attention(q + shift, k, v)
            return x + out.transpose(1, 2).flatten(2)

    with pytest.raises(RecordingError, match="attends more than 2 times"):
        recorded(make(lambda i: DiffAttention(6, 6)))


class Outer(Base):
    """λ stands here, and a child attends, once for each map."""

    def __init__(self, depth):
        super().__init__(6, 6, depth)
        self.core = Core()
        self.out = nn.Linear(6 * D // 2, C)

    def forward(self, x, mask=None):
        q, k, v = self.project(x)
        first = self.core(q[:, 0::2], k[:, 0::2], v[:, 0::2])
        second = self.core(q[:, 1::2], k[:, 1::2], v[:, 0::2])
        return self.out((first - self.lam() * second).transpose(1, 2).flatten(2))


class Core(nn.Module):
    def forward(self, q, k, v):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def test_a_child_that_attends_for_each_map():
    model = make(Outer)
    with pytest.warns(UnknownLayoutWarning, match=r"blocks\.0\.attn \(Outer\)"):
        profile = recorded(model)
    names = [site.name for site in profile.attention_logits.sites]
    assert names == ["blocks.0.attn", "blocks.0.attn #1", "blocks.1.attn", "blocks.1.attn #1"]
    check(recorded(model, layout="adjacent"), model, "adjacent")


def test_a_module_that_attends_in_several_calls_is_refused():
    class Twice(Base):
        def __init__(self, depth):
            super().__init__(6, 6, depth)
            self.core = Core()
            for name in ("lambda_q1", "lambda_k1", "lambda_q2", "lambda_k2"):
                setattr(self, name, None)

        def forward(self, x, mask=None):
            q, k, v = self.project(x)
            return x + (self.core(q, k, v) + self.core(k, q, v)).transpose(1, 2).flatten(2)

    with pytest.raises(RecordingError, match="called several times in a forward pass"):
        recorded(make(Twice))


class DiffAttentionOfSomeoneElse(DiffAttention):
    """Halves, where the name and the two calls would let one think of neighbours."""

    __module__ = __name__

    def forward(self, x, mask=None):
        q, k, v = self.project(x)
        (q1, q2), (k1, k2), v = q.chunk(2, 1), k.chunk(2, 1), v[:, :3]
        first = F.scaled_dot_product_attention(q1, k1, v, is_causal=True)
        second = F.scaled_dot_product_attention(q2, k2, v, is_causal=True)
        out = (first - self.lam() * second).transpose(1, 2).flatten(2)
        return self.out(torch.cat([out, out], -1))


def test_a_name_alone_is_no_layout():
    model = make(DiffAttentionOfSomeoneElse)
    with pytest.warns(UnknownLayoutWarning):
        assert recorded(model).model["layout"] == "none"
    with pytest.raises(RecordingError, match="not even and odd heads"):
        recorded(model, layout="adjacent")

    class DiffAttention(DiffAttentionOfSomeoneElse):
        __module__ = TIMM

    with pytest.raises(RecordingError, match="not even and odd heads"):
        recorded(make(DiffAttention))


def test_maps_in_the_other_order_are_refused():
    class DiffAttention(Base):
        __module__ = TIMM

        def forward(self, x, mask=None):
            q, k, v = self.project(x)
            for i in (1, 0):
                out = F.scaled_dot_product_attention(q[:, i::2], k[:, i::2], v[:, i::2])
            return x + torch.cat([out, out], 1).transpose(1, 2).flatten(2)

    with pytest.raises(RecordingError, match="not even and odd heads"):
        recorded(make(lambda i: DiffAttention(6, 6)))


def llama_with(attention, layer=1):
    """A Llama one of whose layers has another attention."""
    model = tiny_llama(hidden_size=C, num_attention_heads=6, num_key_value_heads=6)

    class InPlace(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = attention

        def forward(self, hidden_states, position_embeddings=None, **_):
            if isinstance(attention, Base):
                return self.inner(hidden_states), None
            return self.inner(hidden_states, tuple(t[..., :4] for t in position_embeddings)), None

    model.model.layers[layer].self_attn = InPlace()
    return model.eval()


def test_attention_of_its_own_inside_a_model_of_the_dispatch():
    model = llama_with(MotifAttention(0))
    ids = IDS % 200
    with pytest.warns(UnknownLayoutWarning, match="MotifAttention"), record(model) as recorder:
        model(ids)
    sites = recorder.profile().attention_logits.sites
    assert [site.name for site in sites] == [
        "model.layers.0.self_attn", "model.layers.1.self_attn.inner",
        "model.layers.1.self_attn.inner #1",
    ]  # fmt: skip
    assert [int(site.count.sum()) for site in sites] == [2 * 66 * 6, 2 * 66 * 4, 2 * 66 * 4]


class Plain(Base):
    def __init__(self):
        super().__init__(6, 6)
        for name in ("lambda_q1", "lambda_k1", "lambda_q2", "lambda_k2"):
            setattr(self, name, None)


class Imported(Plain):
    """Calls torch's attention by a name of its own."""

    def forward(self, x, mask=None):
        out = sdpa(*self.project(x), is_causal=True)
        return out.transpose(1, 2).flatten(2)


helpers = types.ModuleType("helpers")
helpers.attend = sdpa


class OfHelpers(Plain):
    """Calls it as a module of helpers has it."""

    def forward(self, x, mask=None):
        out = helpers.attend(*self.project(x), is_causal=True)
        return out.transpose(1, 2).flatten(2)


@pytest.mark.parametrize("kind", [Imported, OfHelpers])
def test_attention_under_another_name_inside_a_model_of_the_dispatch(kind):
    model = llama_with(kind())
    with torch.no_grad(), record(model) as recorder:
        model(IDS % 200)
    sites = recorder.profile().attention_logits.sites
    assert [site.name for site in sites] == [
        "model.layers.0.self_attn", "model.layers.1.self_attn.inner",
    ]  # fmt: skip
    assert all(site.count.tolist() == [2 * 66] * 6 for site in sites)


def test_our_own_attention_inside_a_model_of_the_dispatch():
    own = DifferentialAttentionV1(C, 0, 3, rotary="half", backend="sdpa")
    model = llama_with(own)
    with torch.no_grad(), record(model, maps=True) as recorder:
        model(IDS % 200)
    profile = recorder.profile()
    assert profile.model["layout"] == "mixed"
    branches = profile.attention_logits.branches["model.layers.1.self_attn.inner"]
    assert branches == [1, 2] * 3
    kinds = [(site.layer, site.kind) for site in profile.maps]
    assert kinds == [(0, "softmax"), (1, "branch 1"), (1, "branch 2"), (1, "difference")]


def test_a_wrapped_model_keeps_its_layout():
    class Wrapper(nn.Module):
        def __init__(self):
            super().__init__()
            self.model = tiny_diffllama()

        def forward(self, input_ids):
            return self.model(input_ids=input_ids)

    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("error", UnknownLayoutWarning)
        with record(Wrapper()) as recorder:
            recorder._model(IDS % 200)
    assert recorder.profile().model["layout"] == "halves"


def test_lambda_is_rounded_as_the_model_rounds_it():
    model = tiny_diffllama().bfloat16()
    with torch.no_grad(), record(model, maps=True) as recorder:
        model(IDS % 200)
    profile = recorder.profile()
    for layer, told in zip(model.model.layers, profile.model["lambda"], strict=True):
        a = layer.self_attn
        pairs = ((a.lambda_q1, a.lambda_k1), (a.lambda_q2, a.lambda_k2))
        first, second = (
            torch.exp(torch.sum(q * k, -1, dtype=torch.float32)).to(torch.bfloat16)
            for q, k in pairs
        )
        assert told == (first - second + a.lambda_init).item()
    for site in profile.maps:
        if site.kind == "difference":
            lam = profile.model["lambda"][site.layer]
            assert site.summary["row_sum"] == pytest.approx(1 - lam, abs=1e-5)


def test_a_difference_whose_lambda_is_not_known_is_not_measured():
    model = make(DiffAttention)
    for block in model.blocks:
        lam = block.attn.lam().item()
        del block.attn.lambda_init
        block.attn.lam = lambda lam=lam: lam
    with pytest.warns(UnknownLayoutWarning, match=r"λ of blocks\.0\.attn is not known"):
        profile = recorded(model, maps=True)
    assert {site.kind for site in profile.maps} == {"softmax"}


@pytest.mark.parametrize("what", ["scale", "mask", "mask a head"])
def test_maps_of_pairs_that_differ_otherwise_are_refused(what):
    class DiffAttention(Base):
        __module__ = TIMM

        def forward(self, x, mask=None):
            q, k, v = self.project(x)
            heads = torch.ones(1, 3, 11, 11, dtype=torch.bool).tril()
            given = {
                "scale": [{}, {"scale": 2.0}],
                "mask": [{"is_causal": True}, {}],
                "mask a head": [{"attn_mask": heads}] * 2,
            }[what]
            for i in (0, 1):
                out = F.scaled_dot_product_attention(q[:, i::2], k[:, i::2], v[:, i::2], **given[i])
            return x + torch.cat([out, out], 1).transpose(1, 2).flatten(2)

    model = make(lambda i: DiffAttention(6, 6))
    assert recorded(model).model["layout"] == "adjacent"
    with pytest.raises(RecordingError, match="same scale and mask"):
        recorded(model, maps=True)


class Both(nn.Module):
    """Differential attention behind a plain one, in one layer."""

    def __init__(self, depth):
        super().__init__()
        self.plain, self.pairs = Imported(), DiffAttention(depth)

    def forward(self, x, mask=None):
        return self.pairs(self.plain(x))


def test_a_layer_of_two_layouts_is_refused_in_the_first_pass():
    model = make(Both)
    words = r"layer 0 holds attention of several head layouts \(adjacent, none\)"
    with torch.no_grad(), record(model), pytest.raises(RecordingError, match=words):
        model(IDS)


def test_an_unknown_layout_is_named():
    with pytest.raises(UsageError, match="unknown head layout 'pairs'"):
        record(make(DiffAttention), layout="pairs")
