"""Keys, values, attention maps, linear inputs, hidden states and weights against plain fp64."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from quantdiff import QuantizationError, Scheme, fake_quantize
from tests import reference
from tests.hooks.test_any_module import NanoGPT
from tests.hooks.test_any_module import make as make_plain
from tests.quantization.plain_sites import (
    LAYOUTS,
    SMALL,
    WIDTHS,
    arranged,
    cached,
    check,
    in_cache,
    maps_and_values,
    on_grids,
    reached,
    rounded_maps,
)
from tests.quantization.test_fake_quantize import MODELS, SITE, Fixed, batch
from tests.quantization.test_modules import gpt2
from tests.standins import CAUSAL, IDS, D, DiffAttention, MotifAttention, make
from tests.tiny import tiny_ids

KV = ("token", "head", "channel", "group:4")


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("granularity", KV)
@pytest.mark.parametrize("name", LAYOUTS)
def test_keys_and_values_of_every_layout(module_case, name, granularity, symmetric):
    model, scale, caught = module_case(name)
    both = ("keys", "values")
    for bits, sites in ((4, ["keys"]), (4, ["values"]), *((bits, both) for bits in WIDTHS)):
        schemes = [Scheme(site, bits, "dynamic", granularity, symmetric) for site in sites]
        with torch.no_grad(), fake_quantize(model, *schemes):
            model(**batch())
        q, k, v, kept, seen = cached(caught)
        found = {"keys": k.double(), "values": v.double()}
        near = {site: torch.zeros(x.shape, dtype=torch.bool) for site, x in found.items()}
        for scheme in schemes:
            found[scheme.site], near[scheme.site] = in_cache(found[scheme.site], kept, scheme)
        weights, wide = maps_and_values(q, *arranged(name, q, *found.values()), seen, scale)
        check(caught["out"], weights @ wide, reached(name, q, *near.values(), seen), share=0.3)


@pytest.mark.parametrize("granularity", ["tensor", "row"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_attention_maps_of_every_layout(module_case, name, granularity):
    model, scale, caught = module_case(name)
    for bits in WIDTHS:
        scheme = Scheme("attention_maps", bits, granularity=granularity)
        with torch.no_grad(), fake_quantize(model, scheme):
            model(**batch())
        q, k, v, _, seen = cached(caught)
        weights, wide = maps_and_values(q, *arranged(name, q, k, v), seen, scale)
        check(caught["out"], *rounded_maps(weights, wide, seen, bits, granularity))


@pytest.mark.parametrize("granularity", ["tensor", "head", "row"])
def test_maps_that_are_not_causal(granularity):
    """No row sees itself alone, so that each head has a largest weight of its own."""
    model = make_plain(NanoGPT, layers=1, kv_heads=2, enable_gqa=True)
    module, caught = model.blocks[0].attention, {}
    module.qkv.register_forward_hook(lambda m, args, out: caught.update(qkv=out))
    module.out.register_forward_pre_hook(lambda m, args: caught.update(out=args[0]))
    for bits in WIDTHS:
        with (
            torch.no_grad(),
            fake_quantize(model, Scheme("attention_maps", bits, granularity=granularity)),
        ):
            model(IDS % 50)
        q, k, v = (
            x.unflatten(-1, (-1, 4)).transpose(1, 2) for x in caught["qkv"].split([16, 8, 8], -1)
        )
        seen = torch.ones(11, 11, dtype=torch.bool)
        weights, wide = maps_and_values(q, k, v, seen, 0.5)
        peaks = weights.amax((2, 3))
        assert (peaks.amax(1) - peaks.amin(1)).min() > 0.05
        found = caught["out"].unflatten(-1, (4, 4)).transpose(1, 2)
        check(found, *rounded_maps(weights, wide, seen, bits, granularity))


def test_maps_where_a_row_sees_itself_alone_reach_to_one():
    model = MODELS["llama"]()
    with torch.no_grad(), fake_quantize(model, Scheme("attention_maps", 8)):
        a = model(**batch()).logits
    plain = model(**batch()).logits
    assert 0 < (a - plain).abs().max() < 0.5


def test_sites_of_one_call_together(module_case):
    """Keys are rounded before the logits, these before the softmax, the maps before the values."""
    name = "adjacent_shared"
    model, scale, caught = module_case(name)
    schemes = [
        Scheme("keys", 8, granularity="token"), Scheme(SITE, 6), Scheme("attention_maps", 8),
        Scheme("values", 8, granularity="token"),
    ]  # fmt: skip
    with torch.no_grad(), fake_quantize(model, *schemes):
        model(**batch())
    q, k, v, kept, seen = cached(caught)
    k, near_k = in_cache(k, kept, schemes[0])
    v, near_v = in_cache(v, kept, schemes[3])
    unsure = reached(name, q, near_k, near_v, seen)
    k, v = arranged(name, q, k, v)
    x, near = on_grids(reference.logits(q, k, scale), (1, 2, 3), seen, schemes[1], 1e-4)
    weights = torch.where(seen, x.masked_fill(~seen, -torch.inf).softmax(-1), 0.0).nan_to_num()
    expected, near_maps = rounded_maps(weights, v, seen, 8, "tensor")
    check(caught["out"], expected, unsure | near.any(-1, keepdim=True) | near_maps, share=0.2)


@pytest.mark.parametrize("build", [DiffAttention, MotifAttention])
def test_keys_of_models_that_attend_by_themselves(build):
    model = make(build, layers=1, model_type="Motif")
    module = model.blocks[0].attn
    with torch.no_grad():
        plain = model(IDS)
        with fake_quantize(model, Scheme("keys", 3, granularity="token")):
            assert not torch.equal(model(IDS), plain)
        with fake_quantize(model, Scheme("attention_maps", 4, granularity="head")):
            assert not torch.equal(model(IDS), plain)
        refused = pytest.raises(QuantizationError, match="a range over the weights of both")
        with refused, fake_quantize(model, Scheme("attention_maps", 4)):
            model(IDS)
        assert torch.equal(model(IDS), plain)
    assert module.seen[0].shape[-1] == D
    assert len(CAUSAL) == IDS.shape[1]


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("granularity", ["token", "tensor"])
@pytest.mark.parametrize("name", MODELS)
def test_linear_inputs(name, granularity, symmetric):
    """Each module by itself: what came, what it computes with."""
    model, given = MODELS[name](), batch()
    real = given["attention_mask"].bool()[..., None]
    came, used = [], []
    for module in model.model.layers.modules():
        if isinstance(module, nn.Linear):
            module.register_forward_pre_hook(lambda m, args: came.append(args[0]))
            module.register_forward_hook(lambda m, args, out: used.append(args[0]))
    for bits in WIDTHS:
        came.clear()
        used.clear()
        scheme = Scheme("linear_inputs", bits, granularity=granularity, symmetric=symmetric)
        with torch.no_grad(), fake_quantize(model, scheme):
            model(**given)
        assert len(came) >= 14
        for x, found in zip(came, used, strict=True):
            if granularity == "token":
                rounded = on_grids(x, (2,), torch.tensor(True), scheme)
            else:
                rounded = on_grids(x, (1, 2), real, scheme)
            check(found, *rounded)


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("granularity", ["token", "tensor"])
@pytest.mark.parametrize("name", MODELS)
def test_hidden_states(name, granularity, symmetric):
    """Behind each layer, and what the next one is given, or the norm behind the last."""
    model, given = MODELS[name](), batch()
    real = given["attention_mask"].bool()[..., None]
    raw, passed = [], []
    layers = model.model.layers
    for layer, behind in zip(layers, [*layers[1:], model.model.norm], strict=True):
        layer.register_forward_hook(
            lambda m, args, out: raw.append(out[0] if isinstance(out, tuple) else out)
        )
        behind.register_forward_pre_hook(lambda m, args: passed.append(args[0]))
    for bits in WIDTHS:
        raw.clear()
        passed.clear()
        scheme = Scheme("hidden_states", bits, granularity=granularity, symmetric=symmetric)
        with torch.no_grad(), fake_quantize(model, scheme):
            model(**given)
        assert len(raw) == 2
        for x, found in zip(raw, passed, strict=True):
            over = (2,) if granularity == "token" else (1, 2)
            expected, near = on_grids(x, over, real, scheme)
            check(found, expected, near | ~real, share=0.2)  # 6 of 40 tokens are padding


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("granularity", ["tensor", "channel", "group:8"])
@pytest.mark.parametrize(("make", "linear"), [(MODELS["diffllama"], "_proj."), (gpt2, ".c_")])
def test_weights(make, linear, granularity, symmetric):
    model = make()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    for bits in WIDTHS:
        scheme = Scheme("weights", bits, granularity=granularity, symmetric=symmetric)
        count = 0
        with fake_quantize(model, scheme):
            for name, p in model.named_parameters():
                weight, found = before[name], p.detach()
                if linear not in name or p.dim() != 2:
                    assert torch.equal(p, weight), name
                    continue
                count += 1
                if make is gpt2:  # (in, out)
                    weight, found = weight.T, found.T
                over = {"tensor": (0, 1), "channel": (1,), "group:8": (2,)}[granularity]
                if scheme.group is not None:
                    weight, found = (w.unflatten(1, (-1, 8)) for w in (weight, found))
                check(found, *on_grids(weight, over, torch.tensor(True), scheme))
        assert count == (8 if make is gpt2 else 14)
        for name, p in model.named_parameters():
            assert torch.equal(p, before[name]), name


def test_weights_are_put_back_after_an_exception():
    model = MODELS["llama"]()
    before = model.model.layers[0].mlp.up_proj.weight
    data = before.detach().clone()
    quantizer = fake_quantize(model, Scheme("weights", 4), Scheme("keys", 4))
    model.model.layers[1].mlp.register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError), quantizer:
        model(**batch())
    assert model.model.layers[0].mlp.up_proj.weight is before
    assert torch.equal(before, data)


def test_group_sizes_that_do_not_divide():
    model = MODELS["llama"]()
    with pytest.raises(QuantizationError, match=r"groups of 7 do not divide the \d+ channels"):
        fake_quantize(model, Scheme("weights", 4, granularity="group:7"))
    refused = pytest.raises(QuantizationError, match="groups of 5 do not divide the 4 channels")
    with refused, fake_quantize(model, Scheme("keys", 4, granularity="group:5")):
        model(**batch())


def test_w8a8_is_what_integers_compute():
    """The very integers of int8 tensors in each module, and with their steps its output."""
    model, caught = MODELS["llama"](), {}
    linears = [m for m in model.model.layers.modules() if isinstance(m, nn.Linear)]
    plain = {module: module.weight.detach().clone() for module in linears}

    def used(module, args, out):
        caught[module] += [args[0][0], module.weight.detach(), out[0]]

    for module in linears:
        module.register_forward_pre_hook(lambda m, args: caught.update({m: [args[0][0]]}))
        module.register_forward_hook(used)
    schemes = [
        Scheme("linear_inputs", 8, granularity="token"),
        Scheme("weights", 8, granularity="channel"),
    ]
    with torch.no_grad(), fake_quantize(model, *schemes):
        model(input_ids=tiny_ids(1, 24))  # the product wants more than 16 rows
    assert len(caught) == 14
    for module, (x, rounded_x, rounded_w, out) in caught.items():
        integers, steps = [], []
        for plain_one, rounded in ((x, rounded_x), (plain[module], rounded_w)):
            step = (plain_one.abs().amax(-1, keepdim=True).double() / 127).float()
            wanted = torch.round(plain_one / step).to(torch.int8)
            found = rounded.double() / step.double()
            assert (found - found.round()).abs().max() < 1e-4
            assert torch.equal(found.round().to(torch.int8), wanted)
            integers.append(wanted)
            steps.append(step.double())
        a, w = integers
        accumulators = torch._int_mm(a, w.T.contiguous())
        assert accumulators.dtype == torch.int32
        real = accumulators.double() * steps[0] * steps[1].T
        assert (out - real).abs().max() <= SMALL * (1 + real.abs().max())


def test_gradients_pass_straight_through():
    model = MODELS["diff_v2"]()
    given = batch()
    schemes = [
        Scheme("keys", 8), Scheme("values", 8), Scheme(SITE, 8), Scheme("attention_maps", 8),
        Scheme("linear_inputs", 8, granularity="token"), Scheme("hidden_states", 8),
        Scheme("weights", 8, granularity="channel"),
    ]  # fmt: skip
    gradients = []
    for context in (fake_quantize(model), fake_quantize(model, *schemes)):
        model.zero_grad()
        with context:
            loss = model(**given).logits[given["attention_mask"].bool()].square().mean()
        loss.backward()
        gradients.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    assert F.cosine_similarity(*gradients, dim=0) > 0.95


def test_one_context_at_a_time():
    model = MODELS["llama"]()
    with (
        fake_quantize(model, Scheme("weights", 8)),
        pytest.raises(QuantizationError, match="give all schemes to one"),
        fake_quantize(model, Scheme("keys", 8)),
    ):
        pass


@pytest.mark.parametrize("name", MODELS)
def test_each_logit_is_counted_once(name):
    """DiffLlama attends twice with the same queries and keys, for the halves of its values."""
    model, given = MODELS[name](), batch()
    table = Fixed(np.full(8, -1, np.float32), np.full(8, 1, np.float32))
    scheme = Scheme(SITE, 4, "absmax")
    for backend in ("sdpa", "eager"):
        model.set_attn_implementation(backend)
        quantizer = fake_quantize(model, scheme, table=table, count_clipped=True)
        with torch.no_grad(), quantizer:
            model(**given)
        kept = given["attention_mask"].sum(1)
        for clipping in quantizer.clipping.values():
            assert (clipping.seen == int((kept * (kept + 1) // 2).sum())).all()
            assert 0 < clipping.share < 1
