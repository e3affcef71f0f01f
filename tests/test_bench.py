"""The benchmarks measure their peaks with as many threads as their times."""

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import quantdiff
from tests.tiny import save_tiny, tiny_ids, tiny_llama

SCRIPTS = Path(__file__).parent.parent / "scripts"


@pytest.fixture
def here(monkeypatch, capsys):
    """The processes that a benchmark starts run here; gives the threads that each has set."""
    threads = []

    def run(command, **_):
        monkeypatch.setattr(sys, "argv", command[1:])
        sys.modules[Path(command[1]).stem].main()
        threads.append(torch.get_num_threads())
        return SimpleNamespace(stdout=capsys.readouterr().out)

    before = torch.get_num_threads()
    monkeypatch.syspath_prepend(SCRIPTS)
    monkeypatch.setattr(subprocess, "run", run)
    torch.set_num_threads(3)
    yield threads
    torch.set_num_threads(before)


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="Linux counts the peak")
def test_peaks_are_measured_with_the_threads_of_the_times(here, tmp_path, monkeypatch):
    import bench_profile
    import bench_quantize

    monkeypatch.setattr(bench_quantize, "LENGTH", 70)
    model, table = str(save_tiny(tmp_path / "model")), str(tmp_path / "table")
    quantdiff.calibrate(tiny_llama(), {"input_ids": tiny_ids()}).save(table)
    assert bench_profile.peak(model, "plain", 70, head=True, processes=1) > 1 << 20
    assert bench_quantize.peak(model, table, "plain", 4, processes=1) > 1 << 20
    assert here == [3, 3]
