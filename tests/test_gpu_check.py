"""The run prepared for a GPU, to its end on a CPU, and what it does where something fails."""

import importlib.util
import json
import math
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import quantdiff
from tests.tiny import tiny_ids, tiny_llama

SCRIPTS = Path(__file__).parent.parent / "scripts"
PARTS = {
    "environment", "log-sum-exp", "tf32", "attention", "recording", "maps",
    "quantization", "export", "timing", "flex recording", "flex attention",
}  # fmt: skip


def run(out, *options):
    command = [sys.executable, str(SCRIPTS / "gpu_check.py"), "--cpu", "--out", str(out), *options]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        command, env=environment, capture_output=True, text=True, check=False, timeout=300
    )


def test_runs_to_its_end_on_a_cpu(tmp_path):
    result = run(tmp_path / "new" / "check.json")
    assert result.returncode == 0, result.stdout + result.stderr
    content = json.loads((tmp_path / "new" / "check.json").read_text())
    assert content["finished"]
    assert content["agreed"]
    assert content["device"] == "cpu"
    assert set(content["parts"]) == PARTS
    for name, part in content["parts"].items():
        assert part["status"] in ("ok", "missing"), name
        assert any(row["status"] == "ok" for row in part["rows"]), name
        for row in part["rows"]:
            assert row["status"] in ("ok", "missing"), (name, row)
            if row["status"] == "missing":
                assert len(row["reason"]) > 10
                continue
            assert row["within"] or row["told"]
            for error in row["within"].values():
                assert error["error"] <= error["bound"]
            assert row["check"] in result.stdout
    rows = [row for part in content["parts"].values() for row in part["rows"]]
    names = " ".join(row["check"] for row in rows)
    for expected in (
        "standard", "v1", "v2", "grouped", "Llama", "DiffLlama", "DiffV2", "eager", "sdpa", "flex",
        "flash-attn 2", "flash-attn 3", "flash-attn 4", "flash_attention_4", "float32", "bfloat16",
    ):  # fmt: skip
        assert expected in names
    if importlib.util.find_spec("flash_attn") is None:
        found = {row["status"] for row in rows if "flash-attn 2" in row["check"]}
        assert found == {"missing"}
    assert result.stdout.splitlines()[-2] == "agreed"


def test_without_time_it_is_not_finished(tmp_path):
    result = run(tmp_path / "check.json", "--minutes", "0")
    assert result.returncode == 1
    content = json.loads((tmp_path / "check.json").read_text())
    assert {part["status"] for part in content["parts"].values()} == {"not reached"}
    assert (content["finished"], content["agreed"]) == (False, None)
    assert result.stdout.splitlines()[-2] == "not finished"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_what_to_do():
    result = subprocess.run(
        [sys.executable, str(SCRIPTS / "gpu_check.py")], capture_output=True, text=True, check=False
    )
    assert result.returncode == 2
    assert "--cpu" in result.stderr


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(SCRIPTS)
    import gpu_check

    return gpu_check


def test_what_fails_is_told_and_stops_nothing(script, tmp_path, monkeypatch):
    place = script.Place(torch.device("cpu"), small=True, until=time.monotonic() + 60)
    monkeypatch.setattr(script, "LONGEST", 0.5)
    out = tmp_path / "check.json"
    seen = []

    def on_disk():
        seen.append(len(json.loads(out.read_text())["parts"]["tf32"]["rows"]))
        return script.Found({"error": (0.5, 1.0)}, {"number": 3})

    def broken():
        raise RuntimeError("the kernel said no")

    def lacking():
        raise script.MissingPartError("no such kernel")

    checks = [
        ("right", on_disk),
        ("wrong", lambda: script.Found({"error": (2.0, 1.0)})),
        ("not a number", lambda: script.Found({"error": (math.nan, 1.0)})),
        ("broken", broken),
        ("lacking", lacking),
        ("slow", lambda: time.sleep(30)),
        ("after all", on_disk),
    ]
    report = script.Report(out, "cpu", 1.0)
    report.save()
    script.run_part(report, "tf32", lambda: checks, place)
    rows = report.content["parts"]["tf32"]["rows"]
    assert [row["status"] for row in rows] == [
        "ok", "failed", "failed", "failed", "missing", "not reached", "ok",
    ]  # fmt: skip
    assert seen == [0, 6]  # a kill loses nothing
    assert "the kernel said no" in rows[3]["reason"]
    assert "stopped" in rows[5]["reason"]
    assert report.content["parts"]["tf32"]["status"] == "failed"
    script.run_part(report, "timing", broken, place)
    assert report.content["parts"]["timing"]["status"] == "failed"
    report.end()
    text = script.table(json.loads(out.read_text()))
    assert "the kernel said no" in text
    assert "error 2 ≤ 1" in text
    assert text.endswith("NOT AGREED")


@pytest.mark.parametrize("at", [0, 1])
def test_a_nan_never_passes_for_agreement(script, at):
    from gpu_checks.common import largest
    from gpu_checks.maps import EXACT, MEASURES, _errors
    from gpu_checks.recording import _alike

    errors = [0.5, 0.5]
    assert largest(errors) == 0.5
    errors[at] = math.nan
    assert math.isnan(largest(errors))
    exact = [(layer, "softmax", dict.fromkeys(MEASURES, 0.5)) for layer in range(2)]
    assert script.Found(_errors("", exact, exact, EXACT)).good
    mine = [(layer, kind, dict(measures)) for layer, kind, measures in exact]
    mine[at][2]["sink"] = math.nan
    assert not script.Found(_errors("", mine, exact, EXACT)).good
    with torch.no_grad(), quantdiff.record(tiny_llama()) as recorder:
        recorder._model(tiny_ids(1, 8))
    full = recorder.profile()
    assert script.Found(_alike(full, full)).good
    for name in ("min", "max"):
        short = full.copy()
        getattr(short.attention_logits.sites[at], name)[at] = math.nan
        assert not script.Found(_alike(short, full)).good


@pytest.mark.parametrize(
    ("change", "finished", "agreed", "text"),
    [
        ({}, True, True, "agreed"),
        ({"timing": "late"}, False, None, "not finished"),  # one row of a part
        ({"timing": None}, False, None, "not finished"),  # a part that was never begun
        ({"timing": "wrong"}, True, False, "NOT AGREED"),
        ({"timing": "wrong", "maps": None}, False, False, "NOT AGREED"),
        ({"timing": "wrong and late"}, False, False, "NOT AGREED"),
        (dict.fromkeys(PARTS, "lacking"), False, None, "not finished"),
        (dict.fromkeys(PARTS, "telling"), False, None, "not finished"),
    ],
)
def test_it_agrees_only_where_all_of_it_ran(script, tmp_path, change, finished, agreed, text):
    def lacking():
        raise script.MissingPartError("no such kernel")

    def late():
        raise script.NotReachedError("no time")

    checks = {
        "right": lambda: script.Found({"error": (0.5, 1.0)}),
        "wrong": lambda: script.Found({"error": (2.0, 1.0)}),
        "telling": lambda: script.Found(told={"a name": "GPU"}),
        "lacking": lacking,
        "late": late,
    }
    place = script.Place(torch.device("cpu"), small=True, until=time.monotonic() + 60)
    report = script.Report(tmp_path / "check.json", "cpu", 1.0)
    for part in script.SHARES:
        kind = change.get(part, "right")
        if kind is not None:
            names = {"late": ["right", "late"], "wrong and late": ["wrong", "late"]}
            rows = [(name, checks[name]) for name in names.get(kind, [kind])]
            script.run_part(report, part, lambda rows=rows: rows, place)
    report.end()
    content = json.loads((tmp_path / "check.json").read_text())
    assert (content["finished"], content["agreed"]) == (finished, agreed)
    assert script.table(content).splitlines()[-1] == text
