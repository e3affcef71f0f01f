"""The page of a report: one self-contained HTML file."""

import base64
import hashlib
from collections.abc import Mapping

from quantdiff.analysis.report.cells import columns, paragraph
from quantdiff.analysis.report.content import Figure, Part, Prose, Report, Section, Table, Warned
from quantdiff.analysis.report.html_parts import asset, caption, image, table_of, warning
from quantdiff.analysis.report.markup import Markup, element, joined

__all__ = ["page"]

# In print, a table's font size (in points) follows from the characters of its longest line; where
# it would be too small, the table is set in landscape.
_LETTERS, _SMALLEST = 8.5, 6.5
_UPRIGHT, _ACROSS = 935, 1400  # font size times characters that fill a line
_AROUND = 3  # characters between two columns
_BROKEN = 44  # characters per line of a long cell, at most
_SHORT = 15  # rows that are kept together in print, at most


def page(report: Report, pictures: Mapping[str, bytes]) -> str:
    """A report as HTML.

    Style and script are allowed only by their hashes: whatever a name contains, the browser runs
    nothing else and loads nothing.

    Args:
        report: linked to `tables/` and `figures/` beside the page.
        pictures: key of a figure -> its PNG at 200 dpi.
    """
    style = asset("parts.css") + asset("page.css") + _print_sizes(report)
    script = asset("page.js")
    policy = (
        f"default-src 'none'; img-src data:; style-src {_hash(style)}; "
        f"script-src {_hash(script)}; base-uri 'none'; form-action 'none'"
    )
    title = paragraph(report.title)
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", http_equiv="Content-Security-Policy", content=policy),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("title", title),
        # Otherwise a browser would ask a server for one.
        element("link", rel="icon", href="data:,"),
        element("style", Markup(style)),
    )
    numbers = _numbers(report)
    body = element(
        "body",
        element("a", "Skip to the content", href="#content", class_="skip"),
        element("header", element("h1", title)),
        _contents(report, numbers),
        element(
            "main",
            *(_section(section, numbers, pictures) for section in report.sections),
            id="content",
            class_="quantdiff",
        ),
        _footer(report),
        element("script", Markup(script)),
    )
    return f"<!doctype html>\n{element('html', head, body, lang='en')}\n"


def _numbers(report: Report) -> dict[int, str]:
    """Identity of a part -> "Table 3"."""
    parts: list[tuple[str, list[Table] | list[Figure]]]
    parts = [("Table", report.tables), ("Figure", report.figures)]
    return {
        id(part): f"{word} {number}"
        for word, of_kind in parts
        for number, part in enumerate(of_kind, start=1)
    }


def _contents(report: Report, numbers: Mapping[int, str]) -> Markup:
    entries = []
    for section in report.sections:
        shown = [part for part in section.parts if isinstance(part, Table | Figure)]
        links = (
            element("li", element("a", paragraph(part.title), href=f"#{_anchor(part)}"))
            for part in shown
        )
        entries.append(
            element(
                "li",
                element("a", paragraph(section.title), href=f"#{section.key}"),
                *([element("ul", *links)] if shown else []),
            )
        )
    heading = element("h2", "Contents", id="contents")
    return element("nav", heading, element("ol", *entries), aria_labelledby="contents")


def _section(section: Section, numbers: Mapping[int, str], pictures: Mapping[str, bytes]) -> Markup:
    heading = element("h2", paragraph(section.title))
    parts = (_part(part, numbers, pictures) for part in section.parts)
    return element("section", heading, *parts, id=section.key)


def _part(part: Part, numbers: Mapping[int, str], pictures: Mapping[str, bytes]) -> Markup:
    if isinstance(part, Prose):
        return element("p", paragraph(part.text))
    if isinstance(part, Warned):
        return warning(part)
    told = caption(part, numbers[id(part)])
    if isinstance(part, Figure):
        files = _files(f"figures/{part.key}", "csv", "png", "svg")
        picture = element("div", image(part, pictures[part.key]), class_="paper")
        return element("figure", picture, told, files, id=_anchor(part), class_="picture")
    scrolled = element(
        "div", table_of(part), class_="scroll", tabindex=0, role="region",
        aria_label=f"{numbers[id(part)]}: {paragraph(part.title)}",
    )  # fmt: skip
    files = _files(f"tables/{part.key}", "csv", "md", "tex")
    kinds = [
        "table",
        *["short"] * (len(part.frame) <= _SHORT),
        *["across"] * _is_across(part),
        *["published"] * part.published,
    ]
    return element("figure", told, scrolled, files, id=_anchor(part), class_=" ".join(kinds))


def _anchor(part: Table | Figure) -> str:
    return f"{'table' if isinstance(part, Table) else 'figure'}-{part.key}"


def _files(stem: str, first: str, *others: str) -> Markup:
    """Links to the files of a table or figure; the first is named in full."""
    links = [element("a", f"{stem}.{first}", href=f"{stem}.{first}")]
    links += [element("a", suffix, href=f"{stem}.{suffix}") for suffix in others]
    return element("p", *(part for link in links for part in (link, " ")), class_="files")


def _print_sizes(report: Report) -> str:
    """CSS rules that keep every table, however wide, from being cut off in print."""
    rules = []
    for table in report.tables:
        line = _ACROSS if _is_across(table) else _UPRIGHT
        size = min(_LETTERS, line / _width(table))
        rules.append(f"  #{_anchor(table)} table {{ font-size: {size:.2f}pt; }}\n")
    return f"@media print {{\n{''.join(rules)}}}\n"


def _is_across(table: Table) -> bool:
    return _UPRIGHT / _width(table) < _SMALLEST


def _width(table: Table) -> int:
    """Characters of the longest line of a table."""
    longest = (max(map(len, [column.heading, *column.cells])) for column in columns(table))
    return sum(min(length, _BROKEN) + _AROUND for length in longest)


def _footer(report: Report) -> Markup:
    lines = []
    if report.command is not None:
        lines.append(element("p", "Made by ", element("code", report.command)))
    if report.versions:
        told = ", ".join(f"{name} {version}" for name, version in report.versions.items())
        lines.append(element("p", told))
    return element("footer", joined(*lines))


def _hash(text: str) -> str:
    digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
    return f"'sha256-{digest}'"
