"""Token batches from text, observers, the calibration table, the shipped corpus.

The public names are imported on first use: reading text must not wait for a recorder.
"""

from typing import TYPE_CHECKING

from quantdiff.lazy import lazy_names

if TYPE_CHECKING:
    from quantdiff.calibration.calibrating import calibrate
    from quantdiff.calibration.convergence import Moved
    from quantdiff.calibration.table import CalibrationTable
    from quantdiff.calibration.text import (
        TextWindows,
        check_vocabulary,
        read_documents,
        text_windows,
    )

__all__ = [
    "CalibrationTable",
    "Moved",
    "TextWindows",
    "calibrate",
    "check_vocabulary",
    "read_documents",
    "text_windows",
]

_HOME = {
    "CalibrationTable": "table",
    "Moved": "convergence",
    "TextWindows": "text",
    "calibrate": "calibrating",
    "check_vocabulary": "text",
    "read_documents": "text",
    "text_windows": "text",
}

__getattr__, __dir__ = lazy_names("quantdiff.calibration", _HOME)
