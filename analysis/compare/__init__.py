"""Any models side by side: what was profiled, swept, exported and calibrated, as one report.

The public names are imported on first use, so that a command's help does not wait for seaborn.
"""

from typing import TYPE_CHECKING

from quantdiff.lazy import lazy_names

if TYPE_CHECKING:
    from quantdiff.analysis.compare.comparison import Comparison, compare

__all__ = ["Comparison", "compare"]

_HOME = {"Comparison": "comparison", "compare": "comparison"}

__getattr__, __dir__ = lazy_names("quantdiff.analysis.compare", _HOME)
