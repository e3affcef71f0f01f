"""Signal to noise of the layers' outputs, and of attention by layer."""

import contextlib
import copy
import functools

import numpy as np
import pytest
import torch

from quantdiff import Scheme, fake_quantize
from quantdiff.analysis.evaluation import Text, evaluation
from quantdiff.analysis.evaluation.noise import MOST, NOISELESS
from quantdiff.quantization.noise import NoiseRecorder, decibels
from tests.tiny import tiny_diff_v2, tiny_diffllama, tiny_llama

SCHEME = Scheme("attention_logits", 4, granularity="row")
MODELS = {"llama": tiny_llama, "diffllama": tiny_diffllama, "diff_v2": tiny_diff_v2}
STANDARD = {"snr_hidden", "snr_logits", "snr_softmax"}
DIFFERENTIAL = {
    "snr_hidden", "snr_logits", "snr_branch_1", "snr_branch_2", "snr_difference", "cancellation"
}  # fmt: skip


def hidden(model, windows):
    """Outputs of all layers, (L, tokens, d), the last before the model's own norm."""
    outs = []
    for window in windows:
        kept = []
        handles = [
            layer.register_forward_hook(lambda m, a, out, kept=kept: kept.append(out))
            for layer in model.model.layers
        ]
        with torch.no_grad():
            model(input_ids=window[None])
        for handle in handles:
            handle.remove()
        outs.append(torch.stack([x[0] if isinstance(x, tuple) else x for x in kept])[:, 0])
    return torch.cat(outs, 1).double().numpy()


@pytest.mark.parametrize(("batch_size", "side"), [(1, "right"), (3, "right"), (3, "left")])
@pytest.mark.parametrize("name", MODELS)
def test_equals_a_plain_loop(name, batch_size, side, tokenizer, text, tmp_path):
    model = MODELS[name]()
    made = evaluation("noise", model, tokenizer, Text(text, tokens=100, seq_len=30))
    made.forward.padding_side = side
    made.prepare(tmp_path, batch_size=batch_size)
    context = functools.partial(fake_quantize, model, SCHEME)
    outcome = made.run(context, batch_size=batch_size)
    windows = made.windows.windows
    plain = hidden(model, windows)
    with fake_quantize(model, SCHEME):
        rounded = hidden(model, windows)
    energies = np.square(plain).sum((1, 2)) / np.square(rounded - plain).sum((1, 2))
    assert {metric.name for metric in outcome.metrics} == (
        STANDARD if name == "llama" else DIFFERENTIAL
    )
    # A logit on a boundary may round the other way in another batch.
    assert np.allclose(outcome.items["snr_hidden"], 10 * np.log10(energies), atol=0.3)
    with torch.no_grad(), fake_quantize(model, SCHEME), NoiseRecorder(model, SCHEME) as recorder:
        for window in windows:
            model(input_ids=window[None])
    sites = recorder.sites()
    for item, kind in (("snr_logits", "logits"), ("snr_difference", "difference")):
        if item in outcome.items:
            expected = [decibels(site.ratio(kind)) for site in sites]
            assert np.allclose(outcome.items[item], expected, atol=0.3)
    if name != "llama":
        shares = [site.cancellation for site in sites]
        assert np.allclose(outcome.items["cancellation"], shares, rtol=0.05)
    for metric in outcome.metrics:
        assert metric.count == len(sites)
        assert metric.value == pytest.approx(outcome.items[metric.name].mean())


@pytest.mark.parametrize("name", MODELS)
def test_energies_of_all_attention_modules_of_a_layer_are_added(name, tokenizer, text, tmp_path):
    model = MODELS[name]()
    first, second = model.model.layers
    first.more, forward = copy.deepcopy(second.self_attn), first.forward

    def twice(hidden_states, **given):
        hidden_states = forward(hidden_states, **given)
        return hidden_states + first.more(hidden_states, **given)[0]

    first.forward = twice
    made = evaluation("noise", model, tokenizer, Text(text, tokens=100, seq_len=30))
    made.prepare(tmp_path, batch_size=1)
    items = made.run(functools.partial(fake_quantize, model, SCHEME), batch_size=1).items
    with torch.no_grad(), fake_quantize(model, SCHEME), NoiseRecorder(model, SCHEME) as recorder:
        for window in made.windows.windows:
            model(input_ids=window[None], use_cache=False)  # both would write to one layer's
    sites = recorder.sites()
    assert [site.layer for site in sites] == [0, 0, 1]

    def ratios(above, below):
        """Of both layers, from (heads,) of each site."""
        return [
            sum(x.sum() for x in above[own]) / sum(x.sum() for x in below[own])
            for own in (slice(0, 2), slice(2, 3))
        ]

    for kind in sites[0].noise:
        noise = [site.noise[kind] for site in sites]
        expected = map(decibels, ratios([site.signal[kind] for site in sites], noise))
        assert items[f"snr_{kind.replace(' ', '_')}"] == pytest.approx([*expected], abs=1e-6)
    if name != "llama":
        expected = ratios(noise, [site.independent for site in sites])
        assert kind == "difference"
        assert items["cancellation"] == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("name", MODELS)
def test_where_keys_are_rounded_too_there_is_the_noise_of_hidden_states_alone(
    name, tokenizer, text, tmp_path
):
    """The logits that are quantized are those of rounded keys, which a recording does not see."""
    model = MODELS[name]()
    made = evaluation("noise", model, tokenizer, Text(text, tokens=60, seq_len=30))
    made.prepare(tmp_path, batch_size=1)

    def names(*schemes):
        context = functools.partial(fake_quantize, model, SCHEME, *schemes)
        return {metric.name for metric in made.run(context, batch_size=1).metrics}

    assert names(Scheme("keys", 2), Scheme("values", 2)) == {"snr_hidden"}
    assert names(Scheme("values", 2)) == (STANDARD if name == "llama" else DIFFERENTIAL)


def test_without_quantization_there_is_no_noise(tokenizer, text, tmp_path):
    model = tiny_llama()
    made = evaluation("noise", model, tokenizer, Text(text, tokens=60, seq_len=30))
    made.prepare(tmp_path, batch_size=1)
    for context in (contextlib.nullcontext, functools.partial(fake_quantize, model)):
        (metric,) = made.run(context, batch_size=1).metrics
        assert (metric.name, metric.value) == ("snr_hidden", NOISELESS)


@pytest.mark.parametrize("side", ["right", "left"])
def test_windows_are_compared_with_themselves_in_any_batches(side, tokenizer, text, tmp_path):
    made = evaluation("noise", tiny_llama(), tokenizer, Text(text, tokens=100, seq_len=30))
    made.forward.padding_side = side
    made.prepare(tmp_path, batch_size=1)
    for batch_size in (2, 3):
        assert made.run(batch_size=batch_size).metrics[0].value > 100  # dB: that of fp32


def test_at_most_so_many_tokens(tokenizer, tmp_path):
    made = evaluation("noise", tiny_llama(), tokenizer, Text("corpus", 10 * MOST, 64))
    assert made.total == MOST
    with pytest.raises(RuntimeError, match="prepare"):
        made.run(batch_size=1)
