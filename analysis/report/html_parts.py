"""The parts of a report as HTML: for its page, and for a notebook."""

import base64
import struct
from collections.abc import Sequence
from importlib.resources import files

from quantdiff.analysis.report.cells import PUBLISHED, Column, columns, paragraph
from quantdiff.analysis.report.content import Figure, Part, Prose, Table, Warned
from quantdiff.analysis.report.markup import Markup, element, joined
from quantdiff.analysis.text import UNKNOWN

__all__ = ["asset", "caption", "html_of", "image", "table_of", "warning"]

# Characters beyond which a cell or a heading may be broken into lines.
_LONG, _LONG_HEADING = 40, 14
_SHOWN_PER_INCH = 115  # pixels of a page per inch of a figure: a little larger than in print
_SAVED_PER_INCH = 200


def html_of(parts: Sequence[Part]) -> str:
    """Parts of a report as an HTML fragment, which notebooks show through `_repr_html_`."""
    style = element("style", Markup(asset("parts.css")))
    return element("div", style, *map(_part, parts), class_="quantdiff")


def asset(name: str) -> str:
    """The text of a style sheet or script beside this file."""
    return files(__package__).joinpath(name).read_text(encoding="utf-8")


def table_of(table: Table) -> Markup:
    """A table without its title and caption; numbers carry their sort keys."""
    shown = columns(table)
    head = element("tr", *(_heading(column) for column in shown))
    rows = (
        element("tr", *(_cell(column, row, first=not place) for place, column in enumerate(shown)))
        for row in range(len(table.frame))
    )
    kind = "published" if table.published else None
    return element("table", element("thead", head), element("tbody", *rows), class_=kind)


def caption(part: Table | Figure, start: str = "") -> Markup:
    """The caption above a table or beneath a figure.

    Args:
        part: the table or figure.
        start: text before its title.
    """
    title = [element("span", start, class_="number"), " "] if start else []
    title.append(element("span", paragraph(part.title), class_="title"))
    if isinstance(part, Table) and part.published:
        title += [" ", element("span", PUBLISHED, class_="badge")]
    lines = [element("p", *title)]
    if part.caption:
        lines.append(element("p", paragraph(part.caption), class_="told"))
    return element("figcaption", *lines)


def warning(part: Warned) -> Markup:
    """A paragraph that must not be missed."""
    word = element("strong", "Caution")
    return element("p", word, " ", paragraph(part.text), class_="warned", role="note")


def image(figure: Figure, png: bytes) -> Markup:
    """A figure embedded in the page.

    Args:
        figure: its description, or else its title, becomes the alternative text.
        png: its picture at 200 dpi.
    """
    # Width and height are in the header, big-endian.
    width, height = struct.unpack(">II", png[16:24])
    scale = _SHOWN_PER_INCH / _SAVED_PER_INCH
    return element(
        "img",
        src=f"data:image/png;base64,{base64.b64encode(png).decode()}",
        alt=paragraph(figure.description or figure.title),
        width=round(width * scale),
        height=round(height * scale),
    )


def _part(part: Part) -> Markup:
    if isinstance(part, Prose):
        return element("p", paragraph(part.text))
    if isinstance(part, Warned):
        return warning(part)
    if isinstance(part, Table):
        scrolled = element("div", table_of(part), class_="scroll")
        return element("figure", caption(part), scrolled, class_="table")
    return element("figure", image(part, part.page._repr_png_()), caption(part), class_="picture")


def _heading(column: Column) -> Markup:
    kinds = [
        *["n"] * column.numeric,
        *["wrapped"] * (len(column.heading) > _LONG_HEADING),
    ]
    return element("th", column.heading, scope="col", class_=" ".join(kinds) or None)


def _cell(column: Column, row: int, *, first: bool) -> Markup:
    """One cell; the first of a row is its header, unless it is a number."""
    text, value = column.cells[row], column.values[row]
    if column.numeric:
        return element("td", text, class_="n", data_value=None if value is None else repr(value))
    kind = "long" if len(text) > _LONG else "none" if text == UNKNOWN else None
    content = element("div", text, class_=kind) if kind == "long" else joined(text)
    if first:
        return element("th", content, scope="row")
    return element("td", content, class_="none" if kind == "none" else None)
