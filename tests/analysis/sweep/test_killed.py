"""A sweep that is killed, and one that many processes share."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from quantdiff.analysis.sweep import SweepResults, make_grid, sweep
from tests.analysis.sweep.kill_driver import KILLS
from tests.tiny import save_tiny, tiny_diff_v2, tiny_llama

ROOT = Path(__file__).parents[3]
PATIENCE = 300  # seconds


def python(*arguments, **environment):
    process = subprocess.Popen(
        [sys.executable, "-m", *map(str, arguments)], stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True, cwd=ROOT, start_new_session=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"} | environment,
    )  # fmt: skip
    try:
        out, err = process.communicate(timeout=PATIENCE)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # with all that it has started
        out, err = process.communicate()
        pytest.fail(f"still running after {PATIENCE} seconds:\n{out}\n{err}")
    assert process.returncode == 0, err
    return out


def content(folder):
    """All lines without the time they took, and all items."""
    lines = [json.loads(line) for line in (folder / "results.jsonl").read_text().splitlines()]
    results = SweepResults.load(folder)
    items = {line["cell"]: results.items(line["cell"]) for line in lines}
    return [{k: v for k, v in line.items() if k != "seconds"} for line in lines], items


def assert_same(a, b):
    """The same results up to their order, each once."""
    lines_a, items_a = content(a)
    lines_b, items_b = content(b)

    def key(line):
        return line["cell"], line["metric"]

    assert len(lines_a) == len(set(map(key, lines_a)))
    assert sorted(lines_a, key=key) == sorted(lines_b, key=key)
    assert items_a.keys() == items_b.keys()
    for cell, arrays in items_a.items():
        assert arrays.keys() == items_b[cell].keys()
        for name, array in arrays.items():
            np.testing.assert_array_equal(array, items_b[cell][name])


@pytest.fixture(scope="session")
def four(folders, tmp_path_factory):
    """Four models: a Transformer of each of two seeds, a DiffLlama, a DIFF V2."""
    top = tmp_path_factory.mktemp("four")
    made = {"seed": tiny_llama(seed=1), "v2": tiny_diff_v2()}
    return [*folders, *(str(save_tiny(top / name, model)) for name, model in made.items())]


def killed(kind, models, text, folder):
    """What each life did; all but the last were killed, and nothing was lost."""
    output = python("tests.analysis.sweep.kill_driver", kind, text.source, folder, *models)
    lives = json.loads(output.splitlines()[-1])
    assert [life["killed"] for life in lives] == [True] * KILLS[kind] + [False]
    assert_same(folder / "killed", folder / "whole")
    assert sum(len(life["left"]) > len(life["finished"]) for life in lives) > KILLS[kind] / 3
    assert not list((folder / "killed").rglob(".*"))
    return lives


def test_six_sites_of_four_models_at_three_widths_resume(four, text, tmp_path):
    lives = killed("sites", four, text, tmp_path)
    results = SweepResults.load(tmp_path / "killed")
    assert len(results.record["cells"]) == 6 * 3 * 4
    assert results.missing == 0
    assert results.models == four
    begun = [life["words"].count("run") for life in lives]
    assert all(begun)
    assert 72 <= sum(begun) <= 72 + KILLS["sites"]


def test_ten_kills_lose_and_repeat_nothing(folders, text, tmp_path):
    lives = killed("ranges", folders[:1], text, tmp_path)
    counted = {
        row["cell"]
        for row in SweepResults.load(tmp_path / "whole").rows
        if row["eval"] == "counted"
    }
    assert len(counted) == 21
    for life in lives:
        before, left = set(life["finished"]), set(life["left"])
        assert before <= left
        # What a life began is what it finished, and the one cell that it was killed in.
        begun, new = life["words"].count("run"), len(counted & (left - before))
        assert begun - new in ((0, 1) if life["killed"] else (0,))
        assert life["words"].count("prepare") <= 1


def test_two_processes_of_torchrun_are_as_one(folders, text, tmp_path):
    schemes = make_grid(bits=(16, 8, 4), ranges=("dynamic", "absmax")).schemes
    sweep(
        folders, schemes, ["perplexity", "divergence"], out=tmp_path / "one", text=text,
        calibration_tokens=96, device="cpu",
    )  # fmt: skip
    shown = python(
        "torch.distributed.run", "--standalone", "--nproc-per-node", 2, "-m",
        "quantdiff", "sweep", *folders, "--bits", "16,8,4", "--range", "dynamic,absmax",
        "--eval", "perplexity", "--eval", "divergence", "--data", text.source,
        "--tokens", text.tokens, "--seq-len", text.seq_len, "--calibration-tokens", 96,
        "--device", "cpu", "--out", tmp_path / "two",
    )  # fmt: skip
    assert_same(tmp_path / "one", tmp_path / "two")
    assert shown.count("20 of 20 cells") == 1
    assert len(list((tmp_path / "two" / "calibration").iterdir())) == 2
