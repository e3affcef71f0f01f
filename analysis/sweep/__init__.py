"""Sweeps: models under many quantization schemes, resumable, with tables and figures.

Public names are imported on first use, so that reading results need not wait for models.
"""

from typing import TYPE_CHECKING

from quantdiff.lazy import lazy_names

if TYPE_CHECKING:
    from quantdiff.analysis.sweep.figure import plot_sweep
    from quantdiff.analysis.sweep.grid import make_grid
    from quantdiff.analysis.sweep.loaded import SweepResults
    from quantdiff.analysis.sweep.panels import sweep_figure_data
    from quantdiff.analysis.sweep.progress import Progress
    from quantdiff.analysis.sweep.running import sweep
    from quantdiff.analysis.sweep.saved import save_sweep_figures
    from quantdiff.analysis.sweep.table import sweep_report

__all__ = [
    "Progress",
    "SweepResults",
    "make_grid",
    "plot_sweep",
    "save_sweep_figures",
    "sweep",
    "sweep_figure_data",
    "sweep_report",
]

_HOME = {
    "Progress": "progress",
    "SweepResults": "loaded",
    "make_grid": "grid",
    "plot_sweep": "figure",
    "save_sweep_figures": "saved",
    "sweep": "running",
    "sweep_figure_data": "panels",
    "sweep_report": "table",
}

__getattr__, __dir__ = lazy_names("quantdiff.analysis.sweep", _HOME)
