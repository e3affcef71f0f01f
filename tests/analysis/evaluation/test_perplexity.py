"""Perplexity against a plain loop over windows."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import GPT2Config, GPT2LMHeadModel

from quantdiff import QuantizationError, Scheme, UsageError, fake_quantize
from quantdiff.analysis.evaluation import Stopped, Text, evaluation, forward
from quantdiff.calibration import text_windows
from tests.analysis.evaluation.conftest import plain_logits
from tests.tiny import VOCABULARY, build, tiny_diffllama, tiny_llama, tiny_tokenizer


def plain(model, windows):
    """Sum of negative log-likelihoods and tokens of each window."""
    sums, counts = [], []
    for window in windows:
        log_p = plain_logits(model, window).log_softmax(-1)
        sums.append(-sum(float(log_p[i, window[i + 1]]) for i in range(len(window) - 1)))
        counts.append(len(window) - 1)
    return np.array(sums), np.array(counts)


def run(model, tokenizer, text, batch_size=1, side="right", context=None, **options):
    evaluated = evaluation("perplexity", model, tokenizer, Text(text, **options))
    evaluated.forward.padding_side = side
    extra = () if context is None else (context,)
    return evaluated.run(*extra, batch_size=batch_size)


@settings(max_examples=25)
@given(
    seq_len=st.integers(2, 40),
    tokens=st.integers(40, 130),
    batch_size=st.integers(1, 6),
    side=st.sampled_from(["left", "right"]),
    bos=st.booleans(),
)
def test_equals_a_plain_loop(model, text, seq_len, tokens, batch_size, side, bos):
    tokenizer = tiny_tokenizer(bos=bos)
    windows = text_windows(text, tokenizer, tokens=tokens, seq_len=seq_len)
    sums, counts = plain(model, windows.windows)
    outcome = run(model, tokenizer, text, batch_size, side, tokens=tokens, seq_len=seq_len)
    np.testing.assert_allclose(outcome.items["nll"], sums, rtol=1e-5)
    np.testing.assert_array_equal(outcome.items["tokens"], counts)
    perplexity, nll = outcome.metrics
    assert perplexity.value == pytest.approx(math.exp(sums.sum() / counts.sum()), rel=1e-5)
    assert nll.value == pytest.approx(sums.sum() / counts.sum(), rel=1e-5)
    assert perplexity.count == nll.count == counts.sum() == windows.tokens - windows.sequences


def test_standard_error_is_that_of_a_ratio_over_windows(model, tokenizer, text):
    outcome = run(model, tokenizer, text, tokens=200, seq_len=32)
    s, n = outcome.items["nll"], outcome.items["tokens"]
    value, residuals = s.sum() / n.sum(), s - s.sum() / n.sum() * n
    expected = math.sqrt(len(s) / (len(s) - 1) * (residuals**2).sum()) / n.sum()
    perplexity, nll = outcome.metrics
    assert nll.stderr == pytest.approx(expected)
    assert perplexity.stderr == pytest.approx(math.exp(value) * expected)
    assert run(model, tokenizer, text, tokens=32, seq_len=32).metrics[0].stderr is None


def test_standard_error_covers_what_other_windows_would_say():
    generator = np.random.default_rng(0)
    from quantdiff.analysis.evaluation.estimates import ratio

    counts = np.full(50, 20)
    draws = [ratio(20 * (3 + generator.normal(size=50)), counts) for _ in range(400)]
    values, errors = zip(*draws, strict=True)
    assert np.mean(errors) == pytest.approx(np.std(values), rel=0.15)


@pytest.mark.parametrize("side", ["left", "right"])
def test_learned_positions_count_from_the_first_real_token(tokenizer, text, side):
    config = GPT2Config(vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=4, n_positions=64)
    model = build(GPT2LMHeadModel, config)
    one = run(model, tokenizer, text, tokens=100, seq_len=48)
    many = run(model, tokenizer, text, 3, side, tokens=100, seq_len=48)
    np.testing.assert_allclose(many.items["nll"], one.items["nll"], rtol=1e-5)


@pytest.mark.parametrize("build_model", [tiny_llama, tiny_diffllama])
@pytest.mark.parametrize("side", ["left", "right"])
def test_within_fake_quantize(tokenizer, text, build_model, side):
    model = build_model()
    scheme = Scheme("attention_logits", bits=6)
    windows = text_windows(text, tokenizer, tokens=100, seq_len=48).windows
    with fake_quantize(model, scheme):
        sums, _ = plain(model, windows)
    outcome = run(
        model, tokenizer, text, 3, side, lambda: fake_quantize(model, scheme),
        tokens=100, seq_len=48,
    )  # fmt: skip
    # A logit that lies between two points of the grid may be rounded the other way.
    np.testing.assert_allclose(outcome.items["nll"], sums, rtol=1e-4)
    assert outcome.items["nll"] != pytest.approx(plain(model, windows)[0], rel=1e-4)


def test_blocks_of_rows_change_nothing(model, tokenizer, text, monkeypatch):
    whole = run(model, tokenizer, text, 2, tokens=100, seq_len=48)
    monkeypatch.setattr(forward, "_ELEMENTS", 5 * VOCABULARY)
    parts = run(model, tokenizer, text, 2, tokens=100, seq_len=48)
    np.testing.assert_array_equal(parts.items["nll"], whole.items["nll"])


def test_half_precision_is_summed_wide(tokenizer, text):
    model = tiny_llama().to(torch.bfloat16)
    windows = text_windows(text, tokenizer, tokens=100, seq_len=48).windows
    sums, _ = plain(model, windows)
    outcome = run(model, tokenizer, text, tokens=100, seq_len=48)
    np.testing.assert_allclose(outcome.items["nll"], sums, rtol=1e-5)


def test_the_model_is_left_as_it_was(tokenizer, text):
    model = tiny_llama(attention_dropout=0.5).train()
    model.model.layers[1].eval()
    modes = {name: module.training for name, module in model.named_modules()}
    once, again = (run(model, tokenizer, text, tokens=60, seq_len=32) for _ in range(2))
    assert once.metrics == again.metrics
    assert {name: module.training for name, module in model.named_modules()} == modes


def test_tells_progress_and_stops(model, tokenizer, text):
    evaluated = evaluation("perplexity", model, tokenizer, Text(text, tokens=100, seq_len=30))
    told = []
    evaluated.run(batch_size=3, progress=told.append)
    assert told == [90, 10]
    assert evaluated.total == 100
    assert evaluated.unit == "tokens"
    told.clear()
    with pytest.raises(Stopped):
        evaluated.run(batch_size=2, progress=told.append, stop=lambda: True)
    assert told == [60]


def test_says_what_it_depends_on(model, tokenizer, text):
    one = evaluation("perplexity", model, tokenizer, Text(text, tokens=100, seq_len=30))
    other = evaluation("perplexity", model, tokenizer, Text(text, tokens=101, seq_len=30))
    assert one.data == text_windows(text, tokenizer, tokens=100, seq_len=30).fingerprint
    assert one.data != other.data
    assert one.settings["seq_len"] == 30
    assert evaluation("perplexity", model, tokenizer, Text(text)).settings["seq_len"] == 1024


def test_values_that_are_not_finite_are_refused(tokenizer, text):
    model = tiny_llama()
    windows = text_windows(text, tokenizer, tokens=200, seq_len=32).windows
    token = next(i for i in windows[3].tolist() if i not in torch.cat(windows[:3]).tolist())
    with torch.no_grad():
        model.model.embed_tokens.weight[token] = torch.nan
    with pytest.raises(QuantizationError, match="of window 3 is not finite"):
        run(model, tokenizer, text, 2, tokens=200, seq_len=32)
    with torch.no_grad():
        model.model.embed_tokens.weight[token] = 0
        model.lm_head.weight.mul_(1e5)
    with pytest.raises(QuantizationError, match="the perplexity, of text 0 is not finite"):
        run(model, tokenizer, text, 2, tokens=200, seq_len=32)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("perplexity:x", {}, "takes no argument"),
        ("perplexity", {"seq_len": 2000}, "beyond the model's context of 1024"),
        ("perplexity", {"source": "none.txt"}, "there is no file"),
        ("perplexities", {}, "unknown evaluation"),
    ],
)
def test_bad_requests(model, tokenizer, name, options, message):
    with pytest.raises(UsageError, match=message):
        evaluation(name, model, tokenizer, Text(**options))


def test_a_batch_of_none_is_refused(model, tokenizer, text):
    with pytest.raises(UsageError, match="a batch of 0"):
        run(model, tokenizer, text, 0)


def test_another_tokenizer_is_refused(text):
    with pytest.raises(UsageError, match="vocabulary"):
        run(tiny_llama(vocab_size=100), tiny_tokenizer(), text)
