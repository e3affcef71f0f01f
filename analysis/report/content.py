"""What a report consists of, before it is written as HTML, CSV, Markdown or LaTeX."""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import pandas as pd

from quantdiff.analysis.style import Page

__all__ = ["Figure", "Part", "Prose", "Report", "Section", "Table", "Warned"]

Shown: TypeAlias = Callable[[Any], str]

_KEY = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*")


@dataclass(frozen=True)
class Prose:
    """One paragraph of plain text."""

    text: str


@dataclass(frozen=True)
class Warned:
    """One paragraph that a reader must not miss: what is missing, or must not be compared."""

    text: str


@dataclass(frozen=True)
class Table:
    """A table with raw values, which are shown rounded and written as CSV as they are.

    Attributes:
        key: name of its files without suffix, unique in a report; lower-case letters, digits and
            hyphens.
        title: a few words.
        frame: one row per line; the index is ignored, and columns are named by unique strings.
        caption: where the numbers come from and what they mean, in whole sentences.
        shown: column -> how its values are written for people; others are written by `str`. It is
            not called for missing values.
        heads: column -> its heading; others are headed by their names.
        published: printed elsewhere, not measured here; it is marked as such.

    Raises:
        ValueError: the key or columns are not as described, or `shown` or `heads` name no column.
    """

    key: str
    title: str
    frame: pd.DataFrame
    caption: str = ""
    shown: Mapping[str, Shown] = field(default_factory=dict)
    heads: Mapping[str, str] = field(default_factory=dict)
    published: bool = False

    def __post_init__(self) -> None:
        _check_key(self.key)
        _check_columns(self.key, self.frame)
        unknown = {*self.shown, *self.heads} - {*self.frame.columns}
        if unknown:
            raise ValueError(f"table {self.key!r} has no column {min(unknown)!r}")


@dataclass(frozen=True)
class Figure:
    """A figure with the numbers that it shows.

    Attributes:
        key: as for a table.
        title: a few words.
        page: drawn in quantdiff's style.
        frame: what is drawn, written as CSV beside it; as for a table.
        caption: as for a table.
        description: what it shows, for readers who cannot see it.

    Raises:
        ValueError: the key or columns are not as described.
    """

    key: str
    title: str
    page: Page
    frame: pd.DataFrame
    caption: str = ""
    description: str = ""

    def __post_init__(self) -> None:
        _check_key(self.key)
        _check_columns(self.key, self.frame)


Part: TypeAlias = Prose | Warned | Table | Figure


@dataclass(frozen=True)
class Section:
    """A heading and its content.

    Attributes:
        key: the anchor, unique in a report.
        title: the heading.
        parts: in order.

    Raises:
        ValueError: the key is not formed like a table's.
    """

    key: str
    title: str
    parts: tuple[Part, ...]

    def __post_init__(self) -> None:
        _check_key(self.key)


@dataclass(frozen=True)
class Report:
    """Sections in order, and where they come from.

    Attributes:
        title: of the whole.
        sections: in order.
        command: the command that made it, if any.
        versions: those of the libraries that made it.

    Raises:
        ValueError: two sections, two tables or two figures share a key.
    """

    title: str
    sections: tuple[Section, ...]
    command: str | None = None
    versions: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for kind in (self.sections, self.tables, self.figures):
            _check_unique(part.key for part in kind)

    @property
    def tables(self) -> list[Table]:
        """All tables, in order."""
        return [p for s in self.sections for p in s.parts if isinstance(p, Table)]

    @property
    def figures(self) -> list[Figure]:
        """All figures, in order."""
        return [p for s in self.sections for p in s.parts if isinstance(p, Figure)]


def _check_key(key: str) -> None:
    """Refuse a key that cannot serve unchanged as a file name and an anchor."""
    if not _KEY.fullmatch(key):
        raise ValueError(f"{key!r} is no key: lower-case letters, digits and hyphens between them")


def _check_columns(key: str, frame: pd.DataFrame) -> None:
    names = list(frame.columns)
    if not names or not all(isinstance(name, str) and name for name in names):
        raise ValueError(f"the columns of {key!r} must be named by strings: {names}")
    _check_unique(names)


def _check_unique(names: Iterable[str]) -> None:
    twice = [name for name, count in Counter(names).items() if count > 1]
    if twice:
        raise ValueError(f"{twice[0]!r} stands for two things")
