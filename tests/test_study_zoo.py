"""The study of small models: what it trains, and what it makes of the results."""

import json
import math
import sys
from dataclasses import replace
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
KINDS = ("transformer", "diff-v1", "diff-v2")


@pytest.fixture
def study(monkeypatch, tmp_path):
    """The study with a few steps for each model, and a page of its own."""
    monkeypatch.syspath_prepend(ROOT / "scripts")
    import study_zoo
    from zoo_recipe import SIZES

    tiny = replace(SIZES["tiny"], dtype="float32", tokens=6 * 8 * 64)
    variants = {"seeds": [replace(tiny, seed=seed) for seed in (0, 1)]}
    excerpt = ROOT / "calibration" / "corpus" / "train_excerpt.jsonl.xz"
    page = tmp_path / "zoo.md"
    page.write_text(f"before\n\n{study_zoo.BEGIN}\n\n{study_zoo.END}\n\nafter\n")
    for name, value in {
        "STUDY": variants, "BASE": tiny, "MEASURED": 1024, "LOOKED_AT": 4, "DATA": excerpt,
        "RESULTS": tmp_path / "study.json", "PAGE": page, "FIGURE": tmp_path / "study",
    }.items():  # fmt: skip
        monkeypatch.setattr(study_zoo, name, value)
    return study_zoo


def run(study, monkeypatch, *options):
    monkeypatch.setattr(sys, "argv", ["study_zoo.py", *map(str, options)])
    assert study.main() == 0


def test_models_are_trained_measured_and_told(study, monkeypatch, tmp_path):
    out = tmp_path / "runs"
    run(study, monkeypatch, "--out", out, "--collect")
    assert "0 of 6 models are trained." in study.PAGE.read_text()
    run(study, monkeypatch, "--out", out, "--part", "1/2")
    run(study, monkeypatch, "--out", out, "--collect")
    half = json.loads(study.RESULTS.read_text())["models"]
    found = [(m["recipe"]["seed"], m["kind"]) for m in half]
    assert found == [(0, "transformer"), (0, "diff-v2"), (1, "diff-v1")]
    run(study, monkeypatch, "--out", tmp_path / "elsewhere")  # what is collected is not repeated
    run(study, monkeypatch, "--out", tmp_path / "elsewhere", "--collect")
    models = json.loads(study.RESULTS.read_text())["models"]
    assert [m for m in models if m in half] == half
    assert [m["kind"] for m in models] == list(KINDS) * 2
    for m in models:
        assert [look["step"] for look in m["path"]] == [1, 2, 3, 4, 5, 6]
        assert m["path"][-1]["logit"] <= m["attention_logits"]["top1"] * 1.02  # bf16 weights there
        for look in m["path"]:
            assert all(math.isfinite(value) and value > 0 for value in look.values())
    text = study.PAGE.read_text()
    assert text.startswith("before\n\n")
    assert text.endswith("\n\nafter\n")
    row, _ = (line for line in text.splitlines() if line.startswith("| seeds | diff-v1 | 2 | "))
    top = {(m["recipe"]["seed"], m["kind"]): m["attention_logits"]["top1"] for m in models}
    times = sorted(top[seed, "diff-v1"] / top[seed, "transformer"] for seed in (0, 1))
    mean = math.sqrt(times[0] * times[1])
    assert f" {mean:.2f} ({times[0]:.2f}, {times[1]:.2f}) " in row
    assert (tmp_path / "study.png").stat().st_size > 10_000


def test_outliers_at_a_loss(study):
    from study_shown import at_loss

    def path(*looks):
        return [{"loss": loss, "logit": x, "hidden": 10 * x, "rate": 1.0} for loss, x in looks]

    way = path((6, 1), (5, 4), (5.5, 3), (4, 12), (4, 20))
    assert at_loss(way, 4) == {"logit": 20, "hidden": 200, "rate": 1}
    assert at_loss(way, 6) == {"logit": 1, "hidden": 10, "rate": 1}
    # It came down to 4.75 after its last rise, half way from 5.5 to 4.
    assert at_loss(way, 4.75)["logit"] == pytest.approx(6)
    for loss in (3.9, 6.1):
        with pytest.raises(ValueError, match="the path goes from 6 to 4"):
            at_loss(way, loss)
