"""The look of all figures: widths of a paper's columns, one palette, one colour per model."""

import io
import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unicodedata import east_asian_width

import matplotlib as mpl
import numpy as np
import seaborn as sns
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.font_manager import fontManager

from quantdiff.analysis.text import shorten, shorten_apart
from quantdiff.files import write_bytes

__all__ = [
    "DOUBLE",
    "SINGLE",
    "Page",
    "heat_map",
    "legend_below",
    "model_colors",
    "save_page",
    "set_title",
    "style",
]

SINGLE, DOUBLE = 3.35, 6.9  # inches: one and two columns

_LINE = 0.16  # inches per line of a legend
_HANDLE = 0.6  # inches of a handle in a legend
_LETTERS = 14  # per inch

# For letters that DejaVu Sans lacks, such as Korean ones; used if installed.
_FURTHER = (
    "Noto Sans CJK KR", "Noto Sans CJK JP", "Noto Sans CJK SC", "Malgun Gothic", "Yu Gothic",
    "Microsoft YaHei", "Apple SD Gothic Neo", "Hiragino Sans", "PingFang SC",
)  # fmt: skip
_INSTALLED = {font.name for font in fontManager.ttflist}

_SETTINGS: dict[str, Any] = {
    # By name, not "sans-serif": a generic family is looked up when a figure is drawn, in the
    # user's settings instead of these.
    "font.family": ["DejaVu Sans", *(name for name in _FURTHER if name in _INSTALLED)],
    "font.size": 8,
    "axes.titlesize": 8,
    "axes.labelsize": 8,
    "figure.titlesize": 8,
    "legend.fontsize": 7,
    "xtick.labelsize": 7,
    "ytick.labelsize": 7,
    "axes.linewidth": 0.6,
    "axes.edgecolor": "0.25",
    "axes.labelpad": 3,
    "axes.titlepad": 4,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": False,
    "xtick.major.width": 0.6,
    "ytick.major.width": 0.6,
    "xtick.minor.width": 0.4,
    "ytick.minor.width": 0.4,
    "xtick.major.size": 3,
    "ytick.major.size": 3,
    "xtick.minor.size": 1.5,
    "ytick.minor.size": 1.5,
    "xtick.major.pad": 2,
    "ytick.major.pad": 2,
    "lines.linewidth": 1.2,
    "lines.markersize": 3,
    "legend.frameon": False,
    "legend.handlelength": 1.8,
    "legend.borderaxespad": 0.2,
    "figure.facecolor": "white",
    "axes.facecolor": "white",
    "figure.dpi": 100,
    "savefig.dpi": 200,
    "text.usetex": False,
    "svg.fonttype": "path",
    "svg.hashsalt": "quantdiff",
}


@contextmanager
def style() -> Iterator[None]:
    """Draw in quantdiff's style; the user's matplotlib settings are restored afterwards."""
    settings = {**sns.axes_style("ticks"), **sns.plotting_context("paper"), **_SETTINGS}
    with mpl.rc_context(settings):
        yield


def model_colors(models: Iterable[str]) -> dict[str, tuple[float, float, float]]:
    """A colour for each model, distinct for colour-blind readers too for up to nine models.

    The first model named gets the first colour, so a report that always names its models in the
    same order draws each in one colour everywhere.
    """
    names = list(dict.fromkeys(models))
    palette = sns.color_palette("colorblind")
    del palette[8]  # yellow: too faint for a line on white
    palette += sns.color_palette("husl", max(len(names) - len(palette), 0))
    return dict(zip(names, palette, strict=False))


def heat_map() -> Any:
    """A perceptually uniform colour map, darker where larger, so that it survives grey printing."""
    # Not down to black, where neighbouring values would be indistinguishable.
    shades = sns.color_palette("mako_r", as_cmap=True)(np.linspace(0, 0.85, 256))
    return ListedColormap(shades, name="quantdiff")


class Page(Figure):  # type: ignore[misc]
    """A figure outside pyplot, so that nothing is left open; notebooks display it automatically."""

    def __init__(self, width: float, height: float) -> None:
        super().__init__(figsize=(width, height), layout="constrained")

    def draw(self, renderer: Any) -> None:
        """Draw in quantdiff's style, since ticks are made here, long after the panels."""
        with style():
            super().draw(renderer)

    def savefig(self, *args: Any, **options: Any) -> None:
        """Write the figure, by default at 200 dpi."""
        with style():
            super().savefig(*args, **options)

    def _repr_png_(self) -> bytes:
        buffer = io.BytesIO()
        self.savefig(buffer, format="png")
        return buffer.getvalue()


def save_page(page: Page, stem: Path) -> list[Path]:
    """Write a figure as PNG and SVG, the same bytes for the same figure.

    Args:
        page: the figure.
        stem: path of the files without their suffix.

    Returns:
        The files.
    """
    written = []
    for suffix, metadata in (("png", {}), ("svg", {"Date": None})):
        buffer = io.BytesIO()
        page.savefig(buffer, format=suffix, metadata=metadata)
        written.append(stem.with_name(f"{stem.name}.{suffix}"))
        write_bytes(written[-1], buffer.getvalue())
    return written


def legend_below(page: Page, entries: Sequence[tuple[str, Any]]) -> None:
    """Add a legend for all panels of a page, in a strip of its own below them.

    Args:
        page: grows by as many lines as the legend needs.
        entries: names and handles; if empty, no legend is added. Names wider than the page are
            shortened but stay distinct, and `$` and `_` in them are not read as mathematics.
    """
    if not entries:
        return
    width, height = page.get_size_inches()
    names = [name for name, _ in entries]
    wide = [name for name in names if _HANDLE + _inches(name) > width]
    length = max(map(len, wide), default=0)
    while any(_HANDLE + _inches(name) > width for name in names) and length > 1:
        length -= 1
        cut = shorten_apart(wide, length)
        names = [cut.get(name, name) for name, _ in entries]
    # Columns are as wide as their own entries, so none is wider than the widest entry.
    needs = [_HANDLE + _inches(name) for name in names]
    columns = len(names) if sum(needs) < width else max(int(width / max(needs)), 1)
    page.set_size_inches(width, height + _LINE * math.ceil(len(names) / columns))
    legend = page.legend(
        [handle for _, handle in entries], names, loc="outside lower center", ncols=columns,
        handlelength=2.6,  # long enough for a dashed line to look dashed
    )  # fmt: skip
    for text in legend.get_texts():
        text.set_parse_math(False)


def _inches(name: str) -> float:
    """The approximate width of a name in a legend."""
    return sum(2 if east_asian_width(letter) in "WF" else 1 for letter in name) / _LETTERS


def set_title(target: Any, name: str, rest: str) -> None:
    """Give a figure or Axes the title "name · rest", on two lines if one is too narrow.

    If a line is too narrow for the name alone, the name is shortened until it fits.

    Args:
        target: a `Figure` or an Axes.
        name: shown literally: `$` and `_` are not read as mathematics.
        rest: never shortened.
    """
    write = target.suptitle if isinstance(target, Figure) else target.set_title

    def fits(title: str) -> bool:
        text = write(title, parse_math=False)
        return bool(text.get_window_extent().width <= target.bbox.width * 0.97)

    if fits(f"{name} · {rest}"):
        return
    # Letter widths vary, so the width is measured; no column fits 200 letters.
    for length in range(min(max(len(name), 4), 200), 3, -1):
        if fits(f"{shorten(name, length)}\n{rest}"):
            return
