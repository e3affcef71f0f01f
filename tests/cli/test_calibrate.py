"""`quantdiff calibrate` as a user runs it."""

import json
import subprocess
import sys

import pytest

from quantdiff import CalibrationTable
from tests.cli.conftest import refused
from tests.tiny import save_tiny, tiny_diffllama

TEXT = "the king and the sea and the whale in the winter " * 60


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(save_tiny(tmp_path_factory.mktemp("model"), tiny_diffllama()))


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text(TEXT)
    return str(path)


def small(model, text, *more):
    """Arguments of a short calibration."""
    return ("calibrate", model, "--data", text, "--tokens", 240, "--seq-len", 30, *more)


def test_writes_a_table(run, model, text, tmp_path):
    out = tmp_path / "run"
    code, shown, _ = run(*small(model, text, "--out", out))
    assert code == 0
    assert {p.name for p in out.iterdir()} == {"calibration.json", "calibration.safetensors"}
    table = CalibrationTable.load(out)
    assert table.data["tokens"] == 240
    assert table.data["sequence_length"] == 30
    assert table.data["source"] == text
    assert table.data["earlier_tokens"] == 180
    assert "--seq-len 30" in table.command
    words = ("percentile 99.9", "mse at 4 bits", "entropy at 8 bits", "moved over the last 25%")
    for word in (*words, str(out)):
        assert word in shown


def test_keeps_ranges_of_other_sites(run, model, text, tmp_path):
    out = tmp_path / "run"
    code, shown, _ = run(*small(model, text, "--sites", "linear_inputs,keys", "--out", out))
    assert code == 0
    table = CalibrationTable.load(out)
    assert list(table.more) == ["linear_inputs", "keys"]
    assert "ranges of the linear inputs of 14 modules" in shown
    content = json.loads((out / "calibration.json").read_text())
    assert set(content["definition"]) == {"attention_logits", "linear_inputs", "keys"}
    assert set(content["keys"]["sites"][0]["heads"][0]) == {"head", "count", "min", "max"}
    assert set(content["linear_inputs"]["sites"][0]) == {"name", "layer", "count", "min", "max"}
    refused(run(*small(model, text, "--sites", "logits")), "'logits'", "hidden_states")


def test_json_is_the_file(run, model, text, tmp_path):
    code, out, _ = run(*small(model, text, "--json", "--out", tmp_path / "a"))
    assert code == 0
    assert json.loads(out) == json.loads((tmp_path / "a" / "calibration.json").read_text())


def test_warns_of_too_little_data(run, model, text):
    code, _, err = run("calibrate", model, "--data", text, "--tokens", 12, "--seq-len", 4)
    assert code == 0
    assert err.count("warning: ") == 1
    assert "too little" in err


def test_the_default_text_is_the_training_text(run, model):
    code, out, _ = run("calibrate", model, "--tokens", 64, "--seq-len", 32, "--json")
    assert code == 0
    assert json.loads(out)["data"]["source"] == "corpus:train"


class TestRefusals:
    def test_unknown_model(self, run):
        refused(run("calibrate", "no-such-model"), "no-such-model")

    def test_missing_text(self, run, model, tmp_path):
        refused(run("calibrate", model, "--data", tmp_path / "none.txt"), "none.txt")

    def test_seq_len_beyond_the_context(self, run, model, text):
        refused(run("calibrate", model, "--data", text, "--seq-len", 4096), "4096", "128")

    def test_another_run_in_out(self, run, model, text, tmp_path):
        assert run(*small(model, text, "--out", tmp_path))[0] == 0
        refused(run(*small(model, text, "--out", tmp_path)), "--overwrite")
        assert run(*small(model, text, "--out", tmp_path, "--overwrite"))[0] == 0


def test_help_shows_examples():
    result = subprocess.run([sys.executable, "-m", "quantdiff", "calibrate", "--help"],
                            capture_output=True, text=True, check=True)  # fmt: skip
    assert "Examples" in result.stdout
    assert "--seq-len" in result.stdout
