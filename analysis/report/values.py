"""Frames as CSV that any program can read, and that reads back as the same frame."""

import io
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pandas as pd
from pandas.api.types import infer_dtype

from quantdiff.errors import UsageError
from quantdiff.files import write_bytes, write_json

__all__ = ["DTYPES", "read_table", "settled", "write_tables"]

# Beside the CSV files of a folder: file name without suffix -> column -> dtype. An entry is what
# `pandas.read_csv` takes as its `dtype`.
DTYPES = "dtypes.json"

_KEPT = re.compile(r"[Uu]?[Ii]nt(8|16|32|64)|[Ff]loat(32|64)|bool|boolean|str|string")


def write_tables(frames: Mapping[str, pd.DataFrame], folder: Path) -> list[Path]:
    """Write frames as `<name>.csv`, and their dtypes as `dtypes.json`.

    Strings are quoted where CSV requires it, and the empty one always, so that it is not taken for
    a missing value, for which nothing is written. Floats have the digits that restore their bits.
    Indices are not written; characters that UTF-8 lacks (lone surrogates) become question marks.

    Args:
        frames: file name without suffix -> frame, whose columns are named by unique strings.
        folder: where the files go; it must exist.

    Returns:
        The files.
    """
    settled_frames = {name: settled(frame) for name, frame in frames.items()}
    written = []
    for name, frame in settled_frames.items():
        written.append(folder / f"{name}.csv")
        write_bytes(written[-1], _csv(frame).encode("utf-8", "replace"))
    written.append(folder / DTYPES)
    dtypes = {
        name: {str(column): str(dtype) for column, dtype in frame.dtypes.items()}
        for name, frame in settled_frames.items()
    }
    write_json(written[-1], dtypes)
    return written


def read_table(path: str | Path) -> pd.DataFrame:
    """Read a table, or the numbers of a figure, that a report has written.

    Columns of numbers, booleans and strings keep their dtypes and bits; any other column is what
    `settled` makes of it.

    Args:
        path: of the CSV file, with `dtypes.json` beside it.

    Raises:
        UsageError: there is no such file, or it is not from a report.
    """
    from pyarrow import ArrowInvalid, csv

    path = Path(path)
    try:
        content = path.read_bytes()
        dtypes = json.loads((path.parent / DTYPES).read_bytes())[path.stem]
    except FileNotFoundError as error:
        raise UsageError(f"{path} is no table of a report: {error.filename} is missing") from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(f"{path} cannot be read as a table of a report: {error!r}") from None
    try:
        # Not pandas' reader, which takes an empty string for a missing value.
        table = csv.read_csv(
            io.BytesIO(content),
            # A single block, so that no value straddles two.
            csv.ReadOptions(use_threads=False, block_size=len(content) + 1),
            csv.ParseOptions(newlines_in_values=True, ignore_empty_lines=False),
            csv.ConvertOptions(
                column_types={name: _arrow_type(dtype) for name, dtype in dtypes.items()},
                null_values=[""],
                strings_can_be_null=True,
                quoted_strings_can_be_null=False,
            ),
        )
    except ArrowInvalid as error:
        raise UsageError(f"{path} is broken: {error}") from None
    if table.column_names != list(dtypes):
        raise UsageError(f"{path} has other columns than {DTYPES} beside it says")
    return pd.DataFrame(
        {name: pd.Series(table[name].to_pylist(), dtype=dtype) for name, dtype in dtypes.items()}
    )


def settled(frame: pd.DataFrame) -> pd.DataFrame:
    """Convert a frame to dtypes that CSV can hold: numbers, booleans and strings are kept.

    Other columns, such as those of Python objects, become Int64 if they hold only whole numbers,
    float64 if only numbers, boolean if only booleans; strings are kept, and anything else becomes a
    string by `str`. Missing values are allowed in all of them.
    """
    columns = {name: _settled(frame[name]).reset_index(drop=True) for name in frame.columns}
    return pd.DataFrame(columns)


def _settled(column: pd.Series) -> pd.Series:
    if _KEPT.fullmatch(str(column.dtype)):
        return column
    column = column.astype(object).where(column.notna(), None)
    kind = infer_dtype(column, skipna=True)
    if kind == "boolean":
        return column.astype("boolean")
    if kind in ("floating", "mixed-integer-float"):
        return column.astype("float64")
    if kind == "integer":
        try:
            return column.astype("Int64")
        except OverflowError:
            pass
    texts = [None if value is None else str(value) for value in column]
    return pd.Series(texts, dtype=object)


def _csv(frame: pd.DataFrame) -> str:
    """RFC 4180 except for line ends, which are bare line feeds."""
    columns = [_fields(frame[name]) for name in frame.columns]
    lines = [map(_quoted, frame.columns), *zip(*columns, strict=True)]
    return "".join(",".join(line) + "\n" for line in lines)


def _fields(column: pd.Series) -> list[str]:
    # Over the array, not by `tolist`, which would write a float32 with the digits of a float64.
    return [
        "" if gone else _quoted(str(value))
        for value, gone in zip(column.array, column.isna(), strict=True)
    ]


def _quoted(text: str) -> str:
    plain = text and text == text.strip() and not any(letter in text for letter in ',"\r\n\ufeff')
    return text if plain else '"' + text.replace('"', '""') + '"'


def _arrow_type(dtype: str) -> Any:
    import pyarrow as pa

    if dtype in ("bool", "boolean"):
        return pa.bool_()
    if dtype in ("object", "str", "string"):
        return pa.string()
    return pa.type_for_alias(dtype.lower())
