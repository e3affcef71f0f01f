"""Tables and figures.

Public names are imported on first use, so that a table need not wait for seaborn.
"""

from typing import TYPE_CHECKING

from quantdiff.lazy import lazy_names

if TYPE_CHECKING:
    from quantdiff.analysis.figures import plot, save_figures
    from quantdiff.analysis.frames import figure_data
    from quantdiff.analysis.style import model_colors
    from quantdiff.analysis.tables import (
        heading,
        profile_report,
        profile_table,
        published_table,
        worst_layers_table,
    )

__all__ = [
    "figure_data",
    "heading",
    "model_colors",
    "plot",
    "profile_report",
    "profile_table",
    "published_table",
    "save_figures",
    "worst_layers_table",
]

_HOME = {
    "figure_data": "frames",
    "heading": "tables",
    "model_colors": "style",
    "plot": "figures",
    "profile_report": "tables",
    "profile_table": "tables",
    "published_table": "tables",
    "save_figures": "figures",
    "worst_layers_table": "tables",
}

__getattr__, __dir__ = lazy_names("quantdiff.analysis", _HOME)
