"""Checkpoints: one module per format, the sidecar, the verification.

The package itself is callable, as `quantdiff.export(model, tokenizer, out, format=…)`: function and
package share a name, and a package hides an attribute of its parent as soon as it is imported.
"""

import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

from quantdiff.lazy import lazy_names

if TYPE_CHECKING:
    from quantdiff.export.exporting import export
    from quantdiff.export.formats import FORMATS
    from quantdiff.export.loading import load
    from quantdiff.export.result import Exported
    from quantdiff.export.verifying import Verification, verify

__all__ = ["FORMATS", "Exported", "Verification", "export", "load", "verify"]

_HOMES = {
    "FORMATS": "formats",
    "Exported": "result",
    "Verification": "verifying",
    "export": "exporting",
    "load": "loading",
    "verify": "verifying",
}

__getattr__, __dir__ = lazy_names("quantdiff.export", _HOMES)


class _Callable(ModuleType):
    def __call__(self, *arguments: Any, **options: Any) -> "Exported":
        """See `quantdiff.export.export`."""
        from quantdiff.export.exporting import export

        return export(*arguments, **options)


sys.modules[__name__].__class__ = _Callable
