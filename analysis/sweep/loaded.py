"""The results of a sweep, as they lie in a folder."""

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
    """What a sweep found so far.

    Attributes:
        folder: where it lies.
        record: the content of `sweep.json`: `models` with their fingerprints, evaluations and
            calibration, `cells`, `asked` (those of the last call), `definitions` and `requests`
            (not in folders of earlier versions), `versions`, `commands`.
        rows: the lines of `results.jsonl` that count, as they stand there, in the order of the
            grid; of a cell that failed several times the last one. An evaluation whose file was
            named in several ways has its first name, also in `record`.
        labels: evaluation -> what it is called, where it is to be told from others than those of
            the rows too.
    """

    folder: Path
    record: Record
    rows: list[Row]
    labels: dict[str, str] = field(default_factory=dict)

    @classmethod
    def load(cls, folder: str | Path) -> "SweepResults":
        """Read a folder, also while a sweep is running there.

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
        """Names of the models, in the order in which they were first asked for."""
        return list(self.record["models"])

    @property
    def failed(self) -> list[Row]:
        """The lines of the cells that failed; each has an `error`."""
        return [row for row in self.rows if row["status"] != "ok"]

    @property
    def missing(self) -> int:
        """How many cells were neither finished nor failed."""
        return len(self.record["cells"]) - len({row["cell"] for row in self.rows})

    def frame(self) -> pd.DataFrame:
        """One row a cell and metric, with the columns `COLUMNS`.

        `options` of the lines is spread out to `symmetric`, `newest`, `layers`, `heads` (of schemes
        together where they agree) and `remedy`. The row of the model as it is, which stands for 16
        bits, has no site, range, granularity and symmetry, for it serves all of them.
        """
        rows = [_spread(row["options"]) | row for row in self.rows]
        return pd.DataFrame(rows, columns=list(COLUMNS)).astype(_NUMBERS)

    def items(self, cell: str) -> dict[str, NDArray[Any]]:
        """The results of each question or window of a cell, by which models compare pairwise.

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
    """Let an evaluation have the name under which a model's cells of it were first asked for."""
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
    """What a cell's schemes have in common of their options, and its remedy."""
    schemes = options.get("schemes", [options])
    told: dict[str, Any] = {"remedy": options.get("remedy")}
    for name in ("symmetric", "newest", "layers", "heads"):
        values = [scheme.get(name) for scheme in schemes]
        told[name] = values[0] if values.count(values[0]) == len(values) else None
    return told
