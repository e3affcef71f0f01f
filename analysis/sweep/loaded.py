"""The results of a sweep, as stored in a folder."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd
from numpy.typing import NDArray

from quantdiff.analysis.sweep.identity import without_folders
from quantdiff.analysis.sweep.record import Record, read_record
from quantdiff.analysis.sweep.results import RESULTS, Row, current_rows, read_items, read_rows

__all__ = ["COLUMNS", "SweepResults"]

COLUMNS = (
    "cell", "model", "scheme", "site", "bits", "range", "granularity", "symmetric", "newest",
    "layers", "heads", "remedy", "causal", "eval", "metric", "value", "stderr", "count", "data",
    "seconds", "status", "error",
)  # fmt: skip
_WHOLE = dict.fromkeys(("bits", "count", "newest"), "Int64")
_NUMBERS = _WHOLE | dict.fromkeys(("value", "stderr"), "float64")


@dataclass(eq=False)
class SweepResults:
    """The results of a sweep so far.

    Attributes:
        folder: where they are stored.
        record: the content of `sweep.json`: `models` with their fingerprints, evaluations and
            calibration, `cells`, `asked` (those of the last call), `definitions` and `requests`
            (not in folders of earlier versions), `versions`, `commands`.
        rows: the lines of `results.jsonl` that count, as written there, in the order of the grid;
            for a cell that failed several times, the last one. An evaluation whose file was named
            in several ways has its first name, also in `record`.
        labels: evaluation -> its label, where this must also differ from evaluations that are not
            in the rows.
    """

    folder: Path
    record: Record
    rows: list[Row]
    labels: dict[str, str] = field(default_factory=dict)

    @classmethod
    def load(cls, folder: str | Path) -> "SweepResults":
        """Read a folder, even while a sweep is running there.

        Raises:
            UsageError: it holds no sweep, or one that cannot be read.
        """
        folder = Path(folder)
        record = read_record(folder)
        found = current_rows(read_rows(folder / RESULTS))
        rows = [row for cell in record["cells"] for row in found.get(cell, [])]
        _unite_names(record, rows)
        return cls(folder, record, rows)

    @property
    def models(self) -> list[str]:
        """Names of the models, in the order in which they were first requested."""
        return list(self.record["models"])

    @property
    def failed(self) -> list[Row]:
        """The lines of the cells that failed; each has an `error`."""
        return [row for row in self.rows if row["status"] != "ok"]

    @property
    def missing(self) -> int:
        """The number of cells that have neither finished nor failed."""
        return len(self.record["cells"]) - len({row["cell"] for row in self.rows})

    def frame(self) -> pd.DataFrame:
        """One row per cell and metric, with the columns `COLUMNS`.

        `options` of the lines is split into `symmetric`, `newest`, `layers`, `heads` (for schemes
        used together, where they agree) and `remedy`. The row of the unquantized model, which
        stands for 16 bits, has no site, range, granularity or symmetry, as it serves all of them.
        """
        rows = [_spread(row["options"]) | row for row in self.rows]
        return pd.DataFrame(rows, columns=list(COLUMNS)).astype(_NUMBERS)

    def items(self, cell: str) -> dict[str, NDArray[Any]]:
        """The results per question or window of a cell, so that models can be compared pairwise.

        Raises:
            UsageError: there are none.
        """
        return read_items(self.folder, cell)

    def plot(self, kind: str = "bits", **options: Any) -> Any:
        """Draw a figure; see `plot_sweep`."""
        from quantdiff.analysis.sweep.figure import plot_sweep

        return plot_sweep(self, kind, **options)

    def __repr__(self) -> str:
        done = len({row["cell"] for row in self.rows if row["status"] == "ok"})
        failed = f", {len(self.failed)} failed" if self.failed else ""
        return (
            f"SweepResults of {', '.join(self.models)}: {done} of {len(self.record['cells'])} cells"
            f"{failed}"
        )

    def _repr_html_(self) -> str:
        from quantdiff.analysis.notebook import to_html

        return to_html(self)


def _unite_names(record: Record, rows: list[Row]) -> None:
    """Give each evaluation the name under which a model's cells of it were first requested."""
    for model, about in record["models"].items():
        first: dict[tuple[str, str], str] = {}
        kept: dict[str, Any] = {}
        names: dict[str, str] = {}
        for name, told in about.get("evaluations", {}).items():
            names[name] = first.setdefault((without_folders(name), told["data"]), name)
            kept.setdefault(names[name], told)
        if len(kept) == len(names):
            continue
        about["evaluations"] = kept
        for row in rows:
            if row["model"] == model:
                row["eval"] = names.get(row["eval"], row["eval"])


def _spread(options: dict[str, Any]) -> dict[str, Any]:
    """The options that a cell's schemes have in common, and its remedy."""
    schemes = options.get("schemes", [options])
    told: dict[str, Any] = {"remedy": options.get("remedy")}
    for name in ("symmetric", "newest", "layers", "heads"):
        values = [scheme.get(name) for scheme in schemes]
        told[name] = values[0] if values.count(values[0]) == len(values) else None
    return told
