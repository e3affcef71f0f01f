"""Accuracy against bits: the tables of an evaluation in the layout of the paper's Figure 8."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd

from quantdiff.analysis.compare.measured import Measured
from quantdiff.analysis.style import Page
from quantdiff.analysis.sweep.figure import plot_sweep
from quantdiff.analysis.sweep.lines import NO_WAY, Line, Measure, lines, of_some, way_label
from quantdiff.analysis.sweep.panels import sweep_figure_data
from quantdiff.quantization.scheme import SITES

__all__ = ["bits_figures", "bits_table"]


def bits_table(measured: Measured, measure: Measure) -> pd.DataFrame:
    """One metric: one row per model and scheme, one column per width.

    Returns:
        `model`, `scheme`, then `bits_16`, `bits_8`, … and, where the metric has standard errors,
        `bits_16_stderr`, …; NaN where a cell is missing or failed.
    """
    found = lines(measured.results, measure)
    widths = sorted({bits for line in found for bits in line.points}, reverse=True)
    rows = []
    for line in found:
        row: dict[str, Any] = {"model": line.model, "scheme": _scheme(line)}
        for bits in widths:
            point = line.points.get(bits, {})
            row[f"bits_{bits}"] = _number(point.get("value"))
            row[f"bits_{bits}_stderr"] = _number(point.get("stderr"))
        rows.append(row)
    frame = pd.DataFrame(rows)
    errors = [name for name in frame if str(name).endswith("_stderr")]
    return frame.drop(columns=errors) if frame[errors].isna().all(axis=None) else frame


def _scheme(line: Line) -> str:
    return "not quantized" if line.way == NO_WAY else way_label(line.way)


def _number(value: float | None) -> float:
    return np.nan if value is None else value


def bits_figures(
    measured: Measured, names: Mapping[str, str], *, published: bool
) -> list[tuple[str | None, Page, pd.DataFrame]]:
    """One figure per site, one panel per metric, one line per model, all with the first scheme.

    Args:
        measured: an evaluation.
        names: of the models, for legends.
        published: whether `plot_sweep` draws the paper's Figure 8 beside accuracies.

    Returns:
        Site, figure and its numbers; the site is None where nothing was quantized. Schemes for
        several sites together have one width each and no figure; nor have those for only some
        layers or heads.
    """
    results = measured.results
    done = [row for row in results.rows if row["status"] == "ok"]
    if not done:
        return []
    whole = [row["site"] for row in done if row["site"] in SITES and not of_some(row)]
    sites = list(dict.fromkeys(whole))
    figures = []
    for site in sites or ([None] if not any(row["site"] for row in done) else []):
        way = None if site is None else {"site": site}
        page = plot_sweep(results, "bits", way=way, published=published, names=names)
        figures.append((site, page, sweep_figure_data(results, "bits", way=way)))
    return figures
