"""How large activations get, what that costs at low bits, what differential attention saves.

Public names are listed here and imported on first use, so that importing the package stays quick.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from quantdiff.errors import (
    MissingExtraError,
    QuantizationError,
    RecordingError,
    UsageError,
    VerificationError,
)
from quantdiff.lazy import lazy_names
from quantdiff.versions import VERSION

if TYPE_CHECKING:
    from quantdiff.analysis.compare.comparison import Comparison, compare
    from quantdiff.analysis.figures import plot
    from quantdiff.analysis.notebook import to_html
    from quantdiff.analysis.ranges import plot_ranges
    from quantdiff.calibration.calibrating import calibrate
    from quantdiff.calibration.table import CalibrationTable
    from quantdiff.export.exporting import export
    from quantdiff.export.loading import load
    from quantdiff.export.verifying import verify
    from quantdiff.hooks import Recorder, record
    from quantdiff.quantization import Scheme, fake_quantize
    from quantdiff.statistics.profile import Profile

__all__ = [
    "CalibrationTable",
    "Comparison",
    "MissingExtraError",
    "Profile",
    "QuantizationError",
    "Recorder",
    "RecordingError",
    "Scheme",
    "UsageError",
    "VerificationError",
    "__version__",
    "calibrate",
    "compare",
    "export",
    "fake_quantize",
    "load",
    "plot",
    "plot_ranges",
    "record",
    "to_html",
    "verify",
]

__version__ = VERSION

_HOME = {
    "CalibrationTable": "quantdiff.calibration.table",
    "Comparison": "quantdiff.analysis.compare",
    "Profile": "quantdiff.statistics.profile",
    "Recorder": "quantdiff.hooks",
    "Scheme": "quantdiff.quantization",
    "calibrate": "quantdiff.calibration.calibrating",
    "compare": "quantdiff.analysis.compare",
    "fake_quantize": "quantdiff.quantization",
    "load": "quantdiff.export.loading",
    "plot": "quantdiff.analysis.figures",
    "plot_ranges": "quantdiff.analysis.ranges",
    "record": "quantdiff.hooks",
    "to_html": "quantdiff.analysis.notebook",
    "verify": "quantdiff.export.verifying",
}

_find, __dir__ = lazy_names("quantdiff", _HOME | {"export": "quantdiff.export"})


def __getattr__(name: str) -> Any:
    # The package itself, which is callable: importing it sets this attribute anyway.
    return import_module("quantdiff.export") if name == "export" else _find(name)
