"""Tables as LaTeX, with the rules of booktabs."""

import re
from collections.abc import Iterable

from quantdiff.analysis.report.cells import PUBLISHED, Column, columns, paragraph
from quantdiff.analysis.report.content import Table
from quantdiff.analysis.report.latex_text import latex_text

__all__ = ["latex"]

_MINUS = re.compile(r"(?:^|(?<=\de))-(?=[\d.])")  # of a number or its exponent


def latex(table: Table) -> str:
    r"""A `table` environment with caption and label `tab:<key>`; needs `\usepackage{booktabs}`.

    Numbers are right-aligned, with a minus sign instead of a hyphen.
    """
    shown = columns(table)
    title = paragraph(table.title)
    if table.published:
        title += f" ({PUBLISHED})"
    caption = paragraph(f"{title}. {table.caption}")
    rows = zip(*(_cells(column) for column in shown), strict=True)
    kinds = "".join("r" if column.numeric else "l" for column in shown)
    return "\n".join([
        r"% \usepackage{booktabs}",
        r"\begin{table}",
        r"  \centering",
        rf"  \caption{{{latex_text(caption)}}}",
        rf"  \label{{tab:{table.key}}}",
        rf"  \begin{{tabular}}{{{kinds}}}",
        r"    \toprule",
        _row(latex_text(column.heading) for column in shown),
        r"    \midrule",
        *map(_row, rows),
        r"    \bottomrule",
        r"  \end{tabular}",
        r"\end{table}",
        "",
    ])  # fmt: skip


def _cells(column: Column) -> list[str]:
    if not column.numeric:
        return [latex_text(cell) for cell in column.cells]
    return [latex_text(_MINUS.sub("−", cell)) for cell in column.cells]


def _row(cells: Iterable[str]) -> str:
    return f"    {' & '.join(cells)} \\\\"
