import json

import numpy as np
import pytest

from quantdiff import UsageError
from quantdiff.analysis.sweep import SweepResults
from quantdiff.analysis.sweep.results import ResultsFile, read_items, read_rows
from tests.analysis.sweep.conftest import row, write_sweep

TWO = [row("a", "m"), row("a", "m", metric="nll", value=2.3)]


@pytest.fixture
def file(tmp_path):
    file = ResultsFile(tmp_path)
    file.append(TWO, {"nll": np.arange(3.0)})
    file.append([row("b", "m", ("dynamic", "tensor", True), 4)], {"nll": np.arange(4.0)})
    return file


def test_rows_and_items_come_back(file, tmp_path):
    assert [line["cell"] for line in read_rows(file.path)] == ["a", "a", "b"]
    assert read_rows(file.path)[:2] == TWO
    assert file.finished() == {"a", "b"}
    items = read_items(tmp_path, "b")
    assert list(items) == ["nll"]
    np.testing.assert_array_equal(items["nll"], np.arange(4.0))


def test_a_kill_at_any_byte_leaves_whole_cells(file):
    """Cut anywhere, the file is mended to the cells that were whole, and goes on from there."""
    content = file.path.read_bytes()
    ends = [0, content.index(b'{"cell": "b"'), len(content)]
    lines = [at for at, byte in enumerate(content) if byte == ord("\n")]
    cuts = {*range(0, len(content), 41), *(at + near for at in lines for near in (-1, 0, 1))}
    for cut in sorted(cuts):
        file.path.write_bytes(content[:cut])
        file.mend()
        kept = file.path.read_bytes()
        # A last line that lacks nothing but its end is whole.
        assert kept in (b"", content[: ends[1]], content), cut
        assert len(kept) == max(end for end in ends if end <= cut + (cut + 1 in ends)), cut
        file.append([row("c", "m")], {})
        assert [line["cell"] for line in read_rows(file.path)][-1] == "c"


def test_a_half_line_is_not_read(file):
    with file.path.open("ab") as stream:
        stream.write(b'{"cell": "c", "sta')
    assert file.finished() == {"a", "b"}


def test_a_broken_line_in_between_is_refused_by_number(file):
    lines = file.path.read_bytes().split(b"\n")
    file.path.write_bytes(b"\n".join([lines[0], b"{ no", *lines[1:]]))
    with pytest.raises(UsageError, match="line 2"):
        read_rows(file.path)


def test_a_cell_without_its_items_stays(file, tmp_path):
    for path in (tmp_path / "items").iterdir():
        path.unlink()
    file.mend()
    assert file.finished() == {"a", "b"}
    with pytest.raises(UsageError, match="items"):
        read_items(tmp_path, "a")


def test_a_value_that_is_no_number_is_not_written(file):
    before = file.path.read_bytes()
    with pytest.raises(ValueError, match="JSON"):
        file.append([row("c", "m", value=float("nan"))], {})
    assert file.path.read_bytes() == before


class TestWhatCounts:
    def test_a_success_after_failures(self, tmp_path):
        failed = {"status": "error", "error": "no", "metric": None, "value": None}
        write_sweep(tmp_path, [row("a", "m", **failed)])
        file = ResultsFile(tmp_path)
        assert file.finished() == set()
        file.append([row("a", "m", **failed | {"error": "still no"})])
        assert [line["error"] for line in SweepResults.load(tmp_path).failed] == ["still no"]
        file.append(TWO, {})
        results = SweepResults.load(tmp_path)
        assert results.rows == TWO
        assert results.failed == []
        file.mend()
        assert file.finished() == {"a"}

    def test_rows_stand_in_the_order_of_the_grid(self, tmp_path):
        rows = [row(cell, "m", ("dynamic", "tensor", True), 4) for cell in "cab"]
        write_sweep(tmp_path, rows)
        record = json.loads((tmp_path / "sweep.json").read_text())
        record["cells"] = ["a", "b", "c", "d"]
        (tmp_path / "sweep.json").write_text(json.dumps(record))
        results = SweepResults.load(tmp_path)
        assert [line["cell"] for line in results.rows] == ["a", "b", "c"]
        assert results.missing == 1


def test_a_folder_without_a_sweep_is_refused(tmp_path):
    with pytest.raises(UsageError, match=r"sweep\.json"):
        SweepResults.load(tmp_path)
