"""The newest keys and values stay as they are, for each query its own, and heads by themselves."""

import json
from dataclasses import asdict, replace

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from quantdiff import QuantizationError, Scheme, UsageError, fake_quantize
from quantdiff.export.card import scheme_in_words
from quantdiff.quantization import attention
from tests.hooks.test_any_module import Attention, NanoGPT
from tests.hooks.test_any_module import make as make_plain
from tests.quantization.plain_sites import (
    LAYOUTS,
    REACH,
    WIDTHS,
    arranged,
    cached,
    check,
    in_cache,
    maps_and_values,
    on_grids,
    reached,
)
from tests.quantization.test_fake_quantize import MODELS, SITE, batch
from tests.standins import IDS, MotifAttention, make
from tests.tiny import tiny_diff_v2, tiny_diffllama, tiny_llama


@pytest.fixture(params=[False, True], ids=["whole", "small"])
def blocks(request, monkeypatch):
    """The usual blocks, and some of a few rows each."""
    if request.param:
        monkeypatch.setattr(attention, "BLOCK_ELEMENTS", 64)


def rows_apart(q, k, v, seen, scale, newest, logits=None):
    """The output, query by query, in fp64; k and v: pairs of rounded and exact; newest: of both.

    `logits` changes those of all queries together, (B, H, N, M), before the softmax.
    """
    n = q.shape[2]
    keys, values = (
        [rounded.double().repeat_interleave(q.shape[1] // rounded.shape[1], 1),
         exact.double().repeat_interleave(q.shape[1] // exact.shape[1], 1)]
        for rounded, exact in (k, v)
    )  # fmt: skip
    x = torch.zeros(*q.shape[:3], n, dtype=torch.float64)
    for i in range(n):
        old = torch.arange(n) <= i - newest[0]
        met = torch.where(old[:, None], *keys)
        x[:, :, i] = (q[:, :, i : i + 1].double() @ met.mT * scale)[:, :, 0]
    if logits is not None:
        x = logits(x)
    weights = torch.where(seen, x.masked_fill(~seen, -torch.inf).softmax(-1), 0.0).nan_to_num()
    out = torch.zeros(*q.shape[:3], values[0].shape[-1], dtype=torch.float64)
    for i in range(n):
        old = torch.arange(n) <= i - newest[1]
        met = torch.where(old[:, None], *values)
        out[:, :, i] = (weights[:, :, i : i + 1] @ met)[:, :, 0]
    return out


@pytest.mark.parametrize("granularity", ["token", "head", "channel", "group:4"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_against_each_query_by_itself(blocks, module_case, name, granularity):
    """Padding on either side: columns are as far apart as places."""
    model, scale, caught = module_case(name)
    left = batch()
    right = {name: x.flip(1) for name, x in left.items()}
    windows = ((3, 0), (0, 5), (7, 2), (1, 100), (2, 2), (5, 1), (19, 3))
    for bits, newest in zip(WIDTHS, windows, strict=True):
        schemes = [
            Scheme(site, bits, "dynamic", granularity, symmetric=False, newest=count)
            for site, count in zip(("keys", "values"), newest, strict=True)
        ]
        with torch.no_grad(), fake_quantize(model, *schemes):
            model(**(left if bits % 2 else right))
        q, k, v, kept, seen = cached(caught)
        rounded_k, near_k = in_cache(k, kept, schemes[0])
        rounded_v, near_v = in_cache(v, kept, schemes[1])
        unsure = reached(name, q, near_k, near_v, seen)
        rounded_k, rounded_v = arranged(name, q, rounded_k, rounded_v)
        k, v = arranged(name, q, k, v)
        expected = rows_apart(q, (rounded_k, k), (rounded_v, v), seen, scale, newest)
        check(caught["out"], expected, unsure, share=0.3)


@pytest.mark.parametrize("granularity", ["tensor", "head", "row"])
def test_ranges_of_logits_are_over_those_that_are_met(module_case, granularity):
    """A dynamic range over what the queries really meet, rounded keys and newest ones."""
    model, scale, caught = module_case("none")
    keys = Scheme("keys", 2, newest=4)
    logits = Scheme(SITE, 6, granularity=granularity)
    with torch.no_grad(), fake_quantize(model, keys, logits):
        model(**batch())
    q, k, v, kept, seen = cached(caught)
    rounded, near = in_cache(k, kept, keys)
    unsure = [reached("none", q, near, torch.zeros(v.shape, dtype=torch.bool), seen)]

    def rounded_logits(x):
        over = {"tensor": (1, 2, 3), "head": (2, 3), "row": (3,)}[granularity]
        found, near = on_grids(x, over, seen, logits, REACH)
        unsure.append(near.any(-1, keepdim=True))
        return found

    expected = rows_apart(q, (rounded, k), (v, v), seen, scale, (4, 0), rounded_logits)
    check(caught["out"], expected, unsure[0] | unsure[1])


ONE_LAYER = {
    "none": lambda: tiny_llama(num_hidden_layers=1),
    "halves": lambda: tiny_diffllama(num_hidden_layers=1),
    "adjacent_shared": lambda: tiny_diff_v2(num_hidden_layers=1),
}


@pytest.mark.parametrize("name", ONE_LAYER)
def test_padding_moves_no_window(watch, name):
    """Left, right and none; and a padded prompt that a decoded token follows."""
    model, ids = ONE_LAYER[name](), batch()["input_ids"][:1, :13]
    caught = watch(model)
    schemes = [Scheme("keys", 3, newest=4), Scheme("values", 3, newest=4)]
    pads = torch.zeros(1, 5, dtype=torch.long)
    with torch.no_grad(), fake_quantize(model, *schemes):
        model(input_ids=ids)
        alone = caught["out"]
        q, k, v, kept, seen = cached(caught)
        near = (
            in_cache(x, kept, scheme, REACH)[1] for x, scheme in zip((k, v), schemes, strict=True)
        )
        unsure = reached(name, q, *near, seen)
        for order in ((pads, ids), (ids, pads)):
            mask = torch.cat([torch.full_like(x, int(x is ids)) for x in order], 1)
            places = (mask.cumsum(1) - 1).clamp(min=0)
            model(input_ids=torch.cat(order, 1), attention_mask=mask, position_ids=places)
            check(caught["out"][:, :, mask[0].bool()], alone, unsure, share=0.5)
        # Twelve tokens, five of padding, the thirteenth.
        prompt = torch.cat([ids[:, :12], pads], 1)
        mask = torch.ones(1, 18, dtype=torch.long)
        mask[:, 12:17] = 0
        out = model(input_ids=prompt, attention_mask=mask[:, :17], use_cache=True)
        model(
            input_ids=ids[:, 12:], attention_mask=mask, past_key_values=out.past_key_values,
            position_ids=torch.tensor([[12]]),
        )  # fmt: skip
    check(caught["out"], alone[:, :, 12:], unsure[:, :, 12:], share=0.5)
    weights, wide = maps_and_values(q, *arranged(name, q, k, v), seen, q.shape[-1] ** -0.5)
    plain = weights @ wide
    # The first tokens meet nothing but the newest.
    check(alone[:, :, :4], plain[:, :, :4], torch.tensor(False))
    assert (alone - plain).abs().max() > 1e-2


def test_generated_text_is_quantized_as_it_would_be_deployed():
    model, ids = MODELS["llama"](), batch()["input_ids"][:1, :8]
    with torch.no_grad(), fake_quantize(model, Scheme("keys", 3, newest=4), Scheme("values", 3)):
        written = model.generate(ids, max_new_tokens=8, do_sample=False, pad_token_id=0)
        logits = model(input_ids=written).logits
    assert written.shape[1] > 12
    assert torch.equal(logits[0, 7:-1].argmax(-1), written[0, 8:])


@pytest.mark.parametrize("name", MODELS)
def test_gradients_are_those_of_what_was_met(name):
    """With 8 bits nearly the plain ones; with a window over everything just these."""
    model, given = MODELS[name](), batch()
    gradients = []
    for schemes in (
        [], [Scheme("keys", 2, newest=100), Scheme("values", 2, newest=100)],
        [Scheme("keys", 8, newest=3), Scheme("values", 8, newest=6)],
    ):  # fmt: skip
        model.zero_grad()
        with fake_quantize(model, *schemes):
            loss = model(**given).logits[given["attention_mask"].bool()].square().mean()
        loss.backward()
        gradients.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    plain, everything, some = gradients
    assert (everything - plain).abs().max() < 1e-4 * plain.abs().max()
    assert torch.nn.functional.cosine_similarity(plain, some, dim=0) > 0.99


class Repeated(Attention):
    """Gives its keys and values once for each query head."""

    def forward(self, x):
        widths = [16, 4 * self.kv_heads, 4 * self.kv_heads]
        q, k, v = (t.unflatten(-1, (-1, 4)).transpose(1, 2) for t in self.qkv(x).split(widths, -1))
        k, v = (t.repeat_interleave(q.shape[1] // self.kv_heads, 1) for t in (k, v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(out.transpose(1, 2).flatten(2))


@pytest.mark.parametrize("site", ["keys", "values"])
def test_a_token_that_attends_those_behind_it_has_no_newest(site):
    model, ids = make_plain(NanoGPT, layers=1), IDS % 50
    refused = pytest.raises(QuantizationError, match=r"attend those behind it.* leave newest at 0")
    with torch.no_grad(), refused, fake_quantize(model, Scheme(site, 4, newest=2)):
        model(ids)
    causal = torch.ones(11, 11, dtype=torch.bool).tril()
    for given in ({"is_causal": True}, {"attn_mask": causal}):
        with torch.no_grad(), fake_quantize(model, Scheme(site, 4, newest=2)):
            model(ids, **given)


def test_what_has_no_newest_tokens():
    with pytest.raises(UsageError, match="attention_logits keep no newest tokens"):
        Scheme(SITE, 4, newest=3)
    with pytest.raises(UsageError, match="a number from 0, not -1"):
        Scheme("keys", 4, newest=-1)
    with pytest.raises(UsageError, match="weights have no heads"):
        Scheme("weights", 4, heads=(1,))
    with pytest.raises(UsageError, match=r"heads are numbers from 0, at least one, not \(\)"):
        Scheme("keys", 4, heads=())


def test_a_scheme_survives_json():
    """As a sidecar holds it."""
    scheme = Scheme("keys", 4, newest=5, heads=(2, 0), layers=(1,))
    assert scheme.heads == (0, 2)
    assert Scheme(**json.loads(json.dumps(asdict(scheme)))) == scheme
    assert scheme_in_words(scheme).endswith(
        "but for the newest 5 tokens, in layer 1, in heads 0, 2"
    )


class TestHeads:
    @pytest.mark.parametrize("granularity", ["token", "channel"])
    @pytest.mark.parametrize("site", ["keys", "values"])
    @pytest.mark.parametrize("name", LAYOUTS)
    def test_keys_and_values(self, module_case, name, site, granularity):
        model, scale, caught = module_case(name)
        scheme = Scheme(site, 3, granularity=granularity, heads=(1,))
        with torch.no_grad(), fake_quantize(model, scheme):
            model(**batch())
        q, k, v, kept, seen = cached(caught)
        found = {"keys": k.double(), "values": v.double()}
        near = {kind: torch.zeros(x.shape, dtype=torch.bool) for kind, x in found.items()}
        chosen = torch.arange(k.shape[1])[:, None, None] == 1
        rounded, close = in_cache(found[site], kept, scheme)
        found[site], near[site] = torch.where(chosen, rounded, found[site]), close & chosen
        weights, wide = maps_and_values(q, *arranged(name, q, *found.values()), seen, scale)
        check(caught["out"], weights @ wide, reached(name, q, *near.values(), seen), share=0.3)

    @pytest.mark.parametrize("symmetric", [True, False])
    @pytest.mark.parametrize("granularity", ["tensor", "head", "row"])
    @pytest.mark.parametrize("site", [SITE, "attention_maps"])
    def test_logits_and_maps(self, blocks, module_case, site, granularity, symmetric):
        """Of the heads that a scheme is for, what it gives for all; of the others, the plain."""
        model, _, caught = module_case("adjacent_shared")
        outs = []
        scheme = Scheme(site, 3, "dynamic", granularity, symmetric)
        for one in (scheme, replace(scheme, heads=(0, 3)), replace(scheme, bits=16)):
            with torch.no_grad(), fake_quantize(model, one):
                model(**batch())
            outs.append(caught["out"])
        every, some, plain = outs
        chosen = torch.isin(torch.arange(every.shape[1]), torch.tensor([0, 3]))
        assert (some - every)[:, chosen].abs().max() < 1e-5
        assert (some - plain)[:, ~chosen].abs().max() < 1e-5
        assert (every - plain)[:, ~chosen].abs().max() > 1e-3

    def test_clipped_logits_are_counted_in_the_heads_that_are_quantized(self):
        model, given = MODELS["llama"](), batch()
        counts = []
        for heads in (None, (2,)):
            scheme = Scheme(SITE, 4, granularity="row", symmetric=False, heads=heads)
            quantizer = fake_quantize(model, scheme, count_clipped=True)
            with torch.no_grad(), quantizer:
                model(**given)
            counts.append(quantizer.clipping["model.layers.0.self_attn"])
        every, one = counts
        chosen = np.arange(len(every.seen)) == 2
        assert one.seen.tolist() == (every.seen * chosen).tolist()
        assert one.clipped.tolist() == (every.clipped * chosen).tolist()
        assert one.seen.sum() > 0

    @pytest.mark.parametrize("site", [SITE, "attention_maps", "keys", "values"])
    @pytest.mark.parametrize("name", MODELS)
    def test_all_heads_are_all_of_them(self, name, site):
        """Also where a model attends twice, with half of its values each."""
        model, given = MODELS[name](), batch()
        config = model.config
        count = (
            config.num_key_value_heads if site in ("keys", "values") else config.num_attention_heads
        )
        outs = []
        for heads in (None, tuple(range(count)), *((n,) for n in range(count))):
            with torch.no_grad(), fake_quantize(model, Scheme(site, 3, heads=heads, layers=(0,))):
                outs.append(model(**given).logits[given["attention_mask"].bool()])
        whole, named, *one = outs
        assert (whole - named).abs().max() < 1e-5 * whole.abs().max()
        for a in range(count):
            assert (one[a] - whole).abs().max() > 1e-3 or count == 1
            for b in range(a):
                assert (one[a] - one[b]).abs().max() > 1e-3
        refused = pytest.raises(UsageError, match=f"head {count} of a scheme for {site}.* 0 to")
        with torch.no_grad(), refused, fake_quantize(model, Scheme(site, 3, heads=(count,))):
            model(**given)

    @pytest.mark.parametrize("granularity", ["token", "channel"])
    @pytest.mark.parametrize("site", ["keys", "values"])
    def test_heads_that_a_model_repeats_by_itself_count_once(self, site, granularity):
        model, ids = make_plain(NanoGPT, layers=1, kv_heads=2, is_causal=True, enable_gqa=True), IDS
        ids, outs = ids % 50, []
        schemes = [Scheme(site, 3, granularity=granularity, heads=h) for h in ((0,), (1,), (0, 1))]
        with torch.no_grad():
            for kind in (Attention, Repeated):
                model.blocks[0].attention.__class__ = kind
                for scheme in schemes:
                    with fake_quantize(model, scheme):
                        outs.append(model(ids))
            for one, other in zip(outs[:3], outs[3:], strict=True):
                assert (one - other).abs().max() < 1e-5
            assert (outs[0] - outs[1]).abs().max() > 1e-3
            refused = pytest.raises(UsageError, match=f"head 2 of a scheme for {site}.* 0 to 1")
            with refused, fake_quantize(model, replace(schemes[0], heads=(2,))):
                model(ids)

    def test_maps_that_are_calls_of_their_own(self):
        model = make(MotifAttention, layers=1, model_type="Motif")
        outs = []
        with torch.no_grad():
            plain = model(IDS)
            for heads in ((0,), (1,), (0, 1), None):
                with fake_quantize(model, Scheme(SITE, 3, granularity="head", heads=heads)):
                    outs.append(model(IDS))
            refused = pytest.raises(QuantizationError, match="which key-value heads")
            with refused, fake_quantize(model, Scheme("keys", 3, heads=(0,))):
                model(IDS)
        for a, b in ((0, 1), (0, 2), (1, 2), (2, 3)):
            assert not torch.equal(outs[a], outs[b])
        assert all(not torch.equal(out, plain) for out in outs)
