"""Tables as Markdown: GitHub's pipe tables."""

import re
from collections.abc import Iterable

from quantdiff.analysis.report.cells import PUBLISHED, columns, paragraph
from quantdiff.analysis.report.content import Table

__all__ = ["escaped", "markdown"]

# Underscores within a word are not emphasis, and names are full of them.
_SPECIAL = re.compile(r"[\\`*\[\]<>|~$&]|(?<![A-Za-z0-9])_|_(?![A-Za-z0-9])")
# What would make a paragraph a heading or a list.
_BLOCK = re.compile(r"^(\d*)([#+=.)-])")


def markdown(table: Table) -> str:
    """The title, the table and its caption, as separate paragraphs.

    Numbers are right-aligned. Everything but our own markup is escaped, and so shown as it is.
    """
    shown = columns(table)
    title = f"**{escaped(paragraph(table.title))}**"
    if table.published:
        title += f" ({PUBLISHED})"
    lines = [
        _row(column.heading for column in shown),
        "|" + "|".join(" ---: " if column.numeric else " --- " for column in shown) + "|",
        *map(_row, zip(*(column.cells for column in shown), strict=True)),
    ]
    parts = [title, "\n".join(lines)]
    if table.caption:
        parts.append(_BLOCK.sub(r"\1\\\2", escaped(paragraph(table.caption))))
    return "\n\n".join(parts) + "\n"


def _row(cells: Iterable[str]) -> str:
    return "| " + " | ".join(map(escaped, cells)) + " |"


def escaped(text: str) -> str:
    """Escape a text so that Markdown shows it as it is."""
    return _SPECIAL.sub(lambda found: f"\\{found[0]}", text)
