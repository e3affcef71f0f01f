"""Decoding with a cache gives what one pass gives, and caches that are not known are refused."""

import pytest
import torch
from torch import nn
from transformers.cache_utils import DynamicCache, DynamicLayer

from quantdiff import QuantizationError, Scheme, fake_quantize
from tests import reference
from tests.hooks.test_differential import OWN, Small
from tests.hooks.test_recorder import CACHE
from tests.quantization.plain_sites import (
    LAYOUTS,
    REACH,
    arranged,
    cached,
    check,
    in_cache,
    maps_and_values,
    on_grids,
    reached,
    rounded_maps,
)
from tests.quantization.test_fake_quantize import MODELS, SITE, batch
from tests.tiny import tiny_diffllama


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


def test_a_cache_of_a_fixed_size():
    from transformers import StaticCache

    model, ids = MODELS["llama"](), batch()["input_ids"][:1]
    schemes = [Scheme("keys", 8), Scheme("values", 8, granularity="head")]
    with torch.no_grad(), fake_quantize(model, *schemes):
        whole = model(input_ids=ids).logits
        cache = StaticCache(config=model.config, max_cache_len=32)
        found = model(input_ids=ids, past_key_values=cache, use_cache=True).logits
    assert (found - whole).abs().max() < 1e-3


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
