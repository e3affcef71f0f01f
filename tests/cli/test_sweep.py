"""`quantdiff sweep` as a user runs it."""

import json
import os
import signal
import subprocess
import sys

import pytest

from quantdiff.analysis.sweep import SweepResults
from tests.analysis.evaluation.conftest import write_task
from tests.analysis.sweep import counted
from tests.cli.conftest import refused
from tests.tiny import save_tiny, tiny_diffllama, tiny_llama

TEXT = "the king and the sea and the whale in the winter " * 30


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    top = tmp_path_factory.mktemp("models")
    return [
        str(save_tiny(top / "plain", tiny_llama())),
        str(save_tiny(top / "diff", tiny_diffllama())),
    ]


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text(TEXT)
    return str(path)


@pytest.fixture(scope="module")
def questions(tmp_path_factory):
    path = tmp_path_factory.mktemp("questions") / "questions.jsonl"
    lines = [{"query": f"the {n}", "choices": ["king", "whale"], "gold": 0} for n in "abcd"]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


@pytest.fixture
def small(run, models, text, tmp_path):
    """Run a short sweep of one model, with more arguments."""

    def small(*more, models=models[:1], out=tmp_path / "out"):
        more = more if "--eval" in more else (*more, "--eval", "perplexity")
        return run(
            "sweep", *models, "--data", text, "--tokens", 96, "--seq-len", 24,
            "--calibration-tokens", 96, "--device", "cpu", "--out", out, *more,
        )  # fmt: skip

    return small


def test_writes_results_items_and_figures(small, models, tmp_path):
    code, shown, err = small(
        "--bits", "16", "--bits", "4", "--range", "dynamic,mse", "--granularity", "tensor,row",
        "--asymmetric", "--eval", "perplexity", "--eval", "divergence", models=models,
    )  # fmt: skip
    assert code == 0
    results = SweepResults.load(tmp_path / "out")
    assert results.missing == 0
    # 16 bits, and 4 bits in 3 ways on 2 grids, for 2 evaluations of 2 models.
    assert len(results.record["cells"]) == (1 + 3 * 2) * 2 * 2
    assert "28 of 28 cells" in shown
    for word in ("plain", "diff", "perplexity", "kl", "agreement", str(tmp_path / "out")):
        assert word in shown
    assert err.count("note: left out") == 1
    assert "--granularity tensor,row" in results.record["commands"][0]
    names = {path.name for path in (tmp_path / "out" / "figures").iterdir()}
    assert {"bits.png", "bits.svg", "bits.csv"} <= names
    assert len(names) == 9
    assert len(list((tmp_path / "out" / "items").iterdir())) == 28
    # In a log: a line a cell, with the time left.
    assert "28 of 28 cells, 0:00:00 left" in err
    code, again, err = small("--bits", "16,4", models=models)
    assert code == 0
    assert "note: 4 of 4 cells are finished already" in err
    assert again == shown


def test_json_is_the_file(small, tmp_path):
    code, out, err = small("--bits", "16,4", "--json")
    assert code == 0
    told = json.loads(out)
    lines = (tmp_path / "out" / "results.jsonl").read_text().splitlines()
    assert told["results"] == [json.loads(line) for line in lines]
    assert (told["cells"], told["missing"]) == (2, 0)
    assert "cells," not in err


def test_a_task_of_lm_eval(small, questions, tmp_path):
    task = write_task(tmp_path, questions)
    code, shown, err = small("--bits", "16,4", "--eval", f"lm-eval:{task}")
    assert code == 0, err
    assert "acc · lm-eval:own.yaml" in " ".join(shown.split())
    rows = SweepResults.load(tmp_path / "out").rows
    assert [(row["bits"], row["metric"]) for row in rows] == [
        (bits, metric) for bits in (16, 4) for metric in ("acc", "acc_norm")
    ]
    assert all(row["count"] == 4 and 0 <= row["value"] <= 1 for row in rows)


def test_published_lines(small, questions):
    code, shown, _ = small("--bits", "16,4", "--eval", f"choice:{questions}", "--published")
    assert code == 0
    assert "2410.05258" in shown
    code, shown, err = small("--bits", "16,4", "--published", "--overwrite")
    assert code == 0
    assert "2410.05258" not in shown
    assert "note: no accuracy" in err


def test_a_failing_cell_is_told_and_the_exit_code_is_1(small, tmp_path):
    unregister = counted.register()
    try:

        def fail(call):
            if call == 2:
                raise RuntimeError("no memory")

        counted.on_run = fail
        code, shown, _ = small("--bits", "16,8,4", "--eval", "counted")
        assert code == 1
        for word in ("1 failed", "no memory", "L8 dynamic tensor"):
            assert word in shown
        # A start that does not ask for the failed cell does well.
        assert small("--bits", "16,4", "--eval", "counted")[0] == 0
        assert small("--bits", "16,8,4", "--eval", "counted")[0] == 0
    finally:
        unregister()


def test_ctrl_c_stops_and_the_next_start_goes_on(small, tmp_path):
    unregister = counted.register()
    try:

        def press(call):
            if call == 2:
                os.kill(os.getpid(), signal.SIGINT)

        counted.on_run = press
        code, shown, err = small("--bits", "16,8,4", "--eval", "counted")
        assert code == 130
        assert "stopping" in err
        assert "1 of 3 cells" in shown
        counted.on_run = None
        code, shown, _ = small("--bits", "16,8,4", "--eval", "counted")
        assert code == 0
        assert counted.calls == 4
    finally:
        unregister()


def test_tables_of_a_calibration(run, small, models, text, tmp_path):
    for number, model in enumerate(models):
        code, _, _ = run(
            "calibrate", model, "--tokens", 96, "--seq-len", 24, "--out", tmp_path / str(number)
        )
        assert code == 0
    tables = ("--table", tmp_path / "0", "--table", tmp_path / "1")
    code, _, _ = small("--bits", "4", "--range", "absmax", *tables, models=models)
    assert code == 0
    assert not (tmp_path / "out" / "calibration").exists()
    refused(
        small("--bits", "4", "--range", "absmax", *tables, "--data", "corpus:train",
              out=tmp_path / "other", models=models),
        "corpus:train", "calibrated on",
    )  # fmt: skip


class TestRefusals:
    @pytest.mark.parametrize(
        ("arguments", "words"),
        [
            (("--bits", "high"), ("--bits", "high")),
            (("--bits", "12"), ("12",)),
            (("--bits", ","), ("empty", "bits")),
            (("--range", "best"), ("best", "percentile")),
            (("--range", "mse", "--granularity", "row"), ("empty", "row")),
            (("--granularity", "channel"), ("channel", "head")),
            (("--site", "nowhere"), ("nowhere", "attention_logits")),
            (("--eval", "guess"), ("guess", "perplexity")),
            (("--eval", "choice:none.jsonl"), ("none.jsonl",)),
            (("--data", "corpus:train", "--range", "mse"), ("corpus:train", "calibrated on")),
            (("--data", "none.txt"), ("none.txt",)),
            (("--seq-len", 4096), ("4096", "128")),
            (("--table", "none", "--range", "mse"), ("none", "calibration.json")),
            (("--table", "none"), ("static",)),
        ],
    )
    def test_one_sentence(self, small, arguments, words, tmp_path):
        refused(small(*arguments), *words)
        assert not (tmp_path / "out").exists()

    def test_unknown_model(self, small):
        refused(small(models=["no-such-model"]), "no-such-model")

    def test_a_folder_of_another_sweep(self, small, models, tmp_path):
        changed = tmp_path / "changed"
        save_tiny(changed)
        assert small("--bits", "4", models=[str(changed)])[0] == 0
        save_tiny(changed, tiny_llama(seed=1))
        refused(small("--bits", "4", models=[str(changed)]), "changed", "--overwrite")
        assert small("--bits", "4", "--overwrite", models=[str(changed)])[0] == 0

    def test_without_an_evaluation(self, run, models, tmp_path):
        code, _, err = run("sweep", models[0], "--out", tmp_path)
        assert code == 2
        assert "--eval" in err


def test_help_shows_examples():
    result = subprocess.run([sys.executable, "-m", "quantdiff", "sweep", "--help"],
                            capture_output=True, text=True, check=True)  # fmt: skip
    for word in ("Examples", "--granularity", "torchrun", "noise"):
        assert word in result.stdout


def test_text_that_is_shorter_than_asked_for_is_told(small, models, tmp_path):
    path = tmp_path / "short.txt"
    path.write_text("the king and the sea")
    arguments = ("--bits", 16, "--data", path, "--eval", "perplexity", "--eval", "noise")
    code, _, err = small(*arguments)
    assert code == 0, err
    (told,) = [line for line in err.splitlines() if "asked for" in line]
    held = SweepResults.load(tmp_path / "out").record["models"][models[0]]["evaluations"]
    tokens = held["perplexity"]["settings"]["tokens"]
    assert told == f"note: {path} holds {tokens} tokens, not the 96 asked for"
    _, _, err = small(*arguments, models=models)
    assert [line.partition(": ")[2] for line in err.splitlines() if "asked for" in line] == [
        f"{model}: {path} holds {tokens} tokens, not the 96 asked for" for model in models
    ]
    assert "asked for" not in small("--bits", 16, out=tmp_path / "whole")[2]


def test_sites_together_by_short_names(small, tmp_path):
    code, shown, err = small("--scheme", "W8A8,W4A8", "--scheme", "W8A8+KV4+L6")
    assert code == 0
    assert (
        "note: W4A8: weights at 4 bits, dynamic range per channel, symmetric; "
        "linear inputs at 8 bits"
    ) in err
    results = SweepResults.load(tmp_path / "out")
    found = {row["scheme"]: row for row in results.rows if row["metric"] == "perplexity"}
    assert list(found) == ["fp", "W8A8", "W4A8", "W8A8+KV4+L6"]
    assert found["W8A8"]["site"] == "weights+linear_inputs"
    assert [found[name]["bits"] for name in found] == [16, 8, 4, 4]
    assert found["W8A8+KV4+L6"]["causal"] is False
    assert [one["site"] for one in found["W8A8+KV4+L6"]["options"]["schemes"]] == [
        "weights", "linear_inputs", "keys", "values", "attention_logits"
    ]  # fmt: skip
    assert found["W8A8"]["value"] != found["W4A8"]["value"]
    for name in found:
        assert name == "fp" or name in shown
    assert (tmp_path / "out" / "figures" / "sites.png").exists()
    # A part of it again, beside a grid of its own, computes only what is new.
    code, _, err = small("--scheme", "A8W8", "--bits", "16,4", "--site", "keys")
    assert code == 0
    assert "2 of 3 cells are finished already" in err


def test_short_names_are_told_with_their_newest_tokens(small):
    code, _, err = small("--scheme", "KV4r8")
    assert code == 0
    assert "keys at 4 bits, dynamic range per token, asymmetric, but for the newest 8 tokens" in err


@pytest.mark.parametrize(
    "option",
    [("--range", "absmax"), ("--granularity", "head"), ("--site", "keys"), ("--asymmetric",)],
)
def test_options_of_a_grid_that_there_is_not(small, option, tmp_path):
    refused(small("--scheme", "W8A8", *option), option[0], "--scheme", "--bits")
    refused(small("--scheme", "W8A8", "--bits", "16", *option), option[0])
    assert not (tmp_path / "out").exists()


def test_short_names_that_are_none(small):
    refused(small("--scheme", "W0A8"), "W0 in 'W0A8': bits are 2 to 8")
    refused(small("--scheme", "Q4"), "unknown short name 'Q4'")


def test_remedies_on_one_table(small, tmp_path):
    code, shown, err = small(
        "--scheme", "W4A4,KV4", "--remedy", "none,smooth:0.5", "--remedy", "gptq",
        "--eval", "divergence",
    )  # fmt: skip
    assert code == 0
    assert "note: left out: gptq with KV4: gptq rounds weights" in err
    for words in ("W4A4", "smooth:0.5", "gptq", "KV4"):
        assert words in shown
    results = SweepResults.load(tmp_path / "out")
    told = [row["options"].get("remedy") for row in results.rows if row["metric"] == "kl"]
    assert told == [None, None, None, "smooth:0.5", "smooth:0.5", "gptq"]
    commands = results.record["commands"]
    assert "--remedy gptq" in commands[0]
    refused(small("--scheme", "W4A4", "--remedy", "cure"), "unknown remedy 'cure'")


def test_layers_ranked_and_bits_shared_out(small, tmp_path):
    arguments = (
        "--scheme", "W8A16,W4A16,W3A16", "--per-layer", "--budget", "6", "--eval", "divergence"
    )  # fmt: skip
    code, shown, _ = small(*arguments)
    assert code == 0
    assert "weights, dynamic, channel, layer by layer · kl (divergence)" in shown
    assert "at most 6 bits on average" in shown
    assert "mixed" in shown
    figures = {path.name for path in (tmp_path / "out" / "figures").iterdir()}
    assert {"layers.png", "layers.svg", "layers.csv", "mixed.png", "mixed.csv"} <= figures
    code, out, _ = small(*arguments, "--json")
    assert code == 0
    told = json.loads(out)
    (ranking,), (plan,) = told["rankings"], told["plans"]
    assert sorted(ranking["ranking"]["3"]) == [0, 1]
    assert ranking["costs"]["3"] == sorted(ranking["costs"]["3"], reverse=True)
    assert plan["budget"] == 6
    assert sum(plan["bits"]) / 2 == plan["average"] <= 6
    assert plan["uniform"] == 4
    assert plan["measured"] <= plan["uniform_measured"]
    assert told["missing"] == 0


def test_bits_are_shared_out_by_the_layers_of_this_request(small, tmp_path):
    layers = ("--per-layer", "--eval", "divergence")
    assert small("--scheme", "W8A16", *layers)[0] == 0
    # No bits of the weights keep this budget.
    code, out, err = small("--bits", "16,4", "--budget", "5", *layers, "--json")
    assert code == 0, err
    told = json.loads(out)
    assert [plan["sites"] for plan in told["plans"]] == [["attention_logits"]]
    assert len(told["rankings"]) == 2


def test_a_ranking_stays_beside_a_request_that_was_stopped(small, tmp_path):
    assert small("--scheme", "W8A16", "--eval", "perplexity")[0] == 0
    record = json.loads((tmp_path / "out" / "sweep.json").read_text())
    record["cells"].append("stopped")
    (tmp_path / "out" / "sweep.json").write_text(json.dumps(record))
    arguments = ("--bits", "16,8,4", "--per-layer", "--budget", "6", "--eval", "divergence")
    code, out, err = small(*arguments, "--json")
    assert code == 0, err
    told = json.loads(out)
    assert told["missing"] == 1
    assert (len(told["rankings"]), len(told["plans"])) == (1, 1)


def test_bits_of_static_ranges_are_shared_out_with_their_tables(run, small, models, tmp_path):
    for number, model in enumerate(models):
        code, _, _ = run(
            "calibrate", model, "--tokens", 96, "--seq-len", 24, "--out", tmp_path / str(number)
        )
        assert code == 0
    code, out, err = small(
        "--range", "absmax,dynamic", "--bits", "16,4", "--per-layer", "--budget", 4,
        "--table", tmp_path / "0", "--table", tmp_path / "1", "--eval", "divergence", "--json",
        models=models,
    )  # fmt: skip
    assert code == 0, err
    plans = json.loads(out)["plans"]
    assert len(plans) == 2 * 2
    assert all(plan["measured"] is not None for plan in plans)
    assert not (tmp_path / "out" / "calibration").exists()


def test_nothing_to_rank_layers_by(small):
    refused(small("--bits", "4", "--per-layer", "--eval", "noise"), "noise", "--eval divergence")


def test_heads_ranked(small, tmp_path):
    code, shown, _ = small(
        "--site", "keys,attention_logits", "--bits", "4", "--per-head", "--eval", "divergence"
    )
    assert code == 0
    assert "keys, dynamic, token, head by head" in shown
    assert "attention logits, dynamic, tensor, head by head" in shown
    assert len(SweepResults.load(tmp_path / "out").record["cells"]) == 1 + 2 * (2 + 4)
    assert (tmp_path / "out" / "figures" / "heads-2.png").exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--per-layer", "--per-head"), ("two sweeps",)),
        (("--budget", 4), ("--per-layer",)),
        (("--per-layer", "--budget", 3), ("3 bits is below", "4")),
        (("--per-head", "--site", "weights"), ("weights have no heads",)),
        (("--per-layer", "--remedy", "rotate"), ("without remedies",)),
        (("--per-layer", "--bits", 16), ("no scheme",)),
    ],
)
def test_what_does_not_go_layer_by_layer(small, arguments, words, tmp_path):
    refused(small(*arguments), *words)
    assert not (tmp_path / "out").exists()
