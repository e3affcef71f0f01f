import pytest

from quantdiff.analysis.sweep import progress
from quantdiff.analysis.sweep.distributed import Processes
from quantdiff.analysis.sweep.grid import Cell


def cell(number, evaluation="perplexity", model="folder/m"):
    return Cell(f"{evaluation}{number}", model, evaluation, (), "d", None)


@pytest.fixture
def clock(monkeypatch):
    """Seconds, moved by hand."""
    now = [0.0]
    monkeypatch.setattr(progress.time, "perf_counter", lambda: now[0])
    return now


def test_time_left_by_kind_of_cell(clock):
    cells = [cell(0), cell(1), cell(0, "choice:x"), cell(1, "choice:x")]
    told = []
    tracker = progress.Tracker(cells, 4, Processes(), told.append)
    tracker.begin(cells[0], 100)
    assert (told[-1].done, told[-1].total, told[-1].left) == (4, 8, None)
    assert "m · perplexity" in told[-1].doing
    clock[0] = 5.0
    tracker.advance(50)
    assert told[-1].done == 4.5
    # A cell takes 10 seconds as far as is known: half of this one and three more.
    assert told[-1].left == pytest.approx(35)
    clock[0] = 10.0
    tracker.advance(50)
    tracker.end(cells[0], failed=False)
    assert told[-1].left == pytest.approx(30)
    tracker.begin(cells[2], 10)
    clock[0] = 12.0
    tracker.advance(1)  # 20 seconds a cell of this kind
    assert told[-1].left == pytest.approx(10 + 18 + 20)
    tracker.end(cells[2], failed=True)
    for one in (cells[1], cells[3]):
        tracker.begin(one, 10)
        tracker.end(one, failed=False)
    assert (told[-1].done, told[-1].left) == (8, 0)


def test_it_never_runs_past_the_end(clock):
    told = []
    one = cell(0)
    tracker = progress.Tracker([one], 0, Processes(), told.append)
    tracker.begin(one, 10)
    tracker.advance(25)
    assert told[-1].done == 1
