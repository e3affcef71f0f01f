"""Keys, values, attention maps, linear inputs, hidden states and weights against plain fp64."""

import dataclasses
import threading
import warnings

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, MixtralConfig, MixtralForCausalLM
from transformers.cache_utils import DynamicCache, DynamicLayer

from quantdiff import QuantizationError, Scheme, UsageError, fake_quantize
from quantdiff.attention import layout
from quantdiff.errors import LeftAloneWarning
from tests import reference
from tests.hooks.test_any_module import NanoGPT
from tests.hooks.test_any_module import make as make_plain
from tests.hooks.test_differential import OWN, Small
from tests.hooks.test_recorder import CACHE
from tests.quantization.test_fake_quantize import MODELS, SITE, Fixed, batch
from tests.quantization.test_gptq import tiny_opt, with_experts
from tests.standins import CAUSAL, IDS, C, D, DiffAttention, MotifAttention, make
from tests.tiny import SETTINGS, VOCABULARY, build, tiny_diffllama, tiny_ids

KV = ("token", "head", "channel", "group:4")
LAYOUTS = (*OWN, "halves")
WIDTHS = range(2, 9)
SMALL = 1e-6  # of the largest value


def on_grids(x, over, kept, scheme, reach=2e-5):
    """x with a grid over each group of its dimensions, fp64, and where either side is right.

    Args:
        x: any shape.
        over: the dimensions that share a grid.
        kept: bool, broadcastable to x: what sets the ranges, which hold zero.
        scheme: its bits and symmetry.
        reach: how near to a boundary chance decides, in steps: at 255 of them a division in fp32
            is off by 1.5e-5.
    """
    x = x.double()
    inside = torch.where(kept, x, 0.0)
    least, most = inside.amin(over, keepdim=True), inside.amax(over, keepdim=True)
    if scheme.symmetric:
        high = 2 ** (scheme.bits - 1) - 1
        low, span = -high, torch.maximum(-least, most)
    else:
        high, least, most = 2**scheme.bits - 1, least.clamp(max=0), most.clamp(min=0)
        low, span = 0, most - least
    step = (span / high).float().double()
    step = torch.where(step == 0, 1.0, step)
    zero = torch.zeros_like(step) if scheme.symmetric else (-least / step).round()
    y = x / step
    near = ((y - y.floor() - 0.5).abs() < reach) & kept
    return ((y.round() + zero).clamp(low, high) - zero) * step, near


def in_cache(x, kept, scheme, reach=2e-5):
    """Keys or values, (B, G, M, D), as a quantized cache holds them; kept: (B, M)."""
    real = kept[:, None, :, None]
    if scheme.group is None:
        over = {"token": (3,), "head": (2, 3), "channel": (2,)}[scheme.granularity]
        return on_grids(x, over, real, scheme, reach)
    parts = on_grids(x.unflatten(-1, (-1, scheme.group)), (4,), real[..., None], scheme, reach)
    return tuple(part.flatten(-2) for part in parts)


def reached(name, q, k, v, seen):
    """Where in the output, (B, H, N, w), the chosen keys and values, bool as those, count."""
    k, v = arranged(name, q, k, v)
    by_key = (seen & k.any(-1)[:, :, None]).any(-1, keepdim=True)
    return by_key | (seen.double() @ v.double() > 0)


def check(found, expected, unsure, share=0.05):
    """Equal, but for what a value on a boundary counts in; that may be a small share."""
    gap = torch.where(unsure, 0.0, (found - expected).abs()).max()
    assert gap <= SMALL * (1 + expected.abs().max())
    assert unsure.double().mean() <= share


def cached(caught):
    """Queries, keys and values as a cache holds them, real tokens, what is seen."""
    q, k, v, kept = caught["args"]
    kept = kept.bool()
    causal = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool).tril()
    return q, k, v, kept, causal & kept[:, None, :, None] & kept[:, None, None]


def arranged(name, q, k, v):
    """Keys of every query head, and values of every head's width."""
    kinds = layout(name)
    parts = zip(*kinds.value_heads(q.shape[1], v.shape[1]), strict=True)
    wide = torch.cat([v[:, list(part)] for part in parts], -1)
    return k[:, kinds.key_heads(q.shape[1], k.shape[1])], wide


def maps_and_values(q, k, v, seen, scale):
    x = reference.logits(q, k, scale)
    weights = torch.where(seen, x.masked_fill(~seen, -torch.inf).softmax(-1), 0.0).nan_to_num()
    v = v.double().repeat_interleave(q.shape[1] // v.shape[1], 1)
    return weights, v


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


def rounded_maps(weights, wide, seen, bits, granularity):
    """The output with rounded weights, and which rows have one at a boundary."""
    over = {"tensor": (1, 2, 3), "head": (2, 3), "row": (3,)}[granularity]
    step = (weights.amax(over, keepdim=True) / (2**bits - 1)).float().double()
    step = torch.where(step == 0, 1.0, step)
    y = weights / step
    # An fp32 softmax is off by some 1e-6 of a weight.
    unsure = (((y - y.floor() - 0.5).abs() < 2e-6 * 2**bits) & seen).any(-1, keepdim=True)
    return y.round() * step @ wide, unsure


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


def gpt2(**options):
    """Its linear modules are transformers' Conv1D, whose weights lie by input."""
    config = GPT2Config(vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=4, **options)
    return build(GPT2LMHeadModel, config)


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


def in_passes(model, given, cuts=(12, 13, 14, 17, 18, 19, 20)):
    """Gives what a model computes, in passes up to each of some tokens, with a cache."""
    cache, first = DynamicCache(), 0
    ids, mask = given["input_ids"], given["attention_mask"]
    places = (mask.cumsum(1) - 1).clamp(min=0)
    for last in cuts:
        part = {"input_ids": ids[:, first:last], "attention_mask": mask[:, :last]}
        if isinstance(model, Small):
            yield model(**part, cache=cache)
        else:
            part["position_ids"] = places[:, first:last]
            yield model(**part, use_cache=True, **{CACHE: cache})
        first = last


def whole_and_decoded(model, caught, *schemes):
    """What attention gives, (B, H, N, w), in passes with a cache, and last in one."""
    with torch.no_grad(), fake_quantize(model, *schemes):
        found = torch.cat([caught["out"] for _ in in_passes(model, batch())], 2)
        for _ in in_passes(model, batch(), (20,)):
            pass
    return found, caught["out"]


# Sums over other shapes round otherwise, and so may what lies this near to a boundary, in steps.
REACH = 1e-4


@pytest.mark.parametrize("newest", [0, 4])
@pytest.mark.parametrize("name", LAYOUTS)
def test_prefill_and_decode_are_one_pass(module_case, name, newest):
    """With left padding, for the granularities in which no later token matters."""
    model, scale, caught = module_case(name)
    keys = Scheme("keys", 4, newest=newest)
    values = Scheme("values", 3, granularity="group:2", newest=newest)
    found, whole = whole_and_decoded(model, caught, keys, values)
    q, k, v, kept, seen = cached(caught)
    near = (in_cache(x, kept, scheme, REACH)[1] for x, scheme in ((k, keys), (v, values)))
    check(found, whole, reached(name, q, *near, seen), share=0.5)
    weights, wide = maps_and_values(q, *arranged(name, q, k, v), seen, scale)
    assert (found - weights @ wide).abs().max() > 1e-2
    if newest:
        return
    for site, bits in ((SITE, 6), ("attention_maps", 4)):
        scheme = Scheme(site, bits, granularity="row")
        found, whole = whole_and_decoded(model, caught, scheme)
        q, k, v, kept, seen = cached(caught)
        k, v = arranged(name, q, k, v)
        x = reference.logits(q, k, scale)
        _, near = on_grids(x, (3,), seen, scheme, REACH)
        unsure = near.any(-1, keepdim=True)
        if site == "attention_maps":
            weights, wide = maps_and_values(q, k, v, seen, scale)
            _, unsure = rounded_maps(weights, wide, seen, 4, "row")
        check(found, whole, unsure)


@pytest.mark.parametrize(
    "schemes",
    [
        [Scheme("linear_inputs", 6, granularity="token"), Scheme("weights", 8)],
        [Scheme("hidden_states", 6, granularity="token")],
    ],
    ids=lambda schemes: "+".join(s.site for s in schemes),
)
def test_prefill_and_decode_of_tokens(schemes):
    model = tiny_diffllama(num_hidden_layers=1, num_attention_heads=8, num_key_value_heads=4)
    assert all(scheme.causal for scheme in schemes)
    layer, came = model.model.layers[0], {}
    for name, module in layer.named_modules():
        if isinstance(module, nn.Linear):
            keep = lambda m, args, name=name: came.update({name: args[0]})  # noqa: E731
            module.register_forward_pre_hook(keep)
    layer.register_forward_hook(lambda m, args, out: came.update(hidden=out))
    with torch.no_grad(), fake_quantize(model, *schemes):
        found = torch.cat([out.logits for out in in_passes(model, batch())], 1)
        (whole,) = (out.logits for out in in_passes(model, batch(), (20,)))
    real = batch()["attention_mask"].bool()
    unsure = ~real
    for name, x in came.items():
        if (name == "hidden") != (schemes[0].site == "hidden_states"):
            continue
        near = on_grids(x, (2,), torch.tensor(True), schemes[0], REACH)[1].any(-1)
        attended = name in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
        unsure |= (near & real).cumsum(1) > 0 if attended else near
    check(found, whole, unsure[..., None], share=0.6)


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


def test_a_model_without_linear_modules():
    model = nn.ModuleDict({"layers": nn.ModuleList([nn.Identity(), nn.Identity()])})
    with pytest.raises(QuantizationError, match="no linear module"):
        fake_quantize(model, Scheme("weights", 8))


LAYERED = [
    Scheme(SITE, 3), Scheme("keys", 3), Scheme("attention_maps", 3), Scheme("linear_inputs", 3),
    Scheme("hidden_states", 3), Scheme("weights", 3),
]  # fmt: skip


@pytest.mark.parametrize("site", ["weights", "linear_inputs"])
class TestWeightsThatAreLeftAlone:
    def test_packed_experts_are_named(self, site):
        config = MixtralConfig(**SETTINGS, num_local_experts=4, num_experts_per_tok=2, head_dim=8)
        model = build(MixtralForCausalLM, config)
        for layers, first in ((None, 0), ((1,), 1)):
            words = rf"layers\.{first}\.mlp\.experts\.\S+, \(4, .* no linear module: {site} of it"
            with pytest.warns(LeftAloneWarning, match=words) as seen:
                fake_quantize(model, Scheme(site, 4, layers=layers))
            assert len(seen) == 1

    def test_nothing_is_said_of_other_models(self, site):
        for model in (gpt2(), *(kind() for kind in MODELS.values())):
            with warnings.catch_warnings():
                warnings.simplefilter("error", LeftAloneWarning)
                fake_quantize(model, Scheme(site, 4))


def of_layers(scheme, layers, bits=None):
    return dataclasses.replace(scheme, layers=layers, bits=bits or scheme.bits)


@pytest.mark.parametrize("scheme", LAYERED, ids=lambda scheme: scheme.site)
@pytest.mark.parametrize("name", MODELS)
def test_some_layers_only(name, scheme):
    model, given = MODELS[name](), batch()
    outs = {}

    def run(*schemes):
        kept = []
        handles = [
            layer.register_forward_hook(
                lambda m, args, out: kept.append(out[0] if isinstance(out, tuple) else out)
            )
            for layer in model.model.layers
        ]
        with torch.no_grad(), fake_quantize(model, *schemes):
            kept.append(model(**given).logits)
        for handle in handles:
            handle.remove()
        return kept

    outs = {
        "none": run(), "all": run(scheme), "first": run(of_layers(scheme, (0,))),
        "last": run(of_layers(scheme, (1,))),
        "each": run(of_layers(scheme, (0,)), of_layers(scheme, (1,))),
        "mixed": run(of_layers(scheme, (0,), 8), of_layers(scheme, (1,), 2)),
    }  # fmt: skip
    assert len(outs["none"]) == 3  # two layers and the logits
    assert torch.equal(outs["each"][-1], outs["all"][-1])
    assert torch.equal(outs["last"][0], outs["none"][0])
    assert not torch.equal(outs["last"][-1], outs["none"][-1])
    assert not torch.equal(outs["first"][-1], outs["all"][-1])
    assert not torch.equal(outs["mixed"][-1], outs["all"][-1])


def test_layers_that_do_not_go():
    model = MODELS["llama"]()
    with pytest.raises(UsageError, match=r"layers are numbers from 0, at least one, not \(\)"):
        Scheme(SITE, 4, layers=())
    with pytest.raises(UsageError, match="two schemes for attention_logits"):
        fake_quantize(model, Scheme(SITE, 4), Scheme(SITE, 8, layers=(1,)))
    with pytest.raises(UsageError, match=r"layer 2 of a scheme for keys: .* layers 0 to 1"):
        fake_quantize(model, Scheme("keys", 4, layers=(0, 2)))


def test_maps_of_their_own_in_some_layers():
    model = make(MotifAttention, model_type="Motif")
    with torch.no_grad():
        plain = model(IDS)
        with fake_quantize(model, Scheme(SITE, 3, layers=(1,))):
            one = model(IDS)
        with fake_quantize(model, Scheme(SITE, 3)):
            both = model(IDS)
        assert torch.equal(model(IDS), plain)
    assert not torch.equal(one, plain)
    assert not torch.equal(one, both)


def test_measured_first_with_the_keys_that_are_used():
    """One layer whose maps are calls of their own: 2-bit keys change the range of the logits."""
    model = make(MotifAttention, layers=1, model_type="Motif")
    keys = Scheme("keys", 2, granularity="head")
    with torch.no_grad(), fake_quantize(model, keys, Scheme(SITE, 5)):
        found = model(IDS)
        # The same range by hand: all calls of the module at once.
    module = model.blocks[0].attn
    q, k = module.seen
    k, _ = in_cache(k, torch.ones(len(k), k.shape[2], dtype=torch.bool), keys)
    kinds = layout("adjacent")
    x = reference.logits(q, k[:, kinds.key_heads(q.shape[1], k.shape[1])], D**-0.5)
    seen = x[:, :, CAUSAL]  # (B, H, entries)
    ends = Fixed(*(v.float().expand(q.shape[1]).numpy() for v in (seen.min(), seen.max())))
    with torch.no_grad(), fake_quantize(model, keys, Scheme(SITE, 5, "absmax"), table=ends):
        expected = model(IDS)
    per_sequence = seen.abs().amax((1, 2))
    b = int(per_sequence.argmax())  # the sequence that sets the range over both
    assert (found[b] - expected[b]).abs().max() < 1e-4


def test_a_cache_of_a_fixed_size():
    from transformers import StaticCache

    model, ids = MODELS["llama"](), batch()["input_ids"][:1]
    schemes = [Scheme("keys", 8), Scheme("values", 8, granularity="head")]
    with torch.no_grad(), fake_quantize(model, *schemes):
        whole = model(input_ids=ids).logits
        cache = StaticCache(config=model.config, max_cache_len=32)
        found = model(input_ids=ids, past_key_values=cache, use_cache=True).logits
    assert (found - whole).abs().max() < 1e-3


def test_ranges_of_sequences_need_the_padding():
    """A ready mask tells it only where attention reads it, which is too late."""
    model, (ids, kept) = MODELS["llama"](), batch().values()
    causal = torch.ones(20, 20, dtype=torch.bool).tril() & kept.bool()[:, None, None]
    ready = torch.zeros(2, 1, 20, 20).masked_fill(~causal, torch.finfo(torch.float32).min)
    for site in ("linear_inputs", "hidden_states"):
        refused = pytest.raises(QuantizationError, match="needs the 2-D mask of the padding")
        with torch.no_grad(), refused, fake_quantize(model, Scheme(site, 8)):
            model(input_ids=ids, attention_mask=ready)
        with torch.no_grad(), fake_quantize(model, Scheme(site, 8, granularity="token")):
            model(input_ids=ids, attention_mask=ready)


@pytest.mark.parametrize("inner_first", [True, False])
def test_a_decoder_and_the_model_around_it_are_one(inner_first):
    model = MODELS["llama"]()
    first, second = (model.model, model) if inner_first else (model, model.model)
    with (
        fake_quantize(first, Scheme("weights", 8)),
        pytest.raises(QuantizationError, match="quantized already"),
        fake_quantize(second, Scheme("weights", 8)),
    ):
        pass


def test_two_threads_measure_modules_of_their_own():
    """As a server may run one model; each pass has its own ranges."""
    model = make(DiffAttention, model_type="Motif")
    others = (IDS + 7) % 300
    scheme = Scheme(SITE, 3)
    with fake_quantize(model, scheme), torch.no_grad():
        expected = [model(IDS), model(others)]
    found = [[], []]

    def run(number, ids):
        with torch.no_grad():
            found[number] += [model(ids) for _ in range(12)]

    with fake_quantize(model, scheme):
        threads = [threading.Thread(target=run, args=x) for x in enumerate((IDS, others))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    for number in range(2):
        assert len(found[number]) == 12
        assert all(torch.equal(x, expected[number]) for x in found[number])


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


@pytest.mark.parametrize("site", ["keys", "values", SITE])
def test_a_cache_that_the_pass_does_not_know_is_refused(site):
    """Its tokens would count as room of a cache of a fixed size."""
    torch.manual_seed(0)
    model = Small(lambda i: OWN["adjacent"](i, "sdpa"), layers=1).eval()
    cache, attention_ = DynamicLayer(), model.blocks[0].attention
    forward = attention_.forward
    attention_.forward = lambda x, rel_pos, *_: forward(x, rel_pos, None, cache)
    with torch.no_grad(), fake_quantize(model, Scheme(site, 8)):
        model(batch()["input_ids"][:1, :8])
        with pytest.raises(QuantizationError, match=r"attends to 12 keys .* knows of 4 tokens"):
            model(batch()["input_ids"][:1, 8:12])


def test_the_tokens_of_an_expert_are_not_those_of_the_pass():
    """Though they are as many."""
    model, given = with_experts(), batch()
    refused = pytest.raises(QuantizationError, match=r"experts\.0, \(40, 32\), are not known to be")
    with torch.no_grad():
        with refused, fake_quantize(model, Scheme("linear_inputs", 3, granularity="tensor")):
            model(**given)
        with fake_quantize(model, Scheme("linear_inputs", 8, granularity="token")):
            found = model(**given).logits
            for ids, kept, one in zip(*given.values(), found, strict=True):
                alone = model(input_ids=ids[kept.bool()][None]).logits[0]
                assert (alone - one[kept.bool()]).abs().max() < 1e-4


def test_tokens_of_all_sequences_one_after_the_other():
    """As OPT's feed-forward parts get them: a range of each sequence is known."""
    model, given = tiny_opt(), batch()
    with torch.no_grad(), fake_quantize(model, Scheme("linear_inputs", 8, granularity="tensor")):
        whole = model(**given).logits
        for ids, kept, one in zip(*given.values(), whole, strict=True):
            alone = model(input_ids=ids[kept.bool()][None]).logits[0]
            assert (alone - one[kept.bool()]).abs().max() < 1e-3


@pytest.mark.parametrize("whole", [False, True], ids=["parameter", "module"])
def test_layers_that_share_weights_share_their_scheme(whole):
    model = MODELS["llama"]()
    one, other = (layer.mlp for layer in model.model.layers)
    if whole:
        other.up_proj = one.up_proj
    else:
        other.up_proj.weight = one.up_proj.weight
    first, second = (Scheme("weights", bits, layers=(i,)) for i, bits in enumerate((8, 2)))
    refused = r"up_proj shares its weights with layer [01], for which there is another"
    for schemes in ((first, second), (first,)):
        with pytest.raises(QuantizationError, match=refused):
            fake_quantize(model, *schemes)
    with torch.no_grad():
        found = []
        for schemes in ((first, of_layers(first, (1,))), (Scheme("weights", 8),)):
            with fake_quantize(model, *schemes):
                found.append(model(**batch()).logits)
    assert torch.equal(*found)


class Mixed(nn.Module):
    """A block whose one module is torch's own, and a linear module that is used by its weight."""

    def __init__(self):
        super().__init__()
        self.attn = nn.MultiheadAttention(C, 4, batch_first=True)
        self.mlp = nn.Linear(C, C)
        self.calls = True

    def forward(self, x):
        x = x + self.attn(x, x, x, need_weights=False)[0]
        return x + (self.mlp(x) if self.calls else F.linear(x, self.mlp.weight))


def test_linear_modules_that_are_used_past_their_hooks():
    torch.manual_seed(0)
    model = nn.ModuleDict({"layers": nn.ModuleList(Mixed() for _ in range(2))}).eval()

    def forward(inputs_embeds):
        for layer in model.layers:
            inputs_embeds = layer(inputs_embeds)
        return inputs_embeds

    model.forward = forward
    x, scheme = torch.randn(1, 5, C), Scheme("linear_inputs", 3)
    with pytest.warns(LeftAloneWarning, match=r"layers\.0\.attn\.out_proj is used by torch"):
        quantizer = fake_quantize(model, scheme)
    with torch.no_grad(), quantizer:
        model(inputs_embeds=x)
        for layer in model.layers:
            layer.calls = False
        with pytest.raises(QuantizationError, match=r"none of the 2 linear modules .* ran"):
            model(inputs_embeds=x)
