"""Statistics kept of a recording: extremes with coordinates, moments, histograms."""

from quantdiff.statistics.histogram import Histogram
from quantdiff.statistics.moments import Moments
from quantdiff.statistics.site import SiteStatistics
from quantdiff.statistics.streaming import NonFiniteError, measure_logits, measure_values
from quantdiff.statistics.top import Top
from quantdiff.statistics.visible import Visible

__all__ = [
    "Histogram",
    "Moments",
    "NonFiniteError",
    "SiteStatistics",
    "Top",
    "Visible",
    "measure_logits",
    "measure_values",
]
