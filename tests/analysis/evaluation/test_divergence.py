"""Divergence against a plain loop in fp64."""

import contextlib
import functools
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    CohereConfig,
    CohereForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
)

from quantdiff import QuantizationError, Scheme, UsageError, fake_quantize
from quantdiff.analysis.evaluation import Stopped, Text, evaluation
from quantdiff.analysis.evaluation.divergence import QUANTILES, divergence
from tests.analysis.evaluation.conftest import other_weights, plain_logits
from tests.tiny import SETTINGS, VOCABULARY, build, tiny_diff_v2, tiny_diffllama, tiny_llama


def plain(model, windows, context):
    """KL of every token, and whether both agree, by window."""
    before = [plain_logits(model, window)[:-1] for window in windows]
    with context():
        after = [plain_logits(model, window)[:-1] for window in windows]
    kl, same = [], []
    for x, y in zip(before, after, strict=True):
        p, q = x.log_softmax(-1), y.log_softmax(-1)
        kl.append(np.array([float((a.exp() * (a - b)).sum()) for a, b in zip(p, q, strict=True)]))
        same.append(sum(int(a.argmax() == b.argmax()) for a, b in zip(x, y, strict=True)))
    return kl, np.array(same)


def made(model, tokenizer, text, folder, batch_size=1, side="right", **options):
    evaluated = evaluation("divergence", model, tokenizer, Text(text, **options))
    evaluated.forward.padding_side = side
    evaluated.prepare(folder, batch_size=batch_size)
    return evaluated


def check(outcome, kl, same, rtol=1e-5):
    counts = np.array([len(part) for part in kl])
    np.testing.assert_allclose(outcome.items["kl"], [part.sum() for part in kl], rtol=rtol)
    np.testing.assert_allclose(outcome.items["kl_max"], [p.max() for p in kl], rtol=rtol)
    quantiles = [np.quantile(part, QUANTILES) for part in kl]
    np.testing.assert_allclose(outcome.items["kl_quantiles"], quantiles, rtol=rtol)
    np.testing.assert_array_equal(outcome.items["agreement"], same)
    np.testing.assert_array_equal(outcome.items["tokens"], counts)
    mean, agreement = outcome.metrics[:2]
    assert mean.value == pytest.approx(np.concatenate(kl).mean(), rel=rtol)
    assert agreement.value == pytest.approx(same.sum() / counts.sum())
    assert mean.count == agreement.count == counts.sum()


@settings(max_examples=15)
@given(
    seq_len=st.integers(2, 40),
    tokens=st.integers(40, 130),
    batches=st.tuples(st.integers(1, 6), st.integers(1, 6)),
    sides=st.tuples(*[st.sampled_from(["left", "right"])] * 2),
)
def test_equals_a_plain_loop(
    model, tokenizer, text, tmp_path_factory, seq_len, tokens, batches, sides
):
    folder = tmp_path_factory.mktemp("reference")
    evaluated = made(
        model, tokenizer, text, folder, batches[0], sides[0], tokens=tokens, seq_len=seq_len
    )
    evaluated.forward.padding_side = sides[1]
    context = functools.partial(other_weights, model)
    outcome = evaluated.run(context, batch_size=batches[1])
    check(outcome, *plain(model, evaluated.windows.windows, context))
    assert list(folder.iterdir()) == []


def test_standard_errors(model, tokenizer, text, tmp_path):
    evaluated = made(model, tokenizer, text, tmp_path, tokens=200, seq_len=32)
    outcome = evaluated.run(functools.partial(other_weights, model), batch_size=2)
    n = outcome.items["tokens"]
    for metric in outcome.metrics[:2]:
        s = outcome.items[metric.name]
        residuals = s - s.sum() / n.sum() * n
        expected = math.sqrt(len(s) / (len(s) - 1) * (residuals**2).sum()) / n.sum()
        assert metric.stderr == pytest.approx(expected)


def test_nothing_changed_is_nothing(model, tokenizer, text, tmp_path):
    outcome = made(model, tokenizer, text, tmp_path, 3, tokens=200, seq_len=32).run(batch_size=3)
    assert [metric.value for metric in outcome.metrics[:2]] == [0.0, 1.0]
    assert [metric.stderr for metric in outcome.metrics[:2]] == [0.0, 0.0]


def gemma2():
    return build(
        Gemma2ForCausalLM, Gemma2Config(**SETTINGS, head_dim=8, final_logit_softcapping=3.0)
    )


def cohere():
    return build(CohereForCausalLM, CohereConfig(**SETTINGS, logit_scale=0.1))


def headless():
    model = tiny_llama()
    model.get_output_embeddings = lambda: None
    return model


def gpt2():
    config = GPT2Config(vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=4, n_positions=64)
    return build(GPT2LMHeadModel, config)


@pytest.mark.parametrize(
    ("build_model", "kept"),
    [
        (tiny_llama, "inputs"),
        (lambda: tiny_llama(tie_word_embeddings=True), "inputs"),
        (tiny_diffllama, "inputs"),
        (tiny_diff_v2, "inputs"),
        (gpt2, "inputs"),
        (gemma2, "logits"),
        (cohere, "logits"),
        (headless, "logits"),
    ],
)
def test_kinds_of_models(tokenizer, text, tmp_path, build_model, kept):
    model = build_model()
    evaluated = made(model, tokenizer, text, tmp_path, 2, tokens=100, seq_len=30)
    assert evaluated.reference.kept == kept
    context = functools.partial(other_weights, model)
    outcome = evaluated.run(context, batch_size=3)
    check(outcome, *plain(model, evaluated.windows.windows, context))
    assert list(tmp_path.iterdir()) == []
    # The hook on the output embedding is gone.
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_half_precision_at_the_same_batch_is_exact(tokenizer, text, tmp_path):
    model = tiny_llama().to(torch.bfloat16)
    evaluated = made(model, tokenizer, text, tmp_path, 2, tokens=100, seq_len=30)
    assert evaluated.run(batch_size=2).metrics[0].value == 0
    # Products in bf16 may depend on the batch, so that all passes are of one window here.
    evaluated = made(model, tokenizer, text, tmp_path, 1, tokens=100, seq_len=30)
    context = functools.partial(other_weights, model)
    outcome = evaluated.run(context, batch_size=1)
    check(outcome, *plain(model, evaluated.windows.windows, context))


@contextlib.contextmanager
def other_head(model, how):
    """The output embedding changed in one of the ways that a context may do it."""
    head = model.get_output_embeddings()
    kept = head.weight.detach().clone()
    handle = None
    with torch.no_grad():
        if how == "in place":
            head.weight.mul_(1.1)
        elif how == "data":
            head.weight.data *= 1.1
        elif how == "replaced":
            own, head.weight = head.weight, torch.nn.Parameter(kept * 1.1)
        else:
            handle = head.register_forward_pre_hook(lambda _, args: (args[0] * 1.1,))
    try:
        yield
    finally:
        with torch.no_grad():
            if how == "replaced":
                head.weight = own
            head.weight.copy_(kept)
        if handle is not None:
            handle.remove()


@pytest.mark.parametrize("how", ["in place", "data", "replaced", "input"])
def test_the_reference_does_not_see_what_the_context_does_to_the_head(
    tokenizer, text, tmp_path, how
):
    model = tiny_llama()
    evaluated = made(model, tokenizer, text, tmp_path, 2, tokens=100, seq_len=30)
    context = functools.partial(other_head, model, how)
    outcome = evaluated.run(context, batch_size=2)
    check(outcome, *plain(model, evaluated.windows.windows, context))
    assert outcome.metrics[0].value > 1e-4


def test_within_fake_quantize(tokenizer, text, tmp_path):
    model = tiny_llama()
    evaluated = made(model, tokenizer, text, tmp_path, 2, tokens=200, seq_len=48)
    values = []
    for bits in (16, 8, 4):
        context = functools.partial(fake_quantize, model, Scheme("attention_logits", bits=bits))
        outcome = evaluated.run(context, batch_size=3)
        if bits != 16:
            kl, _ = plain(model, evaluated.windows.windows, context)
            np.testing.assert_allclose(outcome.items["kl"], [p.sum() for p in kl], rtol=0.02)
        values.append(outcome.metrics[0].value)
    assert values[0] < 1e-12 < values[1] < values[2]


def test_quantized_weights_are_the_same_in_every_batch(tokenizer, text, tmp_path):
    """Nothing that is rounded depends on the batch, the padding or its side."""
    model = tiny_llama()
    context = functools.partial(fake_quantize, model, Scheme("weights", 4, granularity="channel"))
    expected = None
    for side, size, other_side, other_size in (
        ("left", 3, "right", 2), ("right", 1, "left", 4), ("left", 2, "left", 5),
    ):  # fmt: skip
        evaluated = made(model, tokenizer, text, tmp_path, size, side, tokens=200, seq_len=48)
        evaluated.forward.padding_side = other_side
        expected = expected or plain(model, evaluated.windows.windows, context)
        check(evaluated.run(context, batch_size=other_size), *expected)
    assert np.concatenate(expected[0]).mean() > 1e-3


@given(st.integers(2, 300), st.floats(-9, 0.5), st.integers(0, 1000))
def test_small_divergences_are_right(size, exponent, seed):
    generator = torch.Generator().manual_seed(seed)
    x = 5 * torch.randn(3, size, generator=generator) + 30
    y = x + 10**exponent * torch.randn(3, size, generator=generator)
    p, q = (torch.log_softmax(z.double(), -1) for z in (x, y))
    # KL(p || q) = Σ p·(r − 1 − ln r) with r = q / p: no term is negative, so that none cancel.
    expected = (p.exp() * (torch.expm1(q - p) - (q - p))).sum(-1)
    torch.testing.assert_close(divergence(x, y), expected, rtol=1e-5, atol=1e-14)


def test_tokens_that_cannot_come_are_left_out():
    x = torch.tensor([[0.0, 1.0, -torch.inf]], dtype=torch.float64)
    y = torch.tensor([[0.5, 1.0, -torch.inf]], dtype=torch.float64)
    expected = F.kl_div(
        y[:, :2].log_softmax(-1), x[:, :2].log_softmax(-1), log_target=True, reduction="sum"
    )
    assert float(divergence(x, y)) == pytest.approx(float(expected))
    assert float(divergence(y[:, [0, 2]], x[:, :2])) < torch.inf
    assert float(divergence(x[:, :2], y[:, [0, 2]])) == torch.inf


def test_values_that_are_not_finite_are_refused(tokenizer, text, tmp_path):
    model = tiny_llama()
    evaluated = made(model, tokenizer, text, tmp_path, tokens=100, seq_len=30)

    @contextlib.contextmanager
    def broken():
        with other_weights(model), torch.no_grad():
            model.model.norm.weight.mul_(torch.nan)
            yield

    with pytest.raises(QuantizationError, match="of window 0 is not finite"):
        evaluated.run(broken, batch_size=2)


def test_progress_stop_and_preparation(model, tokenizer, text, tmp_path):
    evaluated = evaluation("divergence", model, tokenizer, Text(text, tokens=100, seq_len=30))
    told = []
    with pytest.raises(RuntimeError, match="prepare"):
        evaluated.run(batch_size=1)
    with pytest.raises(Stopped):
        evaluated.prepare(tmp_path, batch_size=2, progress=told.append, stop=lambda: True)
    assert told == [60]
    assert evaluated.reference is None
    evaluated.prepare(tmp_path, batch_size=2)
    told.clear()
    evaluated.run(batch_size=2, progress=told.append)
    assert sum(told) == evaluated.total == 100
    with pytest.raises(Stopped):
        evaluated.run(batch_size=2, stop=lambda: True)


def test_an_argument_is_refused(model, tokenizer):
    with pytest.raises(UsageError, match="takes no argument"):
        evaluation("divergence:x", model, tokenizer)


def test_a_folder_that_cannot_be_written(tokenizer, text, tmp_path):
    evaluated = evaluation("divergence", gemma2(), tokenizer, Text(text, tokens=60, seq_len=30))
    with pytest.raises(UsageError, match="cannot be kept"):
        evaluated.prepare(tmp_path / "none", batch_size=1)


def test_one_pass_gives_the_perplexity_too(model, tokenizer, text, tmp_path):
    evaluated = made(model, tokenizer, text, tmp_path, tokens=90, seq_len=30)
    context = functools.partial(other_weights, model)
    outcome = evaluated.run(context, batch_size=2)
    alone = evaluation("perplexity", model, tokenizer, Text(text, tokens=90, seq_len=30))
    expected = alone.run(context, batch_size=2)
    assert outcome.metrics[2:] == expected.metrics
    np.testing.assert_array_equal(outcome.items["nll"], expected.items["nll"])
