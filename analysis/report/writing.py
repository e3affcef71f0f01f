"""A report as files: the page, and every table and figure on its own."""

from pathlib import Path

from quantdiff.analysis.report.content import Report
from quantdiff.analysis.report.latex import latex
from quantdiff.analysis.report.markdown import markdown
from quantdiff.analysis.report.page import page
from quantdiff.analysis.report.values import write_tables
from quantdiff.analysis.style import save_page
from quantdiff.files import write_bytes

__all__ = ["REPORT", "write_report"]

REPORT = "report.html"


def write_report(report: Report, folder: str | Path) -> list[Path]:
    """Write `report.html`, `tables/<key>.csv|.md|.tex` and `figures/<key>.png|.svg|.csv`.

    The page is self-contained and can be sent alone; its links lead to the other files where they
    are beside it. `read_table` reads the CSV files.

    Args:
        report: the report.
        folder: made if missing; files of the same names are replaced.

    Returns:
        The files, the page first.

    Raises:
        OSError: the folder cannot be written.
    """
    folder = Path(folder)
    tables, figures = folder / "tables", folder / "figures"
    written, pictures = [], {}
    for made in (tables, figures):
        made.mkdir(parents=True, exist_ok=True)
    for figure in report.figures:
        files = save_page(figure.page, figures / figure.key)
        pictures[figure.key] = files[0].read_bytes()
        written += files
    written += write_tables({figure.key: figure.frame for figure in report.figures}, figures)
    written += write_tables({table.key: table.frame for table in report.tables}, tables)
    for table in report.tables:
        for suffix, text in (("md", markdown(table)), ("tex", latex(table))):
            written.append(tables / f"{table.key}.{suffix}")
            write_bytes(written[-1], text.encode())
    # Last, so that everything the page links to exists by then.
    path = folder / REPORT
    write_bytes(path, page(report, pictures).encode())
    return [path, *written]
