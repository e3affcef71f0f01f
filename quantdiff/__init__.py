"""How large activations get, what that costs at low bits, what differential attention saves.

The public names are gathered here and imported when they are first used, so that importing the
package stays quick.
"""

from typing import TYPE_CHECKING

from quantdiff.errors import MissingExtraError, QuantizationError, RecordingError, UsageError
from quantdiff.lazy import lazy_names
from quantdiff.versions import VERSION

if TYPE_CHECKING:
    from quantdiff.analysis.figures import plot
    from quantdiff.calibration.calibrating import calibrate
    from quantdiff.calibration.table import CalibrationTable
    from quantdiff.hooks import Recorder, record
    from quantdiff.models import load
    from quantdiff.quantization import Scheme, fake_quantize
    from quantdiff.statistics.profile import Profile

__all__ = [
    "CalibrationTable",
    "MissingExtraError",
    "Profile",
    "QuantizationError",
    "Recorder",
    "RecordingError",
    "Scheme",
    "UsageError",
    "__version__",
    "calibrate",
    "fake_quantize",
    "load",
    "plot",
    "record",
]

__version__ = VERSION

_HOME = {
    "CalibrationTable": "quantdiff.calibration.table",
    "Profile": "quantdiff.statistics.profile",
    "Recorder": "quantdiff.hooks",
    "Scheme": "quantdiff.quantization",
    "calibrate": "quantdiff.calibration.calibrating",
    "fake_quantize": "quantdiff.quantization",
    "load": "quantdiff.models",
    "plot": "quantdiff.analysis.figures",
    "record": "quantdiff.hooks",
}

__getattr__, __dir__ = lazy_names("quantdiff", _HOME)
