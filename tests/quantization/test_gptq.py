"""GPTQ against the plain algorithm, and on models."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from transformers import (
    Gemma4ForCausalLM,
    Gemma4TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    OPTConfig,
    OPTForCausalLM,
)
from transformers.pytorch_utils import Conv1D

from quantdiff import QuantizationError, Scheme, UsageError, fake_quantize
from quantdiff.quantization import gptq
from quantdiff.quantization.gptq import gptq_rounded, gptq_weight
from quantdiff.quantization.grid import Grid
from tests.hooks.test_practice import nf4_llama
from tests.quantization.test_fake_quantize import MODELS, batch
from tests.tiny import SETTINGS, VOCABULARY, build, tiny_ids


def correlated(width, tokens, seed=0):
    """Inputs, (tokens, width) fp64, whose channels go together, some large and one always zero."""
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(tokens, max(width // 3, 1), generator=generator, dtype=torch.float64)
    mixed = hidden @ torch.randn(hidden.shape[1], width, generator=generator, dtype=torch.float64)
    x = mixed + 0.3 * torch.randn(tokens, width, generator=generator, dtype=torch.float64)
    x[:, 1] *= 8
    x[:, width // 2] = 0
    return x


def hessian_of(x):
    return 2 * x.T @ x


def step_by_step(weight, hessian, scheme, act_order=False, damping=0.01):
    """Column by column, with a new inverse for each: O(n⁴) in all, and nothing to get wrong."""
    seen = hessian.diagonal() > 0
    mean = hessian.diagonal().mean()
    h = (
        hessian
        + torch.diag(torch.where(seen, 0.0, mean))
        + damping * mean * torch.eye(len(hessian), dtype=torch.float64)
    )
    w, out = weight.double().clone(), weight.double().clone()
    left = list(range(w.shape[1]))
    if act_order:
        left = hessian.diagonal().argsort(descending=True, stable=True).tolist()
    grids = {}
    while left:
        j = left[0]
        if scheme.group is None:
            key, source = 0, weight
        else:
            key = j // scheme.group
            columns = slice(key * scheme.group, (key + 1) * scheme.group)
            source = (weight.double() if act_order else w)[:, columns]
        if key not in grids:
            over = (0, 1) if scheme.granularity == "tensor" else (1,)
            ends = source.amin(over, keepdim=True), source.amax(over, keepdim=True)
            grids[key] = Grid.of(*ends, scheme.bits, scheme.symmetric)
        inverse = torch.linalg.inv(h[left][:, left])
        rounded = grids[key].quantize(w[:, j : j + 1])
        error = (w[:, j : j + 1] - rounded) / inverse[0, 0]
        w[:, left] -= error * inverse[0]
        out[:, j : j + 1] = rounded
        left = left[1:]
    return out.to(weight.dtype)


def nearest(weight, scheme):
    if scheme.group is not None:
        parts = weight.unflatten(1, (-1, scheme.group))
        ends = parts.amin(2, keepdim=True), parts.amax(2, keepdim=True)
        return Grid.of(*ends, scheme.bits, scheme.symmetric).quantize(parts).flatten(1)
    over = (0, 1) if scheme.granularity == "tensor" else (1,)
    ends = weight.amin(over, keepdim=True), weight.amax(over, keepdim=True)
    return Grid.of(*ends, scheme.bits, scheme.symmetric).quantize(weight)


@pytest.mark.parametrize("block", [128, 5])
@pytest.mark.parametrize("act_order", [False, True])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("granularity", ["tensor", "channel", "group:6"])
def test_column_by_column(monkeypatch, granularity, symmetric, act_order, block):
    monkeypatch.setattr(gptq, "_BLOCK", block)
    torch.manual_seed(0)
    weight, x = torch.randn(7, 24), correlated(24, 60)
    for bits in (2, 3, 4, 8):
        scheme = Scheme("weights", bits, granularity=granularity, symmetric=symmetric)
        found = gptq_weight(weight, hessian_of(x), scheme, act_order=act_order)
        expected = step_by_step(weight, hessian_of(x), scheme, act_order)
        assert (found - expected).abs().max() < 1e-6
        assert found.dtype == weight.dtype


@settings(max_examples=40)
@given(
    bits=st.integers(2, 8), rows=st.integers(1, 6), width=st.integers(2, 40),
    seed=st.integers(0, 1000), symmetric=st.booleans(),
)  # fmt: skip
def test_the_output_is_nearer_than_that_of_rounding_to_nearest(bits, rows, width, seed, symmetric):
    """Of a matrix whose inputs go together: the error of the outputs over the text."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(rows * 8, width, generator=generator)
    scheme = Scheme("weights", bits, granularity="channel", symmetric=symmetric)
    x = correlated(width, 4 * width, seed)
    found = gptq_weight(weight, hessian_of(x), scheme)
    errors = [
        float(((weight - one).double() @ x.T).square().sum())
        for one in (found, nearest(weight, scheme))
    ]
    assert errors[0] <= errors[1] * 1.02
    # All of it on the grid of rounding to nearest, of the weights as they were.
    least, most = weight.amin(1, keepdim=True), weight.amax(1, keepdim=True)
    grid = Grid.of(least, most, bits, symmetric)
    assert torch.allclose(grid.quantize(found), found, atol=1e-6)


def test_inputs_that_have_nothing_to_do_with_each_other_are_rounded_to_nearest():
    """To the very same points, those half way between two included."""
    torch.manual_seed(0)
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        weight = torch.randn(64, 64).to(dtype)
        for granularity in ("tensor", "channel", "group:16"):
            scheme = Scheme("weights", 4, granularity=granularity, symmetric=False)
            expected = nearest(weight, scheme).to(dtype)
            for diagonal in (torch.rand(64).double() + 0.1, torch.zeros(64).double()):
                found = gptq_weight(weight, torch.diag(diagonal), scheme)
                assert torch.equal(found, expected)


class TestDamping:
    def test_more_of_it_where_there_is_no_factor(self):
        """As rounding may leave a Hessian: an eigenvalue of −3 % of the mean."""
        torch.manual_seed(0)
        weight, h = torch.randn(5, 12), hessian_of(correlated(12, 40))
        h[6, 6] = h.diagonal().mean()  # of the input that is always zero
        values, vectors = torch.linalg.eigh(h)
        values[0] = -0.03 * h.diagonal().mean()
        broken = vectors @ torch.diag(values) @ vectors.T
        scheme = Scheme("weights", 3, granularity="channel")
        found = gptq_weight(weight, broken, scheme)
        # Ten times as much, since 1 % leave it below zero.
        expected = step_by_step(weight, broken, scheme, damping=0.1)
        assert torch.allclose(found, expected, atol=1e-6)

    def test_never_enough(self):
        h = -torch.eye(4).double()
        h[0, 0] = 0.5
        with pytest.raises(QuantizationError, match=r"inputs of here leave GPTQ no Cholesky"):
            gptq_weight(torch.randn(3, 4), h, Scheme("weights", 4), "here")

    def test_inputs_that_are_not_finite(self):
        h = torch.eye(4).double()
        h[1, 2] = torch.nan
        with pytest.raises(QuantizationError, match="NaN or infinity among the inputs of here"):
            gptq_weight(torch.randn(3, 4), h, Scheme("weights", 4), "here")


def spoiled(name):
    """A model whose layers have inputs that go together."""
    model = MODELS[name]()
    with torch.no_grad():
        for layer in model.model.layers:
            layer.input_layernorm.weight[3] *= 10
            layer.post_attention_layernorm.weight[5] *= 10
    return model


@pytest.mark.parametrize("name", MODELS)
def test_a_model_is_nearer_to_the_plain_one_and_comes_back(name):
    model, text = spoiled(name), [batch(), batch()]
    scheme = Scheme("weights", 3, granularity="channel")
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    real = text[0]["attention_mask"].bool()
    with torch.no_grad():
        plain = model(**text[0]).logits[real]
        errors = []
        for context in (gptq_rounded(model, text, scheme), fake_quantize(model, scheme)):
            with context:
                errors.append(float((model(**text[0]).logits[real] - plain).square().mean()))
                changed = {n for n, p in model.named_parameters() if not torch.equal(p, before[n])}
                assert changed == {n for n in before if "_proj.weight" in n}
        assert torch.equal(model(**text[0]).logits[real], plain)
    assert errors[0] < errors[1]
    for n, p in model.named_parameters():
        assert torch.equal(p, before[n]), n


@pytest.mark.parametrize("granularity", ["channel", "group:8"])
@pytest.mark.parametrize("name", MODELS)
def test_every_module_sees_the_inputs_that_the_rounded_layers_before_it_give(name, granularity):
    """Module by module: the plain algorithm on inputs caught in a pass of the whole model."""
    model, text = MODELS[name](), batch()
    scheme = Scheme("weights", 4, granularity=granularity)
    real = text["attention_mask"].bool()
    with gptq_rounded(model, [text], scheme):
        found = {n: p.detach().clone() for n, p in model.named_parameters() if "_proj" in n}
    for number, layer in enumerate(model.model.layers):
        caught = {}
        handles = [
            m.register_forward_pre_hook(lambda m, args, n=n, to=caught: to.update({n: args[0]}))
            for n, m in layer.named_modules()
            if isinstance(m, nn.Linear)
        ]
        with torch.no_grad():
            model(**text)
        for handle in handles:
            handle.remove()
        for n, x in caught.items():
            module, rounded = layer.get_submodule(n), found[f"model.layers.{number}.{n}.weight"]
            expected = step_by_step(module.weight.detach(), hessian_of(x[real].double()), scheme)
            apart = (rounded - expected).abs() > 1e-5
            assert apart.any(1).float().mean() < 0.1  # one on a boundary moves those behind it
        with torch.no_grad():
            for n in caught:
                layer.get_submodule(n).weight.copy_(found[f"model.layers.{number}.{n}.weight"])


@pytest.mark.parametrize("act_order", [False, True])
@pytest.mark.parametrize("granularity", ["channel", "group:8"])
def test_weights_that_lie_by_input(granularity, act_order):
    """Those of GPT-2's Conv1D: the plain algorithm on what comes into each of them."""
    config = GPT2Config(vocab_size=VOCABULARY, n_embd=32, n_inner=48, n_layer=1, n_head=4)
    model, text, came = build(GPT2LMHeadModel, config), batch(), {}
    modules = {m: m.weight.detach().clone() for m in model.modules() if isinstance(m, Conv1D)}
    handles = [
        m.register_forward_pre_hook(lambda m, args: came.update({m: args[0]})) for m in modules
    ]
    with torch.no_grad():
        model(**text)
    for handle in handles:
        handle.remove()
    scheme, real = Scheme("weights", 4, granularity=granularity), text["attention_mask"].bool()
    with gptq_rounded(model, [text], scheme, act_order=act_order):
        for module, plain in modules.items():
            hessian = hessian_of(came[module][real].double())
            expected = step_by_step(plain.T, hessian, scheme, act_order)
            apart = (module.weight.detach().T - expected).abs() > 1e-5
            assert apart.any(1).float().mean() < 0.1  # one on a boundary moves those behind it
    assert len(came) == 4
    assert all(torch.equal(module.weight, plain) for module, plain in modules.items())


def test_some_layers_alone():
    model = MODELS["llama"]()
    scheme = Scheme("weights", 3, granularity="channel", layers=(1,))
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    with gptq_rounded(model, [batch()], scheme):
        changed = {n for n, p in model.named_parameters() if not torch.equal(p, before[n])}
    assert changed == {n for n in before if ".1." in n and "_proj" in n}
    with gptq_rounded(model, [batch()], replace(scheme, bits=16)):
        assert all(torch.equal(p, before[n]) for n, p in model.named_parameters())


def tiny_opt():
    """Its feed-forward parts are given the tokens of all sequences one after the other."""
    config = OPTConfig(
        vocab_size=VOCABULARY, hidden_size=32, word_embed_proj_dim=32, ffn_dim=48,
        num_hidden_layers=2, num_attention_heads=4, max_position_embeddings=64, init_std=0.2,
        dropout=0.0,
    )  # fmt: skip
    return build(OPTForCausalLM, config)


@pytest.mark.parametrize("make", [MODELS["llama"], tiny_opt])
def test_padding_counts_for_nothing(make):
    model, text = make(), batch()
    scheme = Scheme("weights", 3, granularity="channel")
    alone = [
        {"input_ids": ids[kept.bool()][None]}
        for ids, kept in zip(text["input_ids"], text["attention_mask"], strict=True)
    ]
    found = []
    for work in ([text], alone):
        with gptq_rounded(model, work, scheme):
            found.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    assert ((found[0] - found[1]).abs() > 1e-5).float().mean() < 0.02


def test_what_does_not_go():
    model, text = MODELS["llama"](), [batch()]
    scheme = Scheme("weights", 4, granularity="channel")
    before = model.model.layers[0].mlp.up_proj.weight.detach().clone()

    def refused(error, words, *arguments):
        with pytest.raises(error, match=words), gptq_rounded(model, *arguments):
            pass

    refused(UsageError, "the scheme is for keys", text, Scheme("keys", 4))
    refused(UsageError, "needs a batch", [], scheme)
    refused(UsageError, "layer 5 of a scheme", text, replace(scheme, layers=(5,)))
    refused(QuantizationError, "groups of 7 do not", text, replace(scheme, granularity="group:7"))
    ready = {"input_ids": text[0]["input_ids"], "attention_mask": torch.zeros(2, 1, 20, 20)}
    refused(QuantizationError, "its padding cannot be told; give the 2-D mask", [ready], scheme)
    with fake_quantize(model, scheme):
        refused(QuantizationError, "before fake_quantize", text, scheme)
    mlp = model.model.layers[0].mlp
    halves = type(mlp).forward
    mlp.forward = lambda x: torch.cat([halves(mlp, part) for part in x.split(8, 1)], 1)
    refused(QuantizationError, r"gate_proj, .* its padding cannot be told", text, scheme)
    mlp.forward = lambda x: x * torch.nan
    refused(QuantizationError, r"NaN or infinity among the inputs of .*layers\.1", text, scheme)
    model.config.num_hidden_layers = 1
    refused(QuantizationError, "layer 1 of LlamaForCausalLM did not run", text, scheme)
    assert torch.equal(model.model.layers[0].mlp.up_proj.weight, before)


def test_weights_that_are_quantized_already(tmp_path):
    """Their 4-bit codes are no numbers to round."""
    model, scheme = nf4_llama(tmp_path), Scheme("weights", 4, granularity="channel")
    codes = model.model.layers[0].mlp.up_proj.weight
    before = codes.detach().clone()
    words = r"the weights of model\.layers\.0\..*_proj are quantized already"
    for context in (
        lambda: fake_quantize(model, scheme),
        lambda: gptq_rounded(model, [batch()], scheme),
    ):
        with pytest.raises(QuantizationError, match=words), context():
            pass
    assert model.model.layers[0].mlp.up_proj.weight is codes
    assert torch.equal(codes, before)


def test_a_layer_that_needs_what_an_earlier_one_hands_it():
    """As keys that several layers share: the earlier one does not run any more when it is due."""
    sizes = SETTINGS | {"num_hidden_layers": 4, "head_dim": 8, "num_kv_shared_layers": 2}
    config = Gemma4TextConfig(
        **sizes, vocab_size_per_layer_input=VOCABULARY, hidden_size_per_layer_input=8,
        layer_types=["sliding_attention", "full_attention"] * 2, global_head_dim=8,
    )  # fmt: skip
    model, scheme = build(Gemma4ForCausalLM, config), Scheme("weights", 4, granularity="channel")
    before = [p.detach().clone() for p in model.parameters()]
    words = r"layer 2 of Gemma4ForCausalLM fails when .* layer by layer \(KeyError\)"
    refused = pytest.raises(QuantizationError, match=words)
    with refused as error, gptq_rounded(model, [{"input_ids": tiny_ids()}], scheme):
        pass
    assert isinstance(error.value.__cause__, KeyError)
    assert "\n" not in str(error.value)
    assert all(torch.equal(*pair) for pair in zip(before, model.parameters(), strict=True))


class Experts(nn.Module):
    """Two experts that all tokens go to, in an order of their own."""

    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(32, 32) for _ in range(2))

    def forward(self, x):
        rows = x.flatten(0, 1)
        order = rows[:, 0].argsort()
        out = sum(expert(rows[order]) for expert in self.experts)
        return torch.zeros_like(out).index_add(0, order, out).view_as(x)


def with_experts():
    model = MODELS["llama"]()
    with torch.random.fork_rng():
        torch.manual_seed(0)
        for layer in model.model.layers:
            layer.mlp = Experts()
    return model


def test_padding_among_the_tokens_of_an_expert():
    """They are as many as the batch has, but in an order of their own."""
    model, scheme = with_experts(), Scheme("weights", 4, granularity="channel")
    text = batch()
    with gptq_rounded(model, [{"input_ids": text["input_ids"]}], scheme):
        pass
    refused = pytest.raises(QuantizationError, match=r"experts\.0, \(40, 32\), are not known to be")
    with refused, gptq_rounded(model, [text], scheme):
        pass
