"""SmolLM2-135M, made of a GGUF file, and the zoo: exported, and loaded as measured."""

import pytest
import torch

import quantdiff
from quantdiff.analysis.evaluation import Text, evaluation
from quantdiff.analysis.exported import measuring
from quantdiff.calibration import text_windows
from quantdiff.export.formats import find_format
from quantdiff.export.passage import last_logits
from quantdiff.export.sidecar import LOGITS, QUANTIZED_LOGITS, read_sidecar
from quantdiff.models import load as load_model
from quantdiff.models import zoo


@pytest.mark.parametrize("format_", ["bnb-nf4", "ct-w8a16"])
def test_smollm2(smollm2, tmp_path, format_):
    model, tokenizer = smollm2
    before = {name: value.clone() for name, value in model.state_dict().items()}
    windows = text_windows("corpus:train", tokenizer, tokens=256, seq_len=128)
    table = quantdiff.calibrate(model, windows)
    scheme = quantdiff.Scheme("attention_logits", 6, "percentile:99.9", "head")
    text = Text("corpus", 128, 128)
    measure, _ = measuring(model, tokenizer, text)
    made = quantdiff.export(
        model, tokenizer, tmp_path / "out", format=format_, schemes=[scheme], table=table,
        max_shard_size="40MB", measure=measure, check=False,
    )  # fmt: skip
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert made.bits_per_weight < (10.5 if format_ == "bnb-nf4" else 13.5)

    sidecar = read_sidecar(tmp_path / "out")
    ids = sidecar.content["passage"]["ids"]
    assert len(ids) == 64
    plain, _ = load_model(tmp_path / "out", device="cpu")
    assert torch.equal(last_logits(plain, ids), sidecar.logits[LOGITS])
    assert plain.lm_head.weight is plain.model.embed_tokens.weight
    loaded, _ = quantdiff.load(tmp_path / "out", device="cpu")
    assert torch.equal(last_logits(loaded, ids), sidecar.logits[QUANTIZED_LOGITS])
    again = evaluation("perplexity", loaded, tokenizer, text).run(batch_size=1).metrics[0].value
    assert made.measured is not None
    assert again == pytest.approx(made.measured["perplexity"], rel=1e-6)


@pytest.mark.parametrize(
    "format_", ["bf16", "bnb-int8", "bnb-nf4", "quanto-int4", "ct-w4a16", "ct-w8a8"]
)
@pytest.mark.parametrize("name", zoo.shipped())
def test_the_zoo_after_a_pass(tmp_path, name, format_):
    """No group divides its feed-forward parts, nor does a block of bitsandbytes."""
    model, tokenizer = quantdiff.load(name, device="cpu")
    scheme = quantdiff.Scheme("attention_logits", 4)
    with torch.no_grad(), quantdiff.fake_quantize(model, scheme):
        model(input_ids=torch.arange(64)[None])
    before = {key: value.clone() for key, value in model.state_dict().items()}
    quantdiff.export(
        model, tokenizer, tmp_path / "out", format=format_, schemes=[scheme], check=False
    )
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    sidecar = read_sidecar(tmp_path / "out")
    ids, known = sidecar.content["passage"]["ids"], sidecar.content["export"]
    dtype = getattr(torch, known["dtype"])
    theirs = find_format(format_).load(tmp_path / "out", torch.device("cpu"), dtype, False)
    assert torch.equal(last_logits(theirs, ids), sidecar.logits[LOGITS])
    ours, _ = quantdiff.load(tmp_path / "out", device="cpu")
    assert torch.equal(last_logits(ours, ids), sidecar.logits[QUANTIZED_LOGITS])
    # And what was written is that model: unrelated logits are √2 of their spread apart.
    wanted = last_logits(model, ids)
    gap = (sidecar.logits[LOGITS] - wanted).square().mean().sqrt()
    assert gap < 0.5 * wanted.std()
