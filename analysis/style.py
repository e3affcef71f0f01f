"""The look of every figure: sizes of a paper's columns, one palette, one colour a model."""

import io
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
import seaborn as sns
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure

from quantdiff.analysis.text import shorten
from quantdiff.files import write_bytes

__all__ = [
    "DOUBLE",
    "SINGLE",
    "Page",
    "heat_map",
    "model_colors",
    "save_page",
    "set_title",
    "style",
]

SINGLE, DOUBLE = 3.35, 6.9  # inches: one and two columns

_SETTINGS: dict[str, Any] = {
    # Named and not "sans-serif": a generic family is looked up when a figure is drawn, in the
    # user's settings and not in these.
    "font.family": ["DejaVu Sans"],
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
    """Draw in quantdiff's style; the user's matplotlib settings are back when the block ends."""
    settings = {**sns.axes_style("ticks"), **sns.plotting_context("paper"), **_SETTINGS}
    with mpl.rc_context(settings):
        yield


def model_colors(models: Iterable[str]) -> dict[str, tuple[float, float, float]]:
    """A colour for each model, told apart also by colour-blind readers for up to nine models.

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
    # Not down to black, where neighbouring values could not be told apart.
    shades = sns.color_palette("mako_r", as_cmap=True)(np.linspace(0, 0.85, 256))
    return ListedColormap(shades, name="quantdiff")


class Page(Figure):  # type: ignore[misc]
    """A figure outside of pyplot, so that nothing is left open; a notebook shows it by itself."""

    def __init__(self, width: float, height: float) -> None:
        super().__init__(figsize=(width, height), layout="constrained")

    def draw(self, renderer: Any) -> None:
        """Draw in quantdiff's style: ticks are made here, long after the panels."""
        with style():
            super().draw(renderer)

    def savefig(self, *args: Any, **options: Any) -> None:
        """Write the figure, at 200 dpi unless told otherwise."""
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


def set_title(target: Any, name: str, rest: str) -> None:
    """Give a figure or Axes the title "name · rest", the name shortened until it fits.

    Args:
        target: a `Figure` or an Axes.
        name: shown as it is: neither `$` nor `_` is mathematics.
        rest: never shortened.
    """
    write = target.suptitle if isinstance(target, Figure) else target.set_title
    # Letters are of many widths, so the width is measured; no column takes 200 of them.
    for length in range(min(max(len(name), 4), 200), 3, -1):
        text = write(f"{shorten(name, length)} · {rest}", parse_math=False)
        if text.get_window_extent().width <= target.bbox.width * 0.97:
            return
