"""A calibration on disk: `calibration.json` for people, `calibration.safetensors` for arrays."""

from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load as load_tensors
from safetensors.numpy import save as save_tensors

from quantdiff.calibration.sites import Kind
from quantdiff.calibration.table import SITE, CalibrationTable
from quantdiff.errors import UsageError
from quantdiff.files import write_bytes, write_json
from quantdiff.quantization.scheme import STATIC
from quantdiff.statistics.activations import RECORDED
from quantdiff.statistics.arrays import Arrays, from_arrays, to_arrays
from quantdiff.statistics.storage import read_branches, read_content

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
        "definition": {
            SITE: table.definition,
            **{kind: part.definition for kind, part in table.more.items()},
        },
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
                            "branch": table.branches[site.name][head],
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
        **{kind: _kind(kind, part) for kind, part in table.more.items()},
    }


def _kind(name: str, kind: Kind) -> dict[str, Any]:
    """The entry for a kind of site other than the logits."""
    sites: list[dict[str, Any]] = []
    for site in kind.sites:
        rows = [
            {
                "count": int(site.count[g]),
                "min": float(site.min[g]) if site.count[g] else None,
                "max": float(site.max[g]) if site.count[g] else None,
            }
            for g in range(site.groups)
        ]
        place: dict[str, Any] = {"name": site.name, "layer": site.layer}
        if "head" in STATIC[name]:
            sites.append({**place, "heads": [{"head": g, **row} for g, row in enumerate(rows)]})
        else:
            sites.append({**place, **rows[0]})
    return {"count": int(sum(site.count.sum() for site in kind.sites)), "sites": sites}


def load_table(folder: Path) -> CalibrationTable:
    """Read both files; see `CalibrationTable.load`."""
    content = read_content(folder / "calibration.json", FORMAT, VERSION, "calibration")
    try:
        arrays = load_tensors((folder / "calibration.safetensors").read_bytes())
        described = content[SITE]["sites"]
        held = any(name.startswith(f"{_EARLIER}.") for name in arrays)
        return CalibrationTable(
            model=content["model"],
            data=content["data"],
            definition=content["definition"][SITE],
            sites=from_arrays(SITE, described, arrays),
            branches=read_branches(described),
            earlier=from_arrays(_EARLIER, described, arrays) if held else None,
            more={
                kind: Kind(
                    content["definition"][kind],
                    from_arrays(kind, content[kind]["sites"], arrays),
                    from_arrays(f"{_EARLIER}_{kind}", content[kind]["sites"], arrays)
                    if held
                    else None,
                )
                for kind in RECORDED
                if kind in content
            },
            partial=content["partial"],
            versions=content["versions"],
            command=content["command"],
        )
    except (OSError, SafetensorError, KeyError, ValueError, TypeError) as error:
        raise UsageError(f"{folder} holds a broken calibration: {error}") from None


def same(a: CalibrationTable, b: CalibrationTable) -> bool:
    """Whether two tables would be saved identically."""
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
    for kind, part in table.more.items():
        arrays |= {f"{kind}.{name}": array for name, array in to_arrays(part.sites).items()}
        if part.earlier is not None:
            first = to_arrays(part.earlier)
            arrays |= {f"{_EARLIER}_{kind}.{name}": array for name, array in first.items()}
    return arrays
