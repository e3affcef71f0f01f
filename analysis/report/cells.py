"""A table as people see it: one text per cell, whatever the output format."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pandas as pd
from pandas.api.types import is_bool_dtype, is_numeric_dtype

from quantdiff.analysis.report.content import Shown, Table
from quantdiff.analysis.report.values import settled
from quantdiff.analysis.text import UNKNOWN, literal

__all__ = ["PUBLISHED", "Column", "columns", "paragraph"]

PUBLISHED = "published, not measured here"


@dataclass(frozen=True)
class Column:
    """A column as shown to people.

    Attributes:
        heading: on one line.
        numeric: whether it holds numbers, which are right-aligned.
        cells: one text per row, each on one line.
        values: the sort keys of a numeric column; None for missing values, and in other columns.
    """

    heading: str
    numeric: bool
    cells: list[str]
    values: list[float | None]


def columns(table: Table) -> list[Column]:
    """The columns of a table, in order."""
    return list(_columns(table))


def paragraph(text: str) -> str:
    """A text on one line, with single spaces between its words."""
    return literal(" ".join(text.split()))


def _columns(table: Table) -> Iterator[Column]:
    plain = settled(table.frame)
    for name in table.frame.columns:
        column = table.frame[name]
        missing = column.isna().tolist()
        show: Shown = table.shown.get(name, str)
        yield Column(
            heading=literal(table.heads.get(name, name)),
            numeric=_is_numeric(plain[name]),
            cells=[
                UNKNOWN if gone else literal(show(value))
                for value, gone in zip(column.array, missing, strict=True)
            ],
            values=_values(plain[name]),
        )


def _values(column: pd.Series) -> list[float | None]:
    if not _is_numeric(column):
        return [None] * len(column)
    return [
        None if gone else float(value)
        for value, gone in zip(column.array, column.isna(), strict=True)
    ]


def _is_numeric(column: "pd.Series[Any]") -> bool:
    return is_numeric_dtype(column.dtype) and not is_bool_dtype(column.dtype)
