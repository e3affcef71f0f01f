"""Datasets on the Hugging Face hub, or local folders of data files, through `datasets`."""

from collections.abc import Iterable, Iterator
from pathlib import Path

from quantdiff.calibration.rows import filled, first_line, listed, text_field
from quantdiff.errors import UsageError, require

__all__ = ["hub_documents"]


def hub_documents(name: str) -> Iterator[Iterable[str]]:
    """Documents of `hub:ID[:split[:column]]`, streamed; see `read_documents`.

    Raises:
        UsageError: no such dataset, split or column, a slice, or rows that hold no text.
        MissingExtraError: `datasets` is not installed.
    """
    identifier, split, column = _hub_parts(name)
    datasets = require("datasets", "eval", f"read {name}")
    path, configuration = identifier, None
    if identifier.count("/") == 2 and not Path(identifier).exists():
        path, _, configuration = identifier.rpartition("/")
    # Failures in `datasets` come as almost any type; an error of ours would not be raised there.
    failures = (datasets.exceptions.DatasetsError, OSError, ValueError, RuntimeError)
    try:
        splits = datasets.load_dataset(path, configuration, streaming=True)
    except failures as error:
        raise UsageError(
            f"{name} cannot be opened ({first_line(error)}): check the name "
            "(hub:owner/name, or hub:owner/name/config) and the connection"
        ) from error
    if split is None:
        split = "train" if "train" in splits or len(splits) != 1 else next(iter(splits))
    if split not in splits:
        raise UsageError(
            f"{name} has no split {split!r} (found: {listed(splits)}): use hub:ID:split"
        )
    rows = iter(splits[split])
    number = 0
    while True:
        try:
            row = next(rows, None)
        except failures as error:
            raise UsageError(
                f"{name}, row {number}, cannot be read ({first_line(error)})"
            ) from error
        if row is None:
            return
        column = column if number and column else text_field(row, column, name)
        yield from filled(row.get(column), column, f"{name}, row {number},")
        number += 1


def _hub_parts(name: str) -> tuple[str, str | None, str | None]:
    identifier, *rest = name.removeprefix("hub:").split(":")
    if any("[" in part for part in rest):
        raise UsageError(f"{name} asks for a slice of a split: limit the text by --tokens instead")
    if not identifier or len(rest) > 2:
        raise UsageError(f"{name} is not of the form hub:ID[:split[:column]]: mend it")
    split, column, *_ = [part or None for part in (*rest, "", "")]
    return identifier, split, column
