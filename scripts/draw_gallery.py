"""Draw docs/gallery.md, and the README's figure and table, from the runs of `quantdiff demo`.

quantdiff demo --out runs/demo
python scripts/draw_gallery.py runs/demo
"""

import argparse
import sys
from pathlib import Path

from quantdiff.analysis.compare import Comparison
from quantdiff.analysis.report import Figure, Report, Table, Warned
from quantdiff.analysis.report.markdown import escaped, markdown
from quantdiff.analysis.style import save_page
from quantdiff.files import write_bytes

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
FIGURES = DOCS / "figures"
README = ROOT / "README.md"
BEGIN, END = "<!-- drawn by scripts/draw_gallery.py -->", "<!-- end of what is drawn -->"
SHOWN = ("outliers", "heads")  # the README's table and figure
HEAD = """\
# Gallery

What `quantdiff demo` finds on the models that come with quantdiff; `scripts/draw_gallery.py` wrote
this page from its runs. The page that `quantdiff compare` makes has the same parts, with each table
as CSV and LaTeX and each figure as SVG beside it. The text is the beginning of the held-out corpus:
State of the Union addresses, of 1804, 1807 and 1827 for the zoo's profiles, of fewer for what took
fewer tokens, and of 1804 for SmolLM2.
"""


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", type=Path, help="the --out of quantdiff demo")
    options = parser.parse_args()
    kinds = "profiles", "sweeps", "calibrations", "exports"
    folders = (options.runs / kind for kind in kinds)
    runs = [run for folder in folders for run in sorted(folder.glob("[!.]*"), key=_zoo_first)]
    report = Comparison(runs).report()
    for old in FIGURES.glob("gallery_*.png"):
        old.unlink()
    images = {}
    for figure in report.figures:
        path = FIGURES / f"gallery_{figure.key}.png"
        save_page(figure.page, path.with_suffix(""))
        path.with_suffix(".svg").unlink()  # the repository has no need of both
        images[figure.key] = path
    write_bytes(DOCS / "gallery.md", gallery(report, images).encode())
    text = README.read_text(encoding="utf-8")
    before, rest = text.split(BEGIN)
    after = rest.split(END)[1]
    write_bytes(README, f"{before}{BEGIN}\n\n{chosen(report, images)}\n{END}{after}".encode())
    return 0


def _zoo_first(folder: Path) -> tuple[bool, int, str]:
    kinds = ("zoo", "zoo-transformer", "zoo-diff-v1", "zoo-diff-v2")
    known = folder.name in kinds
    return (not known, kinds.index(folder.name) if known else 0, folder.name)


def gallery(report: Report, images: dict[str, Path]) -> str:
    """All sections, tables and figures, one after another."""
    parts = [HEAD]
    for section in report.sections:
        parts.append(f"## {escaped(section.title)}\n")
        for part in section.parts:
            if isinstance(part, Table):
                parts.append(markdown(part))
            elif isinstance(part, Figure):
                parts.append(shown(part, images[part.key].relative_to(DOCS)))
            else:
                mark = "> " if isinstance(part, Warned) else ""
                parts.append(f"{mark}{escaped(part.text)}\n")
    return "\n".join(parts)


def shown(figure: Figure, path: Path) -> str:
    image = f"![{escaped(figure.description or figure.title)}]({path.as_posix()})"
    return f"**{escaped(figure.title)}**\n\n{image}\n\n{escaped(figure.caption)}\n"


def chosen(report: Report, images: dict[str, Path]) -> str:
    table, figure = SHOWN
    parts = [markdown(one) for one in report.tables if one.key == table]
    parts += [
        shown(one, images[figure].relative_to(ROOT)) for one in report.figures if one.key == figure
    ]
    return "\n".join(parts)


if __name__ == "__main__":
    sys.exit(main())
