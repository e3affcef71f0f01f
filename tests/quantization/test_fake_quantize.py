"""Quantized attention against everything materialised in fp64."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import DogeConfig, DogeForCausalLM

from quantdiff import (
    QuantizationError,
    RecordingError,
    Scheme,
    UsageError,
    calibrate,
    fake_quantize,
    record,
)
from quantdiff.attention import layout
from quantdiff.hooks.logits import Logits
from quantdiff.quantization import attention
from quantdiff.quantization.attention import attend
from quantdiff.quantization.grid import NoGridError
from quantdiff.quantization.logits import softmax_of
from quantdiff.statistics import Visible
from tests import reference
from tests.hooks.test_differential import OWN, Small
from tests.quantization.plain_sites import check, on_grids
from tests.tiny import SETTINGS, build, tiny_diff_v2, tiny_diffllama, tiny_ids, tiny_llama

SITE = "attention_logits"
NEAR = 1e-5  # which side a logit so near to a boundary goes to is chance
BACKENDS = ("eager", "sdpa", "flex_attention")


class Fixed:
    """A table with the ranges that a test wants."""

    def __init__(self, least, most):
        self.least, self.most = least, most

    def range(self, scheme, name):
        return self.least, self.most

    def check_model(self, sites, modules):
        pass


def grid_of(least, most, bits, symmetric):
    """step, zero point, low and high, in fp64 but for the step, which is stored as fp32."""
    least, most = float(min(least, 0)), float(max(most, 0))
    if symmetric:
        high = 2 ** (bits - 1) - 1
        step = float(np.float32(max(-least, most) / high)) or 1.0
        return step, 0, -high, high
    high = 2**bits - 1
    step = float(np.float32((most - least) / high)) or 1.0
    return step, round(-least / step), 0, high


def materialised(q, k, v, scheme, seen, scale, table=None):
    """Output, share of logits near a rounding boundary by row, number of clipped logits."""
    x = reference.logits(q, k, scale)  # (B, H, N, M)
    seen = seen.expand(x.shape)
    quantized, near = x.clone(), torch.zeros_like(x, dtype=torch.bool)
    clipped = 0
    for b in range(len(x)):
        for h in range(x.shape[1]):
            for n in range(x.shape[2]):
                group = {
                    "tensor": (x[b], seen[b]),
                    "head": (x[b, h], seen[b, h]),
                    "row": (x[b, h, n], seen[b, h, n]),
                }[scheme.granularity]
                if table is not None:
                    least, most = table.least[h], table.most[h]
                elif group[1].any():
                    values = group[0][group[1]]
                    least, most = values.min(), values.max()
                else:
                    continue
                step, zero, low, high = grid_of(least, most, scheme.bits, scheme.symmetric)
                y = x[b, h, n] / step
                integers = y.round() + zero
                inside = integers.clamp(low, high)
                clipped += int(((integers != inside) & seen[b, h, n]).sum())
                quantized[b, h, n] = (inside - zero) * step
                near[b, h, n] = ((y - y.floor() - 0.5).abs() * step < NEAR) & seen[b, h, n]
    weights = quantized.masked_fill(~seen, -torch.inf).softmax(-1).nan_to_num()
    v = v.double().repeat_interleave(q.shape[1] // v.shape[1], 1)
    return weights @ v, near, clipped


def ours(q, k, v, scheme, visible, scale, table=None):
    logits = Logits(q, k, scale, visible)
    return attend(q, k, v, softmax_of(logits, scheme, table, "here"))


def compare(q, k, v, scheme, visible, seen, scale, table=None, tolerance=1e-5):
    expected, near, clipped = materialised(q, k, v, scheme, seen, scale, table)
    counted = np.zeros(q.shape[1], np.int64)
    softmax = softmax_of(Logits(q, k, scale, visible), scheme, table, "here", clipped=counted)
    found = attend(q, k, v, softmax).double()
    unsure = near.any(-1, keepdim=True)
    assert near.sum() <= 0.01 * seen.expand(near.shape).sum() + 1
    assert abs(int(counted.sum()) - clipped) <= int(near.sum())
    gap = torch.where(unsure, 0.0, (found - expected).abs())
    assert float(gap.max()) <= tolerance * float(v.abs().max())
    return clipped


def case(seed, batch, heads, groups, rows, keys, width, dtype=torch.float32, size=2.0):
    generator = torch.Generator().manual_seed(seed)

    def make(h, n):
        return (torch.randn(batch, h, n, width, generator=generator) * size).to(dtype)

    return make(heads, rows), make(groups, keys), make(groups, keys)


def padded(batch, rows, pads):
    """Left padding of each sequence: the visibility and the same as a mask."""
    visible = Visible.causal(batch, rows, rows)
    seen = torch.ones(rows, rows, dtype=torch.bool).tril().repeat(batch, 1, 1, 1)
    for b, pad in enumerate(pads):
        visible.start[b] = pad
        visible.stop[b, :pad] = 0
        seen[b, :, :pad] = False
        seen[b, :, :, :pad] = False
    return visible, seen


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("bits", range(2, 9))
@pytest.mark.parametrize("granularity", ["tensor", "head", "row"])
def test_dynamic_ranges(granularity, bits, symmetric):
    q, k, v = case(bits, 2, 4, 2, 21, 21, 16)
    visible, seen = padded(2, 21, (0, 6))
    scheme = Scheme(SITE, bits, granularity=granularity, symmetric=symmetric)
    assert compare(q, k, v, scheme, visible, seen, 0.25) == 0


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("bits", [2, 4, 8])
def test_static_ranges_clip(bits, symmetric):
    q, k, v = case(bits, 2, 4, 2, 21, 21, 16)
    visible, seen = padded(2, 21, (0, 6))
    table = Fixed(np.float32([-3, -2, -1, -4]), np.float32([2, 2.5, 3, 1]))
    scheme = Scheme(SITE, bits, "absmax", "head", symmetric)
    assert compare(q, k, v, scheme, visible, seen, 0.25, table) > 0


@pytest.mark.parametrize("granularity", ["tensor", "head", "row"])
@pytest.mark.parametrize("sinks", [None, torch.tensor([2.0, -1.0, 0.5, 4.0])])
@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("biased", [False, True])
def test_soft_caps_biases_and_sinks(biased, softcap, sinks, granularity):
    """A sink takes its share of each row, is not quantized and sets no range."""
    q, k, v = case(7, 2, 4, 2, 21, 21, 16)
    visible, seen = padded(2, 21, (0, 6))
    bias = torch.randn(1, 4, 21, 21, generator=torch.Generator().manual_seed(1)) if biased else None
    scheme = Scheme(SITE, 5, granularity=granularity, symmetric=not biased)
    added = None if bias is None else lambda i, j: bias[:, :, i:j]
    logits = Logits(q, k, 0.25, visible, softcap, added, sinks=sinks)
    found = attend(q, k, v, softmax_of(logits, scheme, None, "here"), sinks)
    x = reference.logits(q, k, 0.25)
    x = x if softcap is None else softcap * torch.tanh(x / softcap)
    x = x if bias is None else x + bias.double()
    over = {"tensor": (1, 2, 3), "head": (2, 3), "row": (3,)}[granularity]
    x, near = on_grids(x, over, seen, scheme, reach=1e-4)
    exps = torch.where(seen, x.exp(), 0.0)
    taken = 0.0 if sinks is None else sinks.double().exp()[:, None, None]
    weights = (exps / (exps.sum(-1, keepdim=True) + taken)).nan_to_num()
    check(found.double(), weights @ v.double().repeat_interleave(2, 1), near.any(-1, keepdim=True))


@given(
    seed=st.integers(0, 10**6), bits=st.integers(2, 8), symmetric=st.booleans(),
    granularity=st.sampled_from(["tensor", "head", "row"]), groups=st.sampled_from([1, 2, 4]),
    rows=st.integers(1, 20), past=st.integers(0, 6), pad=st.integers(0, 19),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    small=st.booleans(), static=st.booleans(), window=st.none() | st.integers(1, 8),
    holes=st.booleans(),
)  # fmt: skip
@settings(max_examples=150)
def test_any_shape(
    seed, bits, symmetric, granularity, groups, rows, past, pad, dtype, small, static, window, holes
):
    """Any dtype, range and mask: causal, padded, sliding, and with holes that no interval tells."""
    before = attention.BLOCK_ELEMENTS
    attention.BLOCK_ELEMENTS = 64 if small else before
    try:
        keys = rows + past
        q, k, v = case(seed, 2, 4, groups, rows, keys, 8, dtype)
        visible = Visible.causal(2, rows, keys)
        seen = torch.ones(rows, keys, dtype=torch.bool).tril(past).repeat(2, 1, 1, 1)
        pad = min(pad, keys - 1)
        visible.start[1] = pad
        seen[1, :, :, :pad] = False
        if window is not None:
            visible.start = torch.maximum(visible.start, visible.stop - window)
            seen &= torch.ones(rows, keys, dtype=torch.bool).triu(past - window + 1)
        if holes:
            generator = torch.Generator().manual_seed(seed)
            visible.mask = torch.rand(2, 1, rows, keys, generator=generator) < 0.7
            seen = seen & visible.mask
        static = static and granularity != "row"
        range_ = "absmax" if static else "dynamic"
        table = Fixed(np.float32([-3, -2, -1, -4]), np.float32([2, 2.5, 3, 1])) if static else None
        if static and granularity == "tensor":
            table = Fixed(np.float32([-3] * 4), np.float32([2] * 4))
        scheme = Scheme(SITE, bits, range_, granularity, symmetric)
        rounding = 1e-5 if dtype == torch.float32 else 1e-2
        compare(q, k, v, scheme, visible, seen, 0.3, table, tolerance=rounding)
    finally:
        attention.BLOCK_ELEMENTS = before


def test_padding_batch_size_and_order_change_nothing():
    q, k, v = case(0, 3, 4, 2, 24, 24, 8)
    visible, _ = padded(3, 24, (0, 9, 0))
    for granularity in ("tensor", "head", "row"):
        scheme = Scheme(SITE, 4, granularity=granularity)
        whole = ours(q, k, v, scheme, visible, 0.3)
        turned = Visible(visible.start.flip(0), visible.stop.flip(0))
        back = ours(*(x.flip(0) for x in (q, k, v)), scheme, turned, 0.3).flip(0)
        assert torch.equal(whole, back)
        alone = ours(*(x[1:2, :, 9:] for x in (q, k, v)), scheme, Visible.causal(1, 15, 15), 0.3)
        torch.testing.assert_close(whole[1:2, :, 9:], alone, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("granularity", ["tensor", "head", "row"])
def test_gradients_are_straight_through(granularity):
    q, k, v = (x.double().requires_grad_() for x in case(3, 2, 4, 2, 13, 13, 8, size=1.0))
    visible, seen = padded(2, 13, (0, 4))
    scheme = Scheme(SITE, 4, granularity=granularity)
    out = ours(q, k, v, scheme, visible, 0.4)
    weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).double()
    found = torch.autograd.grad(out, (q, k, v), weight)
    # The same with rounding as x + (rounded − x).detach().
    x = torch.einsum("bhnd,bhmd->bhnm", q, k.repeat_interleave(2, 1)) * 0.4
    with torch.no_grad():
        softmax = softmax_of(Logits(q, k, 0.4, visible), scheme, None, "here")
        grid = softmax.grid
        if granularity == "row":
            low = x.masked_fill(~seen, torch.inf).amin(-1, keepdim=True)
            grid = grid.of(low, x.masked_fill(~seen, -torch.inf).amax(-1, keepdim=True))
        rounded = grid.quantize(x)
    y = (x + (rounded - x).detach()).masked_fill(~seen, -torch.inf)
    weights = torch.where(seen.any(-1, keepdim=True), y, 0.0).softmax(-1)
    weights = torch.where(seen, weights, 0.0)
    plain = weights @ v.repeat_interleave(2, 1)
    expected = torch.autograd.grad(plain, (q, k, v), weight)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-8)


def test_a_clipped_logit_passes_no_gradient():
    q, k, v = (x.double().requires_grad_() for x in case(3, 1, 1, 1, 5, 5, 8))
    table = Fixed(np.float32([-1e-9]), np.float32([1e-9]))
    out = ours(q, k, v, Scheme(SITE, 4, "absmax"), Visible.causal(1, 5, 5), 0.4, table)
    of_q, of_k, of_v = torch.autograd.grad(out.sum(), (q, k, v))
    assert of_q.abs().max() == of_k.abs().max() == 0
    assert of_v.abs().min() > 0


@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("range_", ["dynamic", "absmax"])
@pytest.mark.parametrize("shape", [(1, 1), (2, 1), (1, 4), (2, 4)])
def test_a_learned_bias_gets_its_gradient(shape, range_, softcap):
    q, k, v = (x.double().requires_grad_() for x in case(3, 2, 4, 2, 13, 13, 8, size=1.0))
    visible, seen = padded(2, 13, (0, 4))
    generator = torch.Generator().manual_seed(2)
    bias = torch.randn(*shape, 13, 13, generator=generator).double().requires_grad_()
    table = Fixed(np.float32([-3, -2, -1, -4]), np.float32([2, 2.5, 3, 1]))
    logits = Logits(q, k, 0.4, visible, softcap, lambda i, j: bias[:, :, i:j])
    softmax = softmax_of(logits, Scheme(SITE, 4, range_, "head"), table, "here")
    out = attend(q, k, v, softmax)
    weight = torch.randn(out.shape, generator=generator).double()
    found = torch.autograd.grad(out, (q, k, v, bias), weight)
    x = torch.einsum("bhnd,bhmd->bhnm", q, k.repeat_interleave(2, 1)) * 0.4
    x = (x if softcap is None else torch.tanh(x / softcap) * softcap) + bias
    passes = x
    if softmax.clips:  # a clipped logit passes none
        passes = torch.where(softmax.grid.clipped(x), x.detach(), x)
        assert not torch.equal(softmax.grid.clipped(x), torch.zeros_like(x).bool())
    y = passes + (softmax.grid.quantize(x) - passes).detach()
    y = y.masked_fill(~seen, -torch.inf)
    weights = torch.where(seen.any(-1, keepdim=True), y, 0.0).softmax(-1)
    plain = torch.where(seen, weights, 0.0) @ v.repeat_interleave(2, 1)
    torch.testing.assert_close(out, plain, rtol=1e-6, atol=1e-8)
    expected = torch.autograd.grad(plain, (q, k, v, bias), weight)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-8)


def test_the_bias_that_doge_learns_gets_its_gradient():
    settings = SETTINGS | {"num_attention_heads": 4, "num_key_value_heads": 2}
    model = build(DogeForCausalLM, DogeConfig(**settings))
    ids, gradients = tiny_ids(2, 12), []
    for schemes in ((), (Scheme(SITE, 8),)):
        model.zero_grad()
        with fake_quantize(model, *schemes):
            model(input_ids=ids, labels=ids).loss.backward()
        gradients.append(torch.stack([layer.self_attn.A.grad for layer in model.model.layers]))
    assert torch.cosine_similarity(*(g.flatten() for g in gradients), dim=0) > 0.95


@pytest.mark.parametrize("holes", [False, True])
@pytest.mark.parametrize("symmetric", [True, False])
def test_an_infinite_logit_is_not_clipped(symmetric, holes):
    """By the compiled rounding, and in plain torch, which takes masks that are no interval."""
    q, k, v = case(3, 1, 1, 1, 5, 5, 8)
    k[0, 0, 3] = 1e38
    visible = Visible.causal(1, 5, 5)
    if holes:
        visible.mask = torch.eye(5, dtype=torch.bool).logical_not()[None, None]
    table = Fixed(np.float32([-1]), np.float32([1]))
    scheme = Scheme(SITE, 4, "absmax", symmetric=symmetric)
    ours(q[:, :, :3], k, v, scheme, Visible(visible.start[:, :3], visible.stop[:, :3]), 1.0, table)
    with pytest.raises(NoGridError):
        ours(q * 1e3, k, v, scheme, visible, 1.0, table)


# Whole models


def batch():
    ids = tiny_ids(2, 20)
    mask = torch.ones_like(ids)
    mask[1, :6] = 0
    return {"input_ids": ids, "attention_mask": mask}


MODELS = {
    "llama": lambda: tiny_llama(num_attention_heads=8, num_key_value_heads=4),
    "diffllama": lambda: tiny_diffllama(num_attention_heads=8, num_key_value_heads=4),
    "diff_v2": lambda: tiny_diff_v2(num_attention_heads=8, num_key_value_heads=2, head_dim=8),
}


def eager_quantized(model, scheme):
    """A forward whose eager function quantizes the materialised logits."""
    import importlib

    module = importlib.import_module(type(model).__module__)
    real = module.eager_attention_forward

    def attend(attention, query, key, value, attention_mask, scaling, **kwargs):
        seen = attention_mask > torch.finfo(attention_mask.dtype).min / 2
        # A row of padding is filled to see everything; it sets no range.
        seen = seen & batch()["attention_mask"].bool()[:, None, :, None]
        out, _, _ = materialised(query, key, value, scheme, seen, scaling)
        return out.float().transpose(1, 2), None

    module.eager_attention_forward = attend
    model.set_attn_implementation("eager")
    try:
        with torch.no_grad():
            return model(**batch()).logits
    finally:
        module.eager_attention_forward = real


@pytest.mark.parametrize("granularity", ["tensor", "head", "row"])
@pytest.mark.parametrize("name", MODELS)
def test_models(name, granularity):
    model, real = MODELS[name](), batch()["attention_mask"].bool()
    scheme = Scheme(SITE, 6, granularity=granularity)
    expected = eager_quantized(model, scheme)[real]
    for backend in BACKENDS:
        model.set_attn_implementation(backend)
        with torch.no_grad():
            plain = model(**batch()).logits
            with fake_quantize(model, scheme):
                found = model(**batch()).logits[real]
            assert torch.equal(model(**batch()).logits, plain)
        # Rounding is chaotic in depth: most tokens agree, and what was done is felt.
        agree = ((found - expected).abs().amax(-1) < 1e-3).float().mean()
        assert agree > 0.5
        assert (found - plain[real]).abs().max() > 1e-2


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize(
    "range_",
    [("dynamic", "tensor"), ("dynamic", "head"), ("dynamic", "row"), ("percentile:90", "tensor"),
     ("percentile:90", "head")],
    ids="-".join,
)  # fmt: skip
@pytest.mark.parametrize("name", OWN)
def test_our_own_modules(name, range_, symmetric):
    """Every layout."""
    torch.manual_seed(0)
    model = Small(lambda i: OWN[name](i, "sdpa"), layers=1).eval()
    heads = model.blocks[0].attention.heads
    given = batch()
    scheme = Scheme(SITE, 5, *range_, symmetric=symmetric)
    caught = {}
    heads.register_forward_hook(lambda m, args, out: caught.update(args=args, out=out))
    with torch.no_grad():
        before = model(**given)
        table = calibrate(model, [given]) if scheme.static else None
        quantizer = fake_quantize(model, scheme, table=table, count_clipped=True)
        with quantizer:
            model(**given)
        assert torch.equal(model(**given), before)
        with fake_quantize(model, scheme, table=table):
            model(**given)
    q, k, v, kept = caught["args"]
    kinds = layout(name)
    k = k[:, kinds.key_heads(q.shape[1], k.shape[1])]
    parts = zip(*kinds.value_heads(q.shape[1], v.shape[1]), strict=True)
    v = torch.cat([v[:, list(part)] for part in parts], -1)
    kept = kept.bool()
    seen = (
        torch.ones(20, 20, dtype=torch.bool).tril() & kept[:, None, None] & kept[:, None, :, None]
    )
    ((site, clipping),) = quantizer.clipping.items()
    fixed = Fixed(*table.range(scheme, site)) if table is not None else None
    expected, near, clipped = materialised(q, k, v, scheme, seen, heads.scale, fixed)
    gap = torch.where(near.any(-1, keepdim=True), 0.0, (caught["out"] - expected).abs())
    assert gap.max() < 1e-4
    assert abs(int(clipping.clipped.sum()) - clipped) <= int(near.sum())
    assert (clipped > 0) == scheme.static
    assert (clipping.seen == int(seen.sum())).all()
    assert clipping.share == pytest.approx(clipped / (q.shape[1] * int(seen.sum())), abs=1e-3)


def test_sixteen_bits_change_nothing():
    model = MODELS["llama"]()
    with torch.no_grad():
        plain = model(**batch()).logits
        with fake_quantize(model, Scheme(SITE, 16)):
            assert torch.equal(model(**batch()).logits, plain)
        with fake_quantize(model):
            assert torch.equal(model(**batch()).logits, plain)


def test_recording_while_quantizing_sees_the_logits_before():
    model = MODELS["diff_v2"]()
    scheme = Scheme(SITE, 3)
    with torch.no_grad(), record(model) as recorder:
        model(**batch())
    plain = recorder.profile()
    for outer in (True, False):
        first, second = (record(model), fake_quantize(model, scheme))
        with torch.no_grad(), first if outer else second, second if outer else first:
            model(**batch())
        seen = first.profile()
        assert seen.attention_logits.count == plain.attention_logits.count
        # In the first layer nothing was quantized before.
        a, b = seen.attention_logits.sites[0], plain.attention_logits.sites[0]
        assert np.array_equal(a.max, b.max)
        assert not np.array_equal(
            seen.attention_logits.sites[1].max, plain.attention_logits.sites[1].max
        )


def test_two_contexts_on_one_site_are_refused():
    model = MODELS["llama"]()
    with (
        fake_quantize(model, Scheme(SITE, 8)),
        pytest.raises(QuantizationError, match="quantized already"),
        fake_quantize(model, Scheme(SITE, 4)),
    ):
        pass
    with pytest.raises(UsageError, match="two schemes for attention_logits"):
        fake_quantize(model, Scheme(SITE, 8), Scheme(SITE, 4))
    with torch.no_grad(), fake_quantize(model, Scheme(SITE, 8)):
        model(**batch())


def test_an_exception_leaves_the_model_as_it_was():
    model = MODELS["llama"]()

    def state():
        return {
            name: (sorted(vars(m)), type(vars(m).get("config")))
            for name, m in model.named_modules()
        }

    before = state()
    handle = model.model.layers[1].mlp.register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError), fake_quantize(model, Scheme(SITE, 8)):
        model(**batch())
    handle.remove()
    assert state() == before


def test_a_static_range_needs_a_table():
    with pytest.raises(UsageError, match=r"the range mse comes from a calibration: give table="):
        fake_quantize(MODELS["llama"](), Scheme(SITE, 8, "mse"))


def test_nan_is_refused_with_its_layer():
    model = MODELS["llama"]()
    model.model.layers[1].self_attn.q_proj.weight.data[0] = float("nan")
    for granularity in ("tensor", "row"):
        scheme = Scheme(SITE, 8, granularity=granularity)
        with (
            torch.no_grad(),
            pytest.raises(QuantizationError, match=r"NaN or infinity .*model\.layers\.1"),
            fake_quantize(model, scheme),
        ):
            model(**batch())


def test_attention_that_is_something_else_is_refused():
    import transformers.models.llama.modeling_llama as module

    model, real = MODELS["llama"](), module.eager_attention_forward
    model.set_attn_implementation("eager")
    module.eager_attention_forward = lambda *args, **kwargs: (2 * real(*args, **kwargs)[0], None)
    try:
        with (
            pytest.raises((QuantizationError, RecordingError), match="something in between"),
            fake_quantize(model, Scheme(SITE, 8)),
        ):
            model(**batch())
    finally:
        module.eager_attention_forward = real


def test_training_under_quantization():
    model = MODELS["diffllama"]()
    with fake_quantize(model, Scheme(SITE, 4)):
        given = batch()
        model(**given, labels=given["input_ids"]).loss.backward()
    gradients = [p.grad for name, p in model.named_parameters() if "q_proj" in name]
    assert all(torch.isfinite(g).all() and g.abs().max() > 0 for g in gradients)


def test_gradient_checkpointing_is_refused():
    """The second computation would know nothing of the padding."""
    model = MODELS["llama"]().train()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    given = batch()
    with fake_quantize(model, Scheme(SITE, 4)):
        loss = model(**given, labels=given["input_ids"]).loss
        with pytest.raises(QuantizationError, match="gradient checkpointing does not go with"):
            loss.backward()


def test_contexts_may_be_left_in_any_order():
    model = MODELS["llama"]()
    with torch.no_grad():
        plain = model(**batch()).logits
        recorder, quantizer = record(model), fake_quantize(model, Scheme(SITE, 3))
        for first, second in ((recorder, quantizer), (quantizer, recorder)):
            first.__enter__()
            second.__enter__()
            first.__exit__()
            changed = not torch.equal(model(**batch()).logits, plain)
            assert changed == (second is quantizer)
            second.__exit__()
            assert torch.equal(model(**batch()).logits, plain)
            assert "forward" not in vars(model)
            assert "forward" not in vars(model.model)


def test_weights_that_are_not_computed_are_not_returned():
    model, ids = tiny_llama(attn_implementation="eager"), tiny_ids()
    with torch.no_grad():
        with fake_quantize(model, Scheme(SITE, 4)):
            with pytest.raises(QuantizationError, match="output_attentions"):
                model(input_ids=ids, output_attentions=True)
            model(input_ids=ids, output_attentions=False)
            model.config.output_attentions = True
            with pytest.raises(QuantizationError, match="output_attentions"):
                model(input_ids=ids)
        with fake_quantize(model, Scheme("weights", 4)):
            assert len(model(input_ids=ids).attentions) == model.config.num_hidden_layers


def test_layers_that_a_recording_must_be_told():
    model = torch.nn.ModuleDict({"first": torch.nn.Linear(8, 8), "second": torch.nn.Identity()})
    with pytest.raises(QuantizationError, match=r"no list of like blocks.*for recording alone"):
        fake_quantize(model, Scheme(SITE, 8))
