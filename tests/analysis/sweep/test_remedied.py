"""Remedies in a sweep: part of what a cell is, put on in turn, refused where they do not go."""

import io

import pytest
import torch
from rich.console import Console

from quantdiff import Scheme, UsageError, fake_quantize
from quantdiff.analysis.evaluation import Text, evaluation
from quantdiff.analysis.sweep import (
    SweepResults,
    plot_sweep,
    save_sweep_figures,
    sweep,
    sweep_report,
)
from quantdiff.analysis.sweep.lines import lines, measures, way_label
from quantdiff.analysis.sweep.table import failures_table
from quantdiff.calibration import text_windows
from quantdiff.quantization import schemes
from quantdiff.quantization.remedy import remedy
from tests.tiny import tiny_diffllama, tiny_llama, tiny_tokenizer

REMEDIES = ("none", "smooth", "rotate", "rotate+smooth:0.8", "gptq")
W4A8, W3, KV4 = schemes("W4A8"), schemes("W3"), schemes("KV4")


@pytest.fixture
def run(text, tmp_path):
    def run(models, wanted, remedies, *, evaluations=("divergence",), **options):
        options = {"out": tmp_path / "out", "text": text, "calibration_tokens": 96} | options
        return sweep(models, wanted, evaluations, remedies=remedies, **options)

    return run


def value_of(results, **wanted):
    (row,) = [
        row for row in results.rows
        if row["metric"] == "kl" and row["options"].get("remedy") == wanted.get("remedy")
        and row["scheme"] == wanted["scheme"]
    ]  # fmt: skip
    return row["value"]


def test_each_cell_is_the_evaluation_under_its_remedy(run, live, text, tmp_path):
    model, tokenizer, _ = live
    before = {name: value.clone() for name, value in model.state_dict().items()}
    notes = []
    results = run([live], [[], W4A8, W3, KV4], REMEDIES, note=notes.append)
    assert results.failed == []
    assert notes == [
        "left out: gptq with KV4: gptq rounds weights, and there is no scheme for them"
    ]
    assert len(results.record["cells"]) == 1 + 3 * len(REMEDIES) - 1
    alone = evaluation("divergence", model, tokenizer, text)
    alone.prepare(tmp_path, batch_size=1)
    windows = text_windows("corpus:train", tokenizer, tokens=96, seq_len=24)
    work = list(windows.batches(1, pad_token_id=0))
    for name in REMEDIES:
        for told, together in (("W4A8", W4A8), ("W3", W3)):
            chosen = remedy(name)
            left = chosen.left(together)
            with torch.no_grad(), chosen.applied(model, work, together):
                outcome = alone.run(lambda left=left: fake_quantize(model, *left), batch_size=1)
            canonical = None if name == "none" else chosen.name
            found = value_of(results, scheme=told, remedy=canonical)
            assert found == pytest.approx(outcome.metrics[0].value, rel=1e-3)
    # Nothing that a remedy does reaches the logits' own sites but through rounding of fp32.
    plain = value_of(results, scheme="KV4")
    assert value_of(results, scheme="KV4", remedy="rotate") == pytest.approx(plain, rel=0.2)
    assert value_of(results, scheme="W3", remedy="gptq") < value_of(results, scheme="W3")
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name


def test_a_finished_sweep_computes_nothing_and_another_alpha_is_another_cell(small, live, known):
    options = {"text": Text("corpus", 96, 24), "calibration_tokens": 96}
    wanted = [[], W4A8]
    small_sweep = lambda remedies: sweep(  # noqa: E731
        [live], wanted, ["counted"], out=small.out, remedies=remedies, **options
    )
    results = small_sweep(("none", "smooth"))
    assert known.calls == 3
    small_sweep(("smooth:0.50", "none"))
    assert known.calls == 3
    results = small_sweep(("smooth:0.6",))
    assert known.calls == 4
    ways = {line.way for line in lines(results, measures(results)[0])}
    assert {way.remedy for way in ways} == {None, "smooth:0.5", "smooth:0.6"}
    assert {way_label(way) for way in ways} == {
        "W4A8", "W4A8, smooth:0.5", "W4A8, smooth:0.6"
    }  # fmt: skip
    assert list(results.frame()["remedy"].dropna().unique()) == ["smooth:0.5", "smooth:0.6"]


@pytest.fixture
def small(small, tmp_path):
    small.out = tmp_path / "out"
    return small


def test_cells_of_one_remedy_share_it(run, live, monkeypatch):
    """Sorted by what the model must be like, whatever the order of the grid."""
    from quantdiff.quantization import remedy as module

    entered = []
    step = module.STEPS["gptq"]

    def context(model, work, weights, columns):
        entered.append(weights)
        return step.context(model, work, weights, columns)

    monkeypatch.setitem(
        module.STEPS, "gptq", module.Step(step.spelt, context, reads=True, rounds=True)
    )
    wanted = [W3, schemes("W4A16"), schemes("W3A8"), W4A8, schemes("W3A6")]
    results = run([live], wanted, ("gptq", "rotate"), evaluations=("perplexity",))
    assert results.failed == []
    assert [weights[0].bits for weights in entered] == [3, 4]


def test_a_model_that_it_is_not_made_for_fails_its_cells_alone(run, live, known):
    model, tokenizer, _ = live
    layer = model.model.layers[0]
    real = layer.mlp.forward
    layer.mlp.forward = lambda x: real(x + x[..., :1].abs())
    other = (tiny_diffllama(), tokenizer, "other")
    results = run([live, other], [W4A8, W3], ("rotate", "none", "smooth"), evaluations=("counted",))
    failed = {(row["model"], row["options"]["remedy"]) for row in results.failed}
    assert failed == {("live", "rotate"), ("live", "smooth:0.5")}
    assert len(results.failed) == 4
    assert all("computes something else" in row["error"] for row in results.failed)
    console = Console(record=True, width=120, file=io.StringIO())
    console.print(failures_table(results))
    assert "W4A8 smooth:0.5" in console.export_text()
    assert results.missing == 0


def test_refusals(run, live, tmp_path):
    def refused(words, *arguments, **options):
        with pytest.raises(UsageError, match=words):
            run([live], *arguments, **options)
        assert not (tmp_path / "out").exists()

    refused("unknown remedy 'cure'", [W4A8], ("cure",))
    # On the text that they see, as ranges.
    training = Text("corpus:train", 96, 24)
    refused("remedies were calibrated on", [W4A8], ("smooth",), text=training)
    run([live], [W4A8], ("rotate",), text=training, out=tmp_path / "rotated")  # it sees none
    refused("grid is empty.*rounds weights", [KV4], ("gptq",))
    refused("noise compares hidden states", [W4A8], ("rotate",), evaluations=("noise",))
    static = Scheme("attention_logits", 4, "absmax")
    refused("a static range is calibrated on the model without", [static], ("smooth",))
    results = run([live], [static, W4A8], ("none", "smooth"))
    assert len(results.record["cells"]) == 3


def test_remedies_of_another_text_are_not_mixed(run, live):
    run([live], [W4A8], ("smooth",))
    with pytest.raises(UsageError, match="remedies of another calibration"):
        run([live], [W4A8], ("smooth",), calibration_tokens=48)
    run([live], [W4A8], ("rotate",), calibration_tokens=48)


def test_two_live_models_and_training_mode(run):
    training = (tiny_llama(seed=3).train(), tiny_tokenizer(), "training")
    results = run([training], [W4A8], ("smooth", "gptq"))
    assert results.failed == []
    assert training[0].training


def test_tables_and_figures_tell_remedies_apart(run, live, tmp_path):
    singles = [schemes("A8"), schemes("A4"), W4A8]
    run([live], [[], *singles], ("none", "smooth", "rotate"))
    results = SweepResults.load(tmp_path / "out")
    console = Console(record=True, width=120, file=io.StringIO())
    for part in sweep_report(results):
        console.print(part)
    shown = console.export_text()
    for words in ("smooth:0.5", "rotate", "W4A8"):
        assert words in shown
    page = plot_sweep(results, "ranges", way={"site": "linear_inputs"}, metric="kl")
    names = [text.get_text() for text in page.legends[0].get_texts()]
    assert names == ["dynamic", "dynamic, smooth:0.5", "dynamic, rotate"]
    page = plot_sweep(results, "sites", metric="kl")
    names = [text.get_text() for text in page.legends[0].get_texts()]
    assert len([name for name in names if name.startswith("W4A8")]) == 3
    files = {path.name for path in save_sweep_figures(results, tmp_path / "figures")}
    assert {"bits.png", "sites.png", "ranges.png"} <= files
