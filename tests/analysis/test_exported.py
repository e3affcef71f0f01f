"""What a checkpoint costs, and that it is not measured on what anything in it was calibrated on."""

import math

import pytest

import quantdiff
from quantdiff.analysis.evaluation import Text
from quantdiff.analysis.exported import export_table, measuring
from quantdiff.calibration import text_windows
from quantdiff.errors import UsageError
from quantdiff.export import Exported
from tests.analysis.evaluation.conftest import plain_logits
from tests.tiny import tiny_llama, tiny_tokenizer

RANGES = "the static ranges"


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    folder = tmp_path_factory.mktemp("texts")
    for name, word in (("a", "the in an and "), ("b", "er and the sea "), ("c", "a third one ")):
        (folder / f"{name}.txt").write_text(word * 60)
    (folder / "copy.txt").write_text((folder / "a.txt").read_text() + "and then some more of it")
    return folder


def calibrated(path, tokens=64):
    windows = text_windows(str(path), tiny_tokenizer(), tokens=tokens, seq_len=32)
    return quantdiff.calibrate(tiny_llama(), windows)


def measure(path, data, tokens=64, seq_len=None, what=RANGES):
    text = Text(str(path), tokens, seq_len)
    return measuring(tiny_llama(), tiny_tokenizer(), text, calibrated_on={what: data})


@pytest.mark.parametrize(("tokens", "seq_len"), [(64, 32), (32, 32), (128, 32), (64, 16), (64, 64)])
def test_however_much_of_the_text_is_taken(texts, tokens, seq_len):
    data = calibrated(texts / "a.txt").data
    with pytest.raises(UsageError, match=r"text that the static ranges were calibrated on \(.*a\."):
        measure(texts / "a.txt", data, tokens, seq_len)
    measure(texts / "b.txt", data, tokens, seq_len)


def test_a_text_under_another_name(texts):
    with pytest.raises(UsageError, match=r"text that the weights were calibrated on \(.*copy\."):
        measure(texts / "copy.txt", calibrated(texts / "a.txt").data, what="the weights")


@pytest.mark.parametrize("batch_size", [1, 3])
def test_is_that_of_a_plain_loop(texts, batch_size):
    source, copy = tiny_llama(), tiny_llama(seed=1)  # as far apart as it gets
    windows = text_windows(str(texts / "c.txt"), tiny_tokenizer(), tokens=64, seq_len=16)
    text = Text(str(texts / "c.txt"), 64, 16)
    run, _ = measuring(source, tiny_tokenizer(), text, batch_size=batch_size)
    found = run(copy)
    nll, kl, same = {"source": 0.0, "copy": 0.0}, 0.0, []
    for window in windows.windows:
        p, q = (plain_logits(model, window).log_softmax(-1) for model in (source, copy))
        for i, token in enumerate(window[1:].tolist()):
            nll["source"] -= float(p[i, token])
            nll["copy"] -= float(q[i, token])
            kl += sum(float(a.exp() * (a - b)) for a, b in zip(p[i], q[i], strict=True))
            same.append(int(p[i].argmax()) == int(q[i].argmax()))
    count = len(same)
    assert count == 4 * 15
    before, after = (math.exp(nll[name] / count) for name in ("source", "copy"))
    assert before != pytest.approx(after, rel=0.01)
    assert found["source"] == {"perplexity": pytest.approx(before, rel=1e-5)}
    assert found["perplexity"] == pytest.approx(after, rel=1e-5)
    assert found["kl"] == pytest.approx(kl / count, rel=1e-5)
    assert found["agreement"] == sum(same) / count


def test_small_losses_do_not_read_as_none():
    measured = {"perplexity": 2.0, "kl": 2.5e-6, "agreement": 0.99996}
    made = Exported("out", "bf16", "tiny", 100, 200, 400, "float32", (), measured, None)
    shown = export_table(made)
    assert shown.caption == "the source's size is that of the model as loaded (float32)"
    cells = [list(column.cells)[1] for column in shown.columns]
    assert cells == ["bf16", "0.0 MB", "16.00", "2.000", "2.500e-06", "99.996%"]


def test_each_text_of_a_merged_table(texts):
    data = calibrated(texts / "a.txt").merge(calibrated(texts / "b.txt")).data
    for name in ("a", "b"):
        with pytest.raises(UsageError, match="calibrated on"):
            measure(texts / f"{name}.txt", data, tokens=100)
    measure(texts / "c.txt", data)
