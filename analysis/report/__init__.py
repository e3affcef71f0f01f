"""Reports: what they consist of, and how they are written as HTML, CSV, Markdown and LaTeX.

The public names are imported on first use, so that reading a table does not wait for seaborn.
"""

from typing import TYPE_CHECKING

from quantdiff.lazy import lazy_names

if TYPE_CHECKING:
    from quantdiff.analysis.report.content import (
        Figure,
        Part,
        Prose,
        Report,
        Section,
        Table,
        Warned,
    )
    from quantdiff.analysis.report.html_parts import html_of
    from quantdiff.analysis.report.values import read_table
    from quantdiff.analysis.report.writing import write_report

__all__ = [
    "Figure",
    "Part",
    "Prose",
    "Report",
    "Section",
    "Table",
    "Warned",
    "html_of",
    "read_table",
    "write_report",
]

_HOME = {
    "Figure": "content",
    "Part": "content",
    "Prose": "content",
    "Report": "content",
    "Section": "content",
    "Table": "content",
    "Warned": "content",
    "html_of": "html_parts",
    "read_table": "values",
    "write_report": "writing",
}

__getattr__, __dir__ = lazy_names("quantdiff.analysis.report", _HOME)
