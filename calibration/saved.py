"""A calibration on disk: `calibration.json` for people, `calibration.safetensors` for arrays."""

from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load as load_tensors
from safetensors.numpy import save as save_tensors

from quantdiff.calibration.table import SITE, CalibrationTable
from quantdiff.errors import UsageError
from quantdiff.files import write_bytes, write_json
from quantdiff.statistics.storage import Arrays, from_arrays, read_content, to_arrays

__all__ = ["FORMAT", "load_table", "same", "save_table", "to_json"]

FORMAT = "quantdiff.calibration"
VERSION = 1
_EARLIER = "earlier"


def save_table(table: CalibrationTable, folder: Path) -> None:
    """Write both files; the JSON last, so that its presence means a whole calibration."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "calibration.json").unlink(missing_ok=True)
    write_bytes(folder / "calibration.safetensors", save_tensors(_arrays(table)))
    write_json(folder / "calibration.json", to_json(table))


def to_json(table: CalibrationTable) -> dict[str, Any]:
    """The content of `calibration.json`."""
    return {
        **_told(table),
        "convergence": table.convergence(),
        "warning": table.warning(),
    }


def _told(table: CalibrationTable) -> dict[str, Any]:
    return {
        "format": f"{FORMAT}/{VERSION}",
        "model": table.model,
        "data": table.data,
        "definition": {SITE: table.definition},
        "partial": table.partial,
        "versions": table.versions,
        "command": table.command,
        SITE: {
            "count": int(sum(site.count.sum() for site in table.sites)),
            "sites": [
                {
                    "name": site.name,
                    "layer": site.layer,
                    "heads": [
                        {
                            "head": head,
                            "branch": table.branches[site.layer][head],
                            "count": int(site.count[head]),
                            "min": float(site.min[head]) if site.count[head] else None,
                            "max": float(site.max[head]) if site.count[head] else None,
                        }
                        for head in range(site.groups)
                    ],
                }
                for site in table.sites
            ],
        },
    }


def load_table(folder: Path) -> CalibrationTable:
    """Read both files; see `CalibrationTable.load`."""
    content = read_content(folder / "calibration.json", FORMAT, VERSION, "calibration")
    try:
        arrays = load_tensors((folder / "calibration.safetensors").read_bytes())
        described = content[SITE]["sites"]
        held = any(name.startswith(f"{_EARLIER}.") for name in arrays)
        # Of a layer with cross-attention the site with more heads tells the branches.
        branches: dict[int, list[int | None]] = {}
        for site in described:
            heads = [head["branch"] for head in site["heads"]]
            if len(heads) > len(branches.get(site["layer"], [])):
                branches[site["layer"]] = heads
        return CalibrationTable(
            model=content["model"],
            data=content["data"],
            definition=content["definition"][SITE],
            sites=from_arrays(SITE, described, arrays),
            branches=branches,
            earlier=from_arrays(_EARLIER, described, arrays) if held else None,
            partial=content["partial"],
            versions=content["versions"],
            command=content["command"],
        )
    except (OSError, SafetensorError, KeyError, ValueError, TypeError) as error:
        raise UsageError(f"{folder} holds a broken calibration: {error}") from None


def same(a: CalibrationTable, b: CalibrationTable) -> bool:
    """Whether two tables would be written alike."""
    ours, theirs = _arrays(a), _arrays(b)
    return (
        _told(a) == _told(b)
        and ours.keys() == theirs.keys()
        and all(np.array_equal(ours[name], theirs[name]) for name in ours)
    )


def _arrays(table: CalibrationTable) -> Arrays:
    arrays = {f"{SITE}.{name}": array for name, array in to_arrays(table.sites).items()}
    if table.earlier is not None:
        first = to_arrays(table.earlier)
        arrays |= {f"{_EARLIER}.{name}": array for name, array in first.items()}
    return arrays
