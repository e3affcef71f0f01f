"""Remedies by their names, alone and after one another."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from quantdiff import QuantizationError, Scheme, UsageError, fake_quantize
from quantdiff.quantization.gptq import gptq_rounded
from quantdiff.quantization.remedies import rotated, smoothed
from quantdiff.quantization.remedy import NONE, STEPS, remedy
from tests.quantization.test_fake_quantize import MODELS, batch

W4, A8 = (
    Scheme("weights", 4, granularity="channel"),
    Scheme("linear_inputs", 8, granularity="token"),
)


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ("none", "none"), ("rotate", "rotate"), ("smooth", "smooth:0.5"),
        ("smooth:0.50", "smooth:0.5"), ("gptq", "gptq"), ("gptq:act_order", "gptq:act_order"),
        ("rotate+smooth:1+gptq", "rotate+smooth:1+gptq"),
    ],
)  # fmt: skip
def test_names(given, name):
    assert remedy(given).name == name
    assert remedy(remedy(given).name) == remedy(given)
    assert (remedy(given) == NONE) == (name == "none")


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("cure", "unknown remedy 'cure'; known: none, rotate, smooth, gptq"),
        ("", "unknown remedy ''"),
        ("rotate+", "unknown remedy 'rotate\\+'"),
        ("none+rotate", "unknown remedy 'none'"),
        ("smooth:", "unknown remedy 'smooth:'"),
        ("smooth:2", r"a number in \[0, 1\], as in smooth:0.5, not '2'"),
        ("smooth:nan", r"a number in \[0, 1\]"),
        ("rotate:1", "rotate takes no parameter"),
        ("gptq:4", "gptq takes nothing or act_order"),
        ("smooth+rotate", "in the order rotate, smooth, gptq"),
        ("rotate+rotate", "once each"),
    ],
)
def test_what_is_none(given, words):
    with pytest.raises(UsageError, match=words) as error:
        remedy(given)
    assert "\n" not in str(error.value)


@given(st.text(alphabet="rotaesmhgpqn:+0.5 ", max_size=14))
def test_any_word_is_understood_or_refused(word):
    try:
        found = remedy(word)
    except UsageError:
        return
    assert [name for name, _ in found.steps] == [name for name in STEPS if name in word]


def logits_within(context, model, *schemes):
    with torch.no_grad(), context, fake_quantize(model, *schemes):
        return model(**batch()).logits


@pytest.mark.parametrize("name", MODELS)
def test_each_is_its_context(name):
    model, text = MODELS[name](), [batch()]
    own = {
        "rotate": lambda: rotated(model, text[0]), "smooth:0.7": lambda: smoothed(model, text, 0.7),
        "gptq": lambda: gptq_rounded(model, text, W4),
        "gptq:act_order": lambda: gptq_rounded(model, text, W4, act_order=True),
    }  # fmt: skip
    for which, context in own.items():
        chosen = remedy(which)
        left = chosen.left([W4, A8])
        assert left == ((A8,) if "gptq" in which else (W4, A8))
        expected = logits_within(context(), model, *left)
        found = logits_within(chosen.applied(model, text, [W4, A8]), model, *left)
        assert torch.equal(found, expected)


@pytest.mark.parametrize("name", MODELS)
def test_one_after_the_other_and_back(name):
    model, text = MODELS[name](), [batch()]
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    real = text[0]["attention_mask"].bool()
    with torch.no_grad():
        plain = model(**text[0]).logits[real]
    kept = remedy("rotate+smooth:0.5")
    same = logits_within(kept.applied(model, text, [W4]), model)[real]
    assert (same - plain).abs().max() < 1e-4 * plain.abs().max()
    with torch.no_grad():
        with kept.applied(model, text, [W4]), gptq_rounded(model, text, W4):
            expected = model(**text[0]).logits
        found = logits_within(remedy("rotate+smooth+gptq").applied(model, text, [W4]), model)
    assert torch.equal(found, expected)
    for n, p in model.named_parameters():
        assert torch.equal(p, before[n]), n


@pytest.mark.parametrize("name", ["rotate", "smooth", "gptq", "rotate+smooth+gptq"])
def test_gradients_are_taken_within_and_after_whatever_is_left_first(name):
    model = MODELS["llama"]()
    context = remedy(name).applied(model, [batch()], [W4])
    with torch.no_grad():
        context.__enter__()
    assert torch.is_grad_enabled()
    model(**batch()).logits.sum().backward()
    assert model.model.layers[0].mlp.up_proj.weight.grad.abs().sum() > 0
    context.__exit__(None, None, None)
    assert torch.is_grad_enabled()


def test_what_does_not_go():
    model = MODELS["llama"]()
    with pytest.raises(UsageError, match="gptq rounds weights, and there is no scheme for them"):
        remedy("gptq").check([A8])
    with pytest.raises(UsageError, match="needs a batch of text"):
        logits_within(remedy("smooth").applied(model, [], [A8]), model)
    layer = model.model.layers[0]
    real = layer.mlp.forward
    layer.mlp.forward = lambda x: real(x + x[..., :1].abs())
    before = layer.mlp.up_proj.weight.detach().clone()
    # The first step is taken back when the second one fails.
    with pytest.raises(QuantizationError, match="computes something else"):
        logits_within(remedy("rotate+smooth").applied(model, [batch()], [A8]), model)
    assert torch.equal(layer.mlp.up_proj.weight, before)
