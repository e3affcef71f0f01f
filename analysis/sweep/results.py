"""`results.jsonl` and `items/`: written cell by cell so that a kill at any moment loses none."""

import fcntl
import io
import json
import os
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quantdiff.errors import UsageError
from quantdiff.files import write_bytes

__all__ = ["ITEMS", "RESULTS", "ResultsFile", "Row", "current_rows", "read_items", "read_rows"]

RESULTS, ITEMS = "results.jsonl", "items"

# Stored with the items: the metrics of the cell, which show whether all of its lines were written.
_METRICS = "_metrics"

Row = dict[str, Any]


class ResultsFile:
    """The results of a sweep, to which any number of processes can append.

    A cell is one line per metric, all written in one call, after its items. So a kill can leave
    items without lines, and at the end of the file a part of one cell's lines, which `mend`
    removes.
    """

    def __init__(self, folder: Path) -> None:
        self.path, self.items = folder / RESULTS, folder / ITEMS

    def append(self, rows: Sequence[Row], items: Mapping[str, NDArray[Any]] | None = None) -> None:
        """Add a cell, which is on disk when this returns.

        Args:
            rows: the lines of one cell.
            items: results per question or window; None for a cell that failed.

        Raises:
            OSError: it cannot be written; the file then holds nothing of the cell.
        """
        if items is not None:
            self.items.mkdir(exist_ok=True)
            buffer = io.BytesIO()
            names = np.array([row["metric"] for row in rows])
            arrays: dict[str, Any] = {**items, _METRICS: names}
            np.savez_compressed(buffer, **arrays)
            write_bytes(self.items / f"{rows[0]['cell']}.npz", buffer.getvalue())
        lines = [json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n" for row in rows]
        content = "".join(lines).encode()
        with self._locked() as file:
            _end_line(file)
            end = os.fstat(file).st_size
            try:
                written = os.write(file, content)
                if written < len(content):  # a full disk takes what it can
                    os.write(file, content[written:])
                os.fsync(file)
            except BaseException:
                os.ftruncate(file, end)
                raise

    def mend(self) -> None:
        """Remove what a killed process left of a cell; no other may append meanwhile."""
        if not self.path.exists():
            return
        with self._locked() as file:
            _end_line(file)
            content = self.path.read_bytes()
            rows = read_rows(self.path)
            last = list(takewhile(lambda row: _same_success(row, rows[-1]), reversed(rows)))
            if last and not self._whole(last):
                kept = content.rstrip(b"\n").split(b"\n")[: -len(last)]
                os.ftruncate(file, sum(len(line) + 1 for line in kept))

    def finished(self) -> set[str]:
        """Ids of the cells that need not be computed again."""
        return {row["cell"] for row in read_rows(self.path) if row["status"] == "ok"}

    def _whole(self, rows: list[Row]) -> bool:
        try:
            with np.load(self.items / f"{rows[0]['cell']}.npz", allow_pickle=False) as arrays:
                names = set(arrays[_METRICS].tolist())
        except FileNotFoundError:  # a user may have deleted the items
            return True
        except (OSError, ValueError, KeyError, zipfile.BadZipFile):
            return False
        return names <= {row["metric"] for row in rows}

    @contextmanager
    def _locked(self) -> Iterator[int]:
        file = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield file
        finally:
            os.close(file)


def read_rows(path: Path) -> list[Row]:
    """All lines of a results file, except a half-written last one.

    Raises:
        UsageError: a line is not a result, which no kill can cause.
    """
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return []
    lines = content.split(b"\n")
    rows = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        row = _parsed(line)
        if row is not None:
            rows.append(row)
        elif number < len(lines):
            raise UsageError(f"{path}, line {number}, is no result: remove the line")
    return rows


def current_rows(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """The lines that count, by cell: those of its last success, or else its last failure."""
    found: dict[str, dict[str | None, Row]] = {}
    for row in rows:
        of_cell = found.setdefault(row["cell"], {})
        if row["status"] == "ok":
            of_cell.pop(None, None)
            of_cell[row["metric"]] = row
        elif not of_cell or None in of_cell:
            of_cell[None] = row
    return {cell: list(of_cell.values()) for cell, of_cell in found.items()}


def read_items(folder: Path, cell: str) -> dict[str, NDArray[Any]]:
    """The results per question or window of a cell.

    Raises:
        UsageError: there are none, or they are broken.
    """
    path = folder / ITEMS / f"{cell}.npz"
    try:
        with np.load(path, allow_pickle=False) as arrays:
            return {name: arrays[name] for name in arrays.files if name != _METRICS}
    except FileNotFoundError:
        raise UsageError(f"{folder} holds no items of cell {cell}: {path} is missing") from None
    except (OSError, ValueError, zipfile.BadZipFile) as error:
        raise UsageError(f"{path} is broken: {error}") from None


def _same_success(row: Row, other: Row) -> bool:
    return row["cell"] == other["cell"] and row["status"] == "ok"


def _parsed(line: bytes) -> Row | None:
    try:
        row = json.loads(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) and "cell" in row and "status" in row else None


def _end_line(file: int) -> None:
    """Make the file end with a whole line: complete the last one or remove what there is of it."""
    size = os.fstat(file).st_size
    if not size or os.pread(file, 1, size - 1) == b"\n":
        return
    content = os.pread(file, size, 0)
    last = content.rpartition(b"\n")[2]
    if _parsed(last) is not None:
        os.write(file, b"\n")
    else:
        os.ftruncate(file, size - len(last))
