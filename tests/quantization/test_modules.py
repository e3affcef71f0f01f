"""Which layers and modules a scheme reaches, and which tokens a module is given."""

import dataclasses
import threading
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers import (
    DynamicCache,
    GPT2Config,
    GPT2LMHeadModel,
    Lfm2Config,
    Lfm2ForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
)

from quantdiff import QuantizationError, Scheme, UsageError, fake_quantize
from quantdiff.attention import MultiheadAttention, layout
from quantdiff.errors import LeftAloneWarning
from tests import reference
from tests.hooks.test_differential import LayerOf
from tests.hooks.test_recorder import CACHE
from tests.quantization.plain_sites import in_cache
from tests.quantization.test_fake_quantize import MODELS, SITE, Fixed, batch
from tests.quantization.test_gptq import tiny_opt, with_experts
from tests.standins import CAUSAL, IDS, C, D, DiffAttention, MotifAttention, make
from tests.tiny import SETTINGS, VOCABULARY, build, tiny_ids, tiny_llama


def gpt2(**options):
    """Its linear modules are transformers' Conv1D, whose weights lie by input."""
    config = GPT2Config(vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=4, **options)
    return build(GPT2LMHeadModel, config)


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


ATTENDING = [
    Scheme(SITE, 3), Scheme("keys", 3), Scheme("values", 3),
    Scheme("attention_maps", 3, granularity="head"), Scheme(SITE, 3, heads=(1,)),
]  # fmt: skip


@pytest.mark.parametrize("scheme", ATTENDING, ids=str)
def test_layers_without_attention(scheme):
    """Else they would be named in a result and not be quantized."""
    config = Lfm2Config(**SETTINGS, layer_types=["conv", "full_attention"])
    mixed = build(Lfm2ForCausalLM, config)
    bare = make(lambda i: MotifAttention(i) if i else None, model_type="Motif")
    for model, ids in ((mixed, tiny_ids()), (bare, IDS)):
        words = rf"layer 0 of a scheme for {scheme.site} .* {type(model).__name__}: leave it out"
        for layers in ((0,), (0, 1)):
            with torch.no_grad(), pytest.raises(QuantizationError, match=words):  # noqa: SIM117
                with fake_quantize(model, of_layers(scheme, layers), Scheme("hidden_states", 8)):
                    model(ids)
        together = of_layers(scheme, (0,)), Scheme("weights", 4, layers=(0,))
        outs = []
        for schemes in (together, together[1:]):  # all that a layer has
            with torch.no_grad(), fake_quantize(model, *schemes):
                outs.append(model(ids))
        assert torch.equal(*(getattr(out, "logits", out) for out in outs))
        if scheme.heads is None or model is mixed:
            outs = []
            for layers in ((1,), None):
                with torch.no_grad(), fake_quantize(model, of_layers(scheme, layers)):
                    outs.append(model(ids))
            first, second = (getattr(out, "logits", out) for out in outs)
            assert torch.equal(first, second)


class Own(nn.Module):
    """quantdiff's attention as the attention of a Llama."""

    def __init__(self):
        super().__init__()
        self.inner = MultiheadAttention(32, 0, 4, 2, rotary="half", backend="sdpa")

    def forward(self, hidden_states, position_embeddings, **given):
        table = tuple(x[..., : self.inner.head_dim // 2] for x in position_embeddings)
        cache = given.get(CACHE)
        own = None if cache is None else LayerOf(cache, 1)
        return self.inner(hidden_states, table, cache=own), None


def test_layers_that_are_left_alone_beside_attention_of_another_kind():
    """A pass that goes on with a cache: the dispatch's own layers are none of the bare calls."""
    torch.manual_seed(0)
    model, ids = tiny_llama(), tiny_ids(2, 9)
    model.model.layers[1].self_attn = Own()
    cache = DynamicCache()
    with torch.no_grad():
        plain = model(input_ids=ids).logits
        with fake_quantize(model, Scheme(SITE, 3, granularity="row", layers=(1,))):
            whole = model(input_ids=ids).logits
            parts = [
                model(input_ids=part, use_cache=True, **{CACHE: cache}).logits
                for part in (ids[:, :8], ids[:, 8:])
            ]
    assert (torch.cat(parts, 1) - whole).abs().max() < 1e-4
    assert (plain - whole).abs().max() > 1e-2


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
