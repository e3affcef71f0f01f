"""The ranges of a calibration table as a frame."""

from dataclasses import replace
from typing import TYPE_CHECKING

from quantdiff.errors import UsageError

if TYPE_CHECKING:
    import pandas as pd

    from quantdiff.calibration.table import CalibrationTable

__all__ = ["ranges_frame"]

_GRANULARITIES = ("tensor", "head")


def ranges_frame(table: "CalibrationTable", granularity: str = "tensor") -> "pd.DataFrame":
    """The ranges of the attention logits that each observer finds, as `CalibrationTable.range`.

    A symmetric grid extends to the larger magnitude of `least` and `most`.

    Args:
        table: the table.
        granularity: "tensor", one row per site and observer, or "head", one per head as well.

    Returns:
        name, layer, head and branch (both missing for `tensor`; a standard head has no branch),
        observer, least, most.

    Raises:
        UsageError: another granularity.
    """
    import pandas as pd

    from quantdiff.calibration.table import SHOWN

    if granularity not in _GRANULARITIES:
        raise UsageError(
            f"static ranges of attention logits have no granularity {granularity!r}; choose one of "
            f"{', '.join(_GRANULARITIES)}"
        )
    rows = []
    for site in table.sites:
        for observer, scheme in SHOWN.items():
            least, most = table.range(replace(scheme, granularity=granularity), site.name)
            about = {"name": site.name, "layer": site.layer}
            for head, branch in enumerate(table.branches[site.name]):
                place = {"head": head, "branch": branch}
                if granularity == "tensor":
                    place = dict.fromkeys(place)
                found = {"least": float(least[head]), "most": float(most[head])}
                rows.append({**about, **place, "observer": observer, **found})
                if granularity == "tensor":  # the same for all heads
                    break
    return pd.DataFrame(rows).astype({"head": "Int64", "branch": "Int64"})
