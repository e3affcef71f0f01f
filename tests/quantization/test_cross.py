"""Attention to an encoder's tokens, which have a number and a padding of their own."""

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from quantdiff import QuantizationError, Scheme, UsageError, calibrate, fake_quantize
from tests.quantization.test_fake_quantize import SITE
from tests.tiny import VOCABULARY, build, tiny_ids


@pytest.fixture(autouse=True)
def _no_grad():
    with torch.no_grad():
        yield


def crossing(**options):
    settings = {"n_embd": 32, "n_layer": 2, "n_head": 4, "initializer_range": 0.2} | options
    return build(
        GPT2LMHeadModel, GPT2Config(vocab_size=VOCABULARY, add_cross_attention=True, **settings)
    )


def given(keys=9):
    """Two sequences; of the encoder's tokens the second has four less."""
    states = torch.randn(2, keys, 32, generator=torch.Generator().manual_seed(3))
    states[1, -4:] *= 20
    mask = torch.ones(2, keys, dtype=torch.long)
    mask[1, -4:] = 0
    return {
        "input_ids": tiny_ids(2, 9), "encoder_hidden_states": states,
        "encoder_attention_mask": mask,
    }  # fmt: skip


def alone(b):
    """One of the sequences without padding."""
    one = {name: x[b : b + 1] for name, x in given().items()}
    kept = one.pop("encoder_attention_mask")[0].bool()
    return one | {"encoder_hidden_states": one["encoder_hidden_states"][:, kept]}


@pytest.mark.parametrize("granularity", ["head", "channel"])
@pytest.mark.parametrize("site", ["keys", "values"])
@pytest.mark.parametrize("holes", [False, True])
def test_the_encoders_padding_sets_no_range(site, granularity, holes):
    model, whole = crossing(), given()
    if holes:  # the same tokens in another order, so that no interval tells which are real
        order = torch.tensor([0, 5, 1, 6, 2, 7, 3, 8, 4])
        for name in ("encoder_hidden_states", "encoder_attention_mask"):
            whole[name] = whole[name][:, order]
    with fake_quantize(model, Scheme(site, 4, granularity=granularity)):
        found = model(**whole).logits
        for b in range(2):
            expected = model(**alone(b)).logits[0]
            assert (found[b] - expected).abs().max() < 1e-4 * expected.abs().max()


def test_a_range_of_each_sequence_over_an_encoders_inputs():
    """Even where the encoder has as many tokens, their padding is not the decoder's."""
    model = crossing()
    refused = pytest.raises(QuantizationError, match=r"crossattention\.\S+ may be those of another")
    with refused, fake_quantize(model, Scheme("linear_inputs", 4, granularity="tensor")):
        model(**given())
    with fake_quantize(model, Scheme("linear_inputs", 4, granularity="tensor")):
        model(input_ids=tiny_ids(2, 9))  # without an encoder there is no such module
    with fake_quantize(model, Scheme("linear_inputs", 4, granularity="token")):
        model(**given())


@pytest.mark.parametrize("granularity", ["tensor", "head"])
def test_static_ranges_of_cross_attention(granularity):
    """Of one sequence alone they are the dynamic ones of the same text.

    One token attends itself whatever its logit, so that the cross-attention is given what it was.
    """
    model, text = crossing(), alone(0)
    text["input_ids"] = text["input_ids"][:, :1]
    table = calibrate(model, [text])
    plain, outs = model(**text).logits, []
    for range_ in ("absmax", "dynamic"):
        layer, caught = model.transformer.h[0], []
        handles = [
            module.register_forward_hook(lambda m, args, out, to=caught: to.append(out[0]))
            for module in (layer.attn, layer.crossattention)
        ]
        with fake_quantize(model, Scheme(SITE, 5, range_, granularity), table=table):
            assert not torch.equal(model(**text).logits, plain)
        for handle in handles:
            handle.remove()
        outs.append(caught)
    for static, dynamic in zip(*outs, strict=True):
        assert torch.equal(static, dynamic)


def test_a_table_of_another_model_is_refused():
    table = calibrate(crossing(), [alone(0)])
    for other in (crossing(n_layer=1), crossing(n_layer=3), crossing(n_head=8)):
        with pytest.raises(UsageError, match="of another model"):
            fake_quantize(other, Scheme(SITE, 8, "absmax"), table=table)
    config = GPT2Config(vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=4)
    with pytest.raises(UsageError, match=r"has a site .*crossattention.* not here"):
        fake_quantize(build(GPT2LMHeadModel, config), Scheme(SITE, 8, "absmax"), table=table)
