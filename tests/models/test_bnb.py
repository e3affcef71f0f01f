"""4-bit modules of bitsandbytes against the values that their bytes stand for."""

import copy
import logging

import pytest
import torch
from bitsandbytes.nn import Linear4bit
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

import quantdiff
from quantdiff.models.bnb import StoredLinear4bit, compute_as_stored, unpacked
from quantdiff.models.quiet import quiet_libraries
from tests.tiny import save_tiny, tiny_ids, tiny_llama

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def packed(outputs, inputs, kind="nf4", double=False, dtype=torch.float32, bias=False):
    """A module of random weights, quantized."""
    layer = torch.nn.Sequential(
        Linear4bit(inputs, outputs, bias, dtype, compress_statistics=double, quant_type=kind)
    )
    torch.nn.init.normal_(layer[0].weight, generator=torch.Generator().manual_seed(0))
    layer = layer.to(dtype).to("cpu").eval()
    compute_as_stored(layer)
    return layer[0]


def values(weight):
    """What the bytes stand for, one by one, in fp64."""
    state = weight.quant_state
    scales = state.absmax
    if state.nested:
        inner = state.state2
        of_scales = inner.absmax.repeat_interleave(inner.blocksize)[: scales.numel()]
        scales = inner.code.double()[scales.long()] * of_scales.double() + state.offset.double()
    bytes_ = weight.data.view(torch.uint8).flatten().long()
    codes = torch.stack([bytes_ >> 4, bytes_ & 15], 1).flatten()[: state.shape.numel()]
    each = scales.double().repeat_interleave(state.blocksize)[: len(codes)]
    return (state.code.double()[codes] * each).view(state.shape)


@given(
    outputs=st.integers(1, 40),
    inputs=st.sampled_from([2, 16, 24, 48, 63, 64, 80, 128, 172]),
    kind=st.sampled_from(["nf4", "fp4"]),
    double=st.booleans(),
    dtype=st.sampled_from(DTYPES),
)
@settings(max_examples=60, deadline=None)
def test_weights_of_any_width(outputs, inputs, kind, double, dtype):
    layer = packed(outputs, inputs, kind, double, dtype)
    wanted = values(layer.weight)
    bound = {torch.float32: 1e-6, torch.bfloat16: 4e-3, torch.float16: 5e-4}[dtype]
    gap = (unpacked(layer.weight, dtype).double() - wanted).abs().max()
    assert gap <= bound * wanted.abs().max()


@pytest.mark.parametrize("double", [False, True])
@pytest.mark.parametrize("shape", [(256, 688), (16, 16), (40, 24), (64, 128)])
def test_a_pass_in_fp32_computes_in_fp32(shape, double):
    layer = packed(*shape, double=double, bias=True)
    stored = layer.weight.data.clone()
    x = torch.randn(3, 5, shape[1], generator=torch.Generator().manual_seed(1))
    for context in (torch.no_grad, torch.inference_mode, torch.enable_grad):
        with context():
            out = layer(x)
        wanted = x.double() @ values(layer.weight).T + layer.bias.double()
        assert (out.double() - wanted).abs().max() <= 1e-5 * wanted.abs().max()
    assert torch.equal(layer.weight.data, stored)


def test_as_bitsandbytes_where_it_is_right():
    layer = packed(64, 128, bias=True)
    x = torch.randn(4, 128)
    theirs = copy.deepcopy(layer)
    theirs.__class__ = Linear4bit
    theirs.support_avx512bf16_for_cpu = False
    assert torch.equal(layer(x), theirs(x))


def test_gradients_reach_the_input_and_the_bias():
    layer = packed(48, 80, bias=True)
    x = torch.randn(3, 2, 80, requires_grad=True)
    layer(x).sum().backward()
    torch.testing.assert_close(x.grad, values(layer.weight).sum(0).float().expand(3, 2, -1))
    torch.testing.assert_close(layer.bias.grad, torch.full((48,), 6.0))


def test_a_copy_computes_with_its_own_weights():
    layer = packed(48, 80)
    x = torch.randn(2, 80)
    other = copy.deepcopy(layer)
    layer.weight.data.zero_()
    assert not torch.equal(layer(x), other(x))
    assert torch.equal(other(x), x @ unpacked(other.weight, torch.float32).T)


def test_checkpoints_are_opened_so(tmp_path):
    """Whoever wrote them; these widths are no multiples of a block."""
    config = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32
    )
    theirs = AutoModelForCausalLM.from_pretrained(
        save_tiny(tmp_path / "plain", tiny_llama()), quantization_config=config, device_map="cpu"
    )
    save_tiny(tmp_path / "packed", theirs)
    model, _ = quantdiff.load(tmp_path / "packed", device="cpu")
    plain = tiny_llama()
    found = 0
    for name, module in model.named_modules():
        if isinstance(module, StoredLinear4bit):
            found += 1
            plain.get_submodule(name).weight.data = values(module.weight).float()
    assert found == 14
    with torch.no_grad():
        torch.testing.assert_close(
            model(tiny_ids()).logits, plain(tiny_ids()).logits, atol=1e-5, rtol=1e-5
        )


def test_what_it_says_of_kernels_is_kept_back(caplog):
    theirs = logging.getLogger("bitsandbytes.backends.cpu.ops")
    with quiet_libraries():
        theirs.warning("kernels are not installed")
    assert not caplog.records
    theirs.warning("something else")
    assert len(caplog.records) == 1
