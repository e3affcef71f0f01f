"""Keys, values, attention maps, linear inputs, hidden states and weights against plain fp64."""

import dataclasses
import itertools
import threading
import warnings

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, MixtralConfig, MixtralForCausalLM
from transformers.cache_utils import DynamicLayer

from quantdiff import QuantizationError, Scheme, UsageError, fake_quantize
from quantdiff.attention import layout
from quantdiff.errors import LeftAloneWarning
from tests import reference
from tests.hooks.test_differential import OWN, Small
from tests.quantization.test_fake_quantize import MODELS, SITE, Fixed, batch, grid_of
from tests.quantization.test_gptq import tiny_opt, with_experts
from tests.standins import CAUSAL, IDS, C, D, DiffAttention, MotifAttention, make
from tests.tiny import SETTINGS, VOCABULARY, build

KV = ("token", "head", "channel", "group:4")


def on_grid(values, inside, bits, symmetric):
    """One group of values, fp64, and where they are near a boundary."""
    step, zero, low, high = grid_of(
        *((inside.min(), inside.max()) if len(inside) else (0, 0)), bits, symmetric
    )
    y = values.double() / step
    near = (y - y.floor() - 0.5).abs() < 1e-5
    return ((y.round() + zero).clamp(low, high) - zero) * step, near


def by_group(x, groups, kept, scheme):
    """x with each of the index tuples in `groups` on a grid of its own."""
    out, near = x.double().clone(), torch.zeros(x.shape, dtype=torch.bool)
    for index in groups:
        values, real = x[index].flatten(), kept.expand(x.shape)[index].flatten()
        found, close = on_grid(values, values[real].double(), scheme.bits, scheme.symmetric)
        out[index], near[index] = found.view(x[index].shape), close.view(x[index].shape)
    return out, near


def kv_groups(shape, granularity):
    batch_, heads, tokens, width = shape
    every = slice(None)
    for b, h in itertools.product(range(batch_), range(heads)):
        if granularity == "head":
            yield b, h
        elif granularity == "token":
            yield from ((b, h, n) for n in range(tokens))
        elif granularity == "channel":
            yield from ((b, h, every, c) for c in range(width))
        else:
            size = int(granularity.partition(":")[2])
            starts = range(0, width, size)
            yield from ((b, h, n, slice(c, c + size)) for n in range(tokens) for c in starts)


def module_case(name):
    """A module of one layout, its call, and what it sees."""
    torch.manual_seed(0)
    model = Small(lambda i: OWN[name](i, "sdpa"), layers=1).eval()
    caught = {}
    heads = model.blocks[0].attention.heads
    heads.register_forward_hook(lambda m, args, out: caught.update(args=args, out=out))
    return model, heads, caught


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


def attention(q, k, v, seen, scale):
    x = reference.logits(q, k, scale)
    weights = torch.where(seen, x.masked_fill(~seen, -torch.inf).softmax(-1), 0.0).nan_to_num()
    v = v.double().repeat_interleave(q.shape[1] // v.shape[1], 1)
    return weights, v


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("granularity", KV)
@pytest.mark.parametrize("name", OWN)
def test_keys_and_values_of_every_layout(name, granularity, symmetric):
    model, heads, caught = module_case(name)
    checked = 0
    for bits, sites in ((2, ["keys"]), (3, ["values"]), (5, ["keys", "values"]), (8, ["keys"])):
        schemes = {s: Scheme(s, bits, "dynamic", granularity, symmetric) for s in sites}
        with torch.no_grad(), fake_quantize(model, *schemes.values()):
            model(**batch())
        q, k, v, kept, seen = cached(caught)
        real = kept[:, None, :, None]
        near = torch.zeros(1, dtype=torch.bool)
        if "keys" in schemes:
            k, close = by_group(k, kv_groups(k.shape, granularity), real, schemes["keys"])
            near = near | (close & real).any()
        if "values" in schemes:
            v, close = by_group(v, kv_groups(v.shape, granularity), real, schemes["values"])
            near = near | (close & real).any()
        weights, wide = attention(q, *arranged(name, q, k, v), seen, heads.scale)
        gap = (caught["out"] - weights @ wide).abs().max()
        assert near or gap < 1e-5 * (1 + float(v.abs().max()))
        checked += not near
    assert checked >= 2


@pytest.mark.parametrize("granularity", ["tensor", "head", "row"])
@pytest.mark.parametrize("name", OWN)
def test_attention_maps_of_every_layout(name, granularity):
    model, heads, caught = module_case(name)
    for bits in (2, 4, 8):
        scheme = Scheme("attention_maps", bits, granularity=granularity)
        with torch.no_grad(), fake_quantize(model, scheme):
            model(**batch())
        q, k, v, _, seen = cached(caught)
        weights, wide = attention(q, *arranged(name, q, k, v), seen, heads.scale)
        over = {"tensor": (1, 2, 3), "head": (2, 3), "row": (3,)}[granularity]
        step = (weights.amax(over, keepdim=True) / (2**bits - 1)).float().double()
        step = torch.where(step == 0, 1.0, step)
        y = weights / step
        unsure = (((y - y.floor() - 0.5).abs() < 1e-4) & seen).any(-1, keepdim=True)
        expected = y.round() * step @ wide
        gap = torch.where(unsure, 0.0, (caught["out"] - expected).abs()).max()
        assert gap < 1e-5 * (1 + float(v.abs().max()))
        assert unsure.float().mean() < 0.1


def test_maps_where_a_row_sees_itself_alone_reach_to_one():
    model = MODELS["llama"]()
    with torch.no_grad(), fake_quantize(model, Scheme("attention_maps", 8)):
        a = model(**batch()).logits
    plain = model(**batch()).logits
    assert 0 < (a - plain).abs().max() < 0.5


def test_sites_of_one_call_together():
    """Keys are rounded before the logits, these before the softmax, the maps before the values."""
    name = "adjacent_shared"
    model, heads, caught = module_case(name)
    schemes = [
        Scheme("keys", 8, granularity="token"), Scheme(SITE, 6), Scheme("attention_maps", 8),
        Scheme("values", 8, granularity="token"),
    ]  # fmt: skip
    with torch.no_grad(), fake_quantize(model, *schemes):
        model(**batch())
    q, k, v, kept, seen = cached(caught)
    real = kept[:, None, :, None]
    k, _ = by_group(k, kv_groups(k.shape, "token"), real, schemes[0])
    v, _ = by_group(v, kv_groups(v.shape, "token"), real, schemes[3])
    k, v = arranged(name, q, k, v)
    x = reference.logits(q, k, heads.scale)
    shown = seen.expand(x.shape)
    for b in range(len(x)):
        x[b], _ = on_grid(x[b], x[b][shown[b]], 6, True)
    weights = torch.where(seen, x.masked_fill(~seen, -torch.inf).softmax(-1), 0.0).nan_to_num()
    step = weights.amax((1, 2, 3), keepdim=True) / 255
    weights = (weights / step).round() * step
    expected = weights @ v.repeat_interleave(q.shape[1] // v.shape[1], 1)
    close = (caught["out"] - expected).abs().amax(-1) < 1e-4
    assert close.float().mean() > 0.95  # a value on a boundary goes either way


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
    """Each module by itself: what came, what it gave."""
    model, given = MODELS[name](), batch()
    real = given["attention_mask"].bool()[..., None]
    seen = []
    for module in model.model.layers.modules():
        if isinstance(module, nn.Linear):
            module.register_forward_pre_hook(lambda m, args: seen.append([m, args[0]]))
            module.register_forward_hook(
                lambda m, args, out: next(x for x in reversed(seen) if x[0] is m).append(out)
            )
    for bits in (2, 4, 8):
        seen.clear()
        scheme = Scheme("linear_inputs", bits, granularity=granularity, symmetric=symmetric)
        with torch.no_grad(), fake_quantize(model, scheme):
            model(**given)
        assert len(seen) >= 14
        for module, x, out in seen:
            if granularity == "token":
                groups = itertools.product(range(2), range(x.shape[1]))
                rounded, near = by_group(x, groups, torch.ones(1, dtype=torch.bool), scheme)
            else:
                rounded, near = by_group(x, [(b,) for b in range(2)], real, scheme)
            expected = rounded @ module.weight.double().T
            gap = torch.where(near.any(-1, keepdim=True), 0.0, (out - expected).abs())
            assert gap.max() < 1e-5 * (1 + float(expected.abs().max()))


@pytest.mark.parametrize("granularity", ["token", "tensor"])
@pytest.mark.parametrize("name", MODELS)
def test_hidden_states(name, granularity):
    model, given = MODELS[name](), batch()
    real = given["attention_mask"].bool()[..., None]
    raw, passed = [], []
    layers = model.model.layers
    for layer in layers:
        layer.register_forward_hook(
            lambda m, args, out: raw.append(out[0] if isinstance(out, tuple) else out)
        )
    for layer in layers[1:]:
        layer.register_forward_pre_hook(lambda m, args: passed.append(args[0]))
    scheme = Scheme("hidden_states", 5, granularity=granularity)
    with torch.no_grad(), fake_quantize(model, scheme):
        model(**given)
    for x, found in zip(raw, passed, strict=False):
        groups = [(b,) for b in range(2)]
        if granularity == "token":
            groups = itertools.product(range(2), range(x.shape[1]))
        expected, near = by_group(x, groups, real.expand(x.shape), scheme)
        gap = torch.where(near, 0.0, (found - expected).abs())
        assert gap[real.expand(x.shape)].max() < 1e-5


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("granularity", ["tensor", "channel", "group:8"])
def test_weights(granularity, symmetric):
    model = MODELS["diffllama"]()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    for bits in (2, 4, 8):
        scheme = Scheme("weights", bits, granularity=granularity, symmetric=symmetric)
        with fake_quantize(model, scheme):
            for name, p in model.named_parameters():
                weight = before[name]
                if "_proj.weight" not in name:
                    assert torch.equal(p, weight), name
                    continue
                rows, columns = weight.shape
                groups = [()]
                if granularity == "channel":
                    groups = [(r,) for r in range(rows)]
                elif granularity != "tensor":
                    starts = range(0, columns, 8)
                    groups = [(r, slice(c, c + 8)) for r in range(rows) for c in starts]
                expected, near = by_group(weight, groups, torch.ones(1, dtype=torch.bool), scheme)
                assert torch.where(near, 0.0, (p - expected).abs()).max() < 1e-6
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


@pytest.mark.parametrize(
    "schemes",
    [
        [Scheme("keys", 4, granularity="token"), Scheme("values", 4, granularity="group:2")],
        [Scheme(SITE, 6, granularity="row")],
        [Scheme("attention_maps", 8, granularity="row")],
        [Scheme("linear_inputs", 8, granularity="token"), Scheme("weights", 8)],
        [Scheme("hidden_states", 8, granularity="token")],
    ],
    ids=lambda schemes: "+".join(s.site for s in schemes),
)
def test_prefill_and_decode_are_one_pass(schemes):
    """With a cache, for the granularities in which no later token matters."""
    model = MODELS["diffllama"]()
    ids = batch()["input_ids"][:1]
    assert all(scheme.causal for scheme in schemes)
    with torch.no_grad(), fake_quantize(model, *schemes):
        whole = model(input_ids=ids).logits
        out = model(input_ids=ids[:, :12], use_cache=True)
        parts = [out.logits]
        for n in range(12, ids.shape[1]):
            out = model(
                input_ids=ids[:, n : n + 1], past_key_values=out.past_key_values, use_cache=True
            )
            parts.append(out.logits)
    gap = (torch.cat(parts, 1) - whole).abs().amax(-1)
    assert (gap < 1e-4).float().mean() > 0.8  # a value on a boundary goes either way


def test_w8a8_is_what_integers_compute():
    """The accumulators of an int8 product, and with their steps the fake-quantized output."""
    torch.manual_seed(0)
    model = MODELS["llama"]()
    module = model.model.layers[0].mlp.down_proj
    caught = {}
    module.register_forward_pre_hook(lambda m, args: caught.update(x=args[0]))
    module.register_forward_hook(lambda m, args, out: caught.update(out=out))
    weight = module.weight.detach().clone()
    schemes = [
        Scheme("linear_inputs", 8, granularity="token"),
        Scheme("weights", 8, granularity="channel"),
    ]
    ids = torch.randint(0, 100, (1, 24))  # the product wants more than 16 rows
    with torch.no_grad(), fake_quantize(model, *schemes):
        model(input_ids=ids)
    x, out = caught["x"][0], caught["out"][0]
    step_x, step_w = ((v.abs().amax(-1, keepdim=True).double() / 127).float() for v in (x, weight))
    a, w = (torch.round(v / s).to(torch.int8) for v, s in ((x, step_x), (weight, step_w)))
    accumulators = torch._int_mm(a, w.T.contiguous())
    assert accumulators.dtype == torch.int32
    assert torch.equal(accumulators.long(), a.long() @ w.long().T)
    real = accumulators.double() * step_x.double() * step_w.double().T
    assert torch.allclose(out.double(), real, rtol=1e-5, atol=1e-6 * float(real.abs().max()))


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
        config = GPT2Config(vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=4)
        for model in (build(GPT2LMHeadModel, config), *(kind() for kind in MODELS.values())):
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
    k, _ = by_group(k, kv_groups(k.shape, "head"), torch.ones(1, dtype=torch.bool), keys)
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
