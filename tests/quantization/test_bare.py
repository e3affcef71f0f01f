"""Quantization of models that call scaled_dot_product_attention by themselves."""

import numpy as np
import pytest
import torch
from torch.utils.checkpoint import checkpoint

from quantdiff import QuantizationError, Scheme, calibrate, fake_quantize, record
from quantdiff.attention import layout
from tests import reference
from tests.hooks.test_any_module import NanoGPT
from tests.hooks.test_any_module import make as make_plain
from tests.quantization.test_fake_quantize import SITE, Fixed, materialised
from tests.standins import (
    IDS,
    D,
    DiffAttention,
    Grouped,
    MotifAttention,
    Phi,
    flash_attn,
    make,
)

CAUSAL = torch.ones(11, 11, dtype=torch.bool).tril()


@pytest.mark.parametrize("granularity", ["tensor", "head", "row"])
def test_a_nanogpt(granularity):
    model = make_plain(NanoGPT, layers=1, is_causal=True)
    ids = IDS % 50
    scheme = Scheme(SITE, 5, granularity=granularity)
    attention = model.blocks[0].attention
    with torch.no_grad():
        plain = model(ids)
        with fake_quantize(model, scheme):
            x = model.embedding(ids) * 3
            caught = {}
            handle = attention.out.register_forward_pre_hook(
                lambda module, args: caught.update(out=args[0])
            )
            found = model(ids)
            handle.remove()
        assert torch.equal(model(ids), plain)
    assert not torch.equal(found, plain)
    q, k, v = attention.qkv(x).detach().unflatten(2, (3, 4, 4)).permute(2, 0, 3, 1, 4)
    expected, near, _ = materialised(q, k, v, scheme, CAUSAL, 0.5)
    gap = (caught["out"].unflatten(2, (4, 4)).transpose(1, 2) - expected).abs()
    assert torch.where(near.any(-1, keepdim=True), 0.0, gap).max() < 1e-4


@pytest.mark.parametrize(
    ("name", "build"),
    [
        ("adjacent", lambda: make(lambda i: DiffAttention(i, is_causal=True), layers=1)),
        ("adjacent", lambda: make(MotifAttention, layers=1, model_type="Motif")),
        ("grouped:2", lambda: make(lambda i: Grouped(i, 2, True), layers=1, model_type="Motif",
                                   num_noise_heads=2, num_attention_heads=6)),
    ],
)  # fmt: skip
def test_maps_in_calls_of_their_own(name, build):
    """Each map's heads get their own range, static or not; both halves of V are quantized."""
    model = build()
    module = model.blocks[0].attn
    with torch.no_grad():
        plain = model(IDS)
        table = calibrate(model, [{"input_ids": IDS}])
        for scheme in (
            Scheme(SITE, 5), Scheme(SITE, 5, granularity="head"), Scheme(SITE, 5, "absmax", "head")
        ):  # fmt: skip
            caught = {}
            handle = module.out.register_forward_pre_hook(
                lambda m, args, caught=caught: caught.update(out=args[0])
            )
            with fake_quantize(model, scheme, table=table), record(model) as recorder:
                model(IDS)
            handle.remove()
            profile = recorder.profile()
            assert profile.model["layout"] == name
            assert "forward" not in vars(module)
            q, k = module.seen
            v = module.v(model.embedding(IDS) * 3).unflatten(-1, (-1, D)).transpose(1, 2)
            kinds = layout(name)
            heads = q.shape[1]
            keys = k[:, kinds.key_heads(heads, k.shape[1])]
            parts = zip(*kinds.value_heads(heads, v.shape[1]), strict=True)
            wide = torch.cat([v[:, list(part)] for part in parts], -1)
            given = None
            if scheme.static:
                x = reference.logits(q, keys, D**-0.5)[:, :, CAUSAL]
                ends = x.amin((0, 2)), x.amax((0, 2))
                given = Fixed(*(end.numpy().astype(np.float32) for end in ends))
            each, near, _ = materialised(q, keys, wide, scheme, CAUSAL, D**-0.5, given)
            first, second = kinds.pairs(heads)
            expected = (each[:, first] - module.lam() * each[:, second]).transpose(1, 2).flatten(2)
            unsure = near.any((1, 3))  # (B, N)
            gap = torch.where(unsure[..., None], 0.0, (caught["out"] - expected).abs())
            assert (~unsure).sum() > 5
            assert gap.max() < 1e-4
            # A module that is computed twice is recorded once.
            assert profile.attention_logits.count == 2 * heads * int(CAUSAL.sum())
        assert torch.equal(model(IDS), plain)


def test_recording_sees_the_logits_before():
    model = make(MotifAttention, model_type="Motif")
    scheme = Scheme(SITE, 2, granularity="row")
    with torch.no_grad(), record(model) as recorder:
        model(IDS)
    plain = recorder.profile().attention_logits
    for outer in (True, False):
        contexts = [record(model), fake_quantize(model, scheme)]
        first, second = contexts if outer else contexts[::-1]
        with torch.no_grad(), first, second:
            model(IDS)
        seen = contexts[0].profile().attention_logits
        assert seen.count == plain.count
        assert np.array_equal(seen.sites[0].max, plain.sites[0].max)
        assert not np.array_equal(seen.sites[1].max, plain.sites[1].max)


@pytest.mark.parametrize("build", [DiffAttention, MotifAttention])
def test_the_linear_inputs_of_a_module_that_is_computed_twice_are_recorded_once(build):
    model, counts = make(build, model_type="Motif"), []
    for schemes in ((), (Scheme(SITE, 8),)):
        with torch.no_grad(), fake_quantize(model, *schemes):
            with record(model, sites=("linear_inputs",)) as recorder:
                model(IDS)
            counts.append([site.count.tolist() for site in recorder.profile().linear_inputs.sites])
    assert counts[0] == counts[1]


@pytest.mark.parametrize("granularity", ["tensor", "row"])
def test_a_mask_that_is_learned_gets_its_gradient(granularity):
    """Also where it is zero so far, and where a module is measured first."""
    model, gradients = make(DiffAttention), []
    with torch.no_grad():
        table = calibrate(model, [{"input_ids": IDS}])
    mask = torch.nn.Parameter(torch.zeros(11, 11))
    for schemes in ((), (Scheme(SITE, 8, granularity=granularity),)):
        mask.grad = None
        with fake_quantize(model, *schemes, table=table):
            model(IDS, mask=mask).square().sum().backward()
        gradients.append(mask.grad.flatten())
    assert torch.cosine_similarity(*gradients, dim=0) > 0.95


@pytest.mark.parametrize("granularity", ["tensor", "head"])
@pytest.mark.parametrize("window", [(-1, -1), (4, 0)])
@pytest.mark.parametrize("padded", [False, True])
def test_flash_attn_called_directly(window, padded, granularity):
    """As Phi-4-mini-flash does: four calls a layer, packed where there is padding."""
    model = make(lambda i: Phi(i, window), layers=1, model_type="phi4flash")
    module, mask = model.blocks[0].attn, torch.ones_like(IDS)
    if padded:
        mask[1, 8:] = 0
    scheme = Scheme(SITE, 5, granularity=granularity)
    rows, kept = IDS.shape[1], mask.bool()
    seen = torch.ones(rows, rows, dtype=torch.bool).tril()
    if window[0] >= 0:
        seen &= torch.ones(rows, rows, dtype=torch.bool).triu(-window[0])
    seen = seen & kept[:, None, :, None] & kept[:, None, None]
    calls, caught = [], {}
    module.out.register_forward_pre_hook(lambda m, args: caught.update(out=args[0]))
    given = {"attention_mask": mask} if padded else {}
    with flash_attn(calls), torch.no_grad():
        plain = model(IDS, **given)
        outs = []
        for turned in (False, True):
            contexts = [fake_quantize(model, scheme), record(model)]
            recorder = contexts[1]
            first, second = contexts[::-1] if turned else contexts
            with first, second:
                model(IDS, **given)
            outs.append(caught["out"])
            profile = recorder.profile()
            assert profile.model["layout"] == "adjacent"
            assert profile.attention_logits.count == int(seen.sum()) * 8
        found = outs[0]
        assert torch.equal(*outs)
        assert torch.equal(model(IDS, **given), plain)
    assert set(calls) == {"packed" if padded else "dense"}
    q, k = module.seen
    v = module.v(model.embedding(IDS) * 3).unflatten(-1, (-1, D)).transpose(1, 2)
    kinds = layout("adjacent")
    heads = q.shape[1]
    keys = k[:, kinds.key_heads(heads, k.shape[1])]
    parts = zip(*kinds.value_heads(heads, v.shape[1]), strict=True)
    wide = torch.cat([v[:, list(part)] for part in parts], -1)
    each, near, _ = materialised(q, keys, wide, scheme, seen, D**-0.5)
    first, second = kinds.pairs(heads)
    expected = (each[:, first] - module.lam() * each[:, second]).transpose(1, 2).flatten(2)
    unsure = near.any((1, 3)) | ~kept
    assert (~unsure).sum() > 5
    assert torch.where(unsure[..., None], 0.0, (found - expected).abs()).max() < 1e-4


def test_gradients_through_flash_attn_are_refused():
    model = make(Phi, model_type="phi4flash")
    refused = pytest.raises(QuantizationError, match="backward pass knows nothing")
    with flash_attn([]), refused, fake_quantize(model, Scheme(SITE, 4, granularity="head")):
        model(IDS)


def test_a_model_that_never_attends_is_refused():
    model = torch.nn.Sequential(torch.nn.Linear(8, 8))
    refused = pytest.raises(QuantizationError, match="no attention was seen")
    with refused, fake_quantize(model, Scheme(SITE, 4)):
        model(torch.randn(1, 3, 8))


def test_dropout_is_refused():
    model = make(lambda i: DiffAttention(i, dropout_p=0.5))
    refused = pytest.raises(QuantizationError, match="drops attention weights out")
    with refused, fake_quantize(model, Scheme(SITE, 4, granularity="head")):
        model(IDS)


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing_is_refused(reentrant, whole):
    """Else the second computation would not be quantized, and the gradients be those of neither."""
    model = make_plain(NanoGPT, layers=2, is_causal=True).train()

    def forward(ids):
        x = model.embedding(ids) * 3
        for block in model.blocks:
            part = block if whole else block.attention
            x = checkpoint(part, x, use_reentrant=reentrant)
        return model.head(x)

    model.forward = forward
    with fake_quantize(model, Scheme(SITE, 4)):
        loss = model(IDS % 50).sum()
        with pytest.raises(QuantizationError, match="gradient checkpointing does not go with"):
            loss.backward()


def test_a_table_of_fewer_heads_is_refused():
    model = make(MotifAttention, model_type="Motif")
    small = make(DiffAttention, model_type="Motif")
    table = calibrate(small, [{"input_ids": IDS}])
    refused = pytest.raises(QuantizationError, match="holds ranges of 6 heads for blocks")
    with torch.no_grad(), refused, fake_quantize(model, Scheme(SITE, 4, "absmax"), table=table):
        model(IDS)
