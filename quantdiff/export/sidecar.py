"""The sidecar: what a checkpoint format has no field for, beside the weights.

`quantdiff.json` tells what was exported and holds a hash of every file; `quantdiff.safetensors`
holds the static ranges and the logits of a short passage. Other loaders ignore both.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from torch import Tensor

from quantdiff.errors import UsageError
from quantdiff.export.ranges import RangeTable
from quantdiff.files import write_bytes, write_json
from quantdiff.models.schemes import SIDECAR
from quantdiff.quantization import Scheme
from quantdiff.statistics.storage import read_content

__all__ = [
    "ARRAYS",
    "CARD",
    "LOGITS",
    "QUANTIZED_LOGITS",
    "SIDECAR",
    "VERIFICATION",
    "Sidecar",
    "describe_files",
    "read_sidecar",
    "sha256",
    "write_sidecar",
]

FORMAT, VERSION = "quantdiff.export", 1
ARRAYS, VERIFICATION = "quantdiff.safetensors", "verification.json"
CARD = "README.md"

# Logits of the weights alone, as any loader gives them, and under the schemes.
LOGITS, QUANTIZED_LOGITS = "logits", "quantized_logits"

# Written after the hashes, or meant to be edited.
_UNHASHED = {SIDECAR, VERIFICATION, CARD}
_CHUNK = 1 << 22


@dataclass(frozen=True)
class Sidecar:
    """A sidecar that was read.

    Attributes:
        content: of `quantdiff.json`.
        schemes: what is quantized beside the weights.
        table: the static ranges; None where all schemes are dynamic.
        logits: (R, V) fp32 by name, `LOGITS` and, where there are schemes, `QUANTIZED_LOGITS`.
    """

    content: dict[str, Any]
    schemes: tuple[Scheme, ...]
    table: RangeTable | None
    logits: dict[str, Tensor]


def write_sidecar(
    folder: Path,
    content: dict[str, Any],
    schemes: Sequence[Scheme],
    table: RangeTable | None,
    logits: dict[str, Tensor],
) -> dict[str, Any]:
    """Write both files into a folder whose other files are complete.

    Args:
        folder: the checkpoint.
        content: of `quantdiff.json`, but for what this function adds: format, schemes, sites, the
            files with their hashes, and the digest.
        schemes, table, logits: as in `Sidecar`.

    Returns:
        The whole content of `quantdiff.json`.
    """
    arrays = dict(logits)
    stored = []
    for (scheme, name), ends in (table.ranges if table else {}).items():
        key = f"ranges.{schemes.index(scheme)}.{name}"
        stacked = np.stack(ends).astype(np.float32)  # (2, H), (2, H, C) or (2, 1)
        arrays[key] = torch.from_numpy(stacked)
        stored.append({"scheme": schemes.index(scheme), "site": name, "tensor": key})
    write_bytes(folder / ARRAYS, save_tensors(arrays, metadata={"format": "pt"}))
    content = {
        "format": f"{FORMAT}/{VERSION}",
        **content,
        "schemes": [asdict(scheme) for scheme in schemes],
        "sites": [
            {"name": name, "layer": layer, "heads": heads}
            for name, (layer, heads) in (table.sites if table else {}).items()
        ],
        "ranges": stored,
        "files": describe_files(folder),
    }
    content["digest"] = _digest(content)
    write_json(folder / SIDECAR, content)
    return content


def read_sidecar(folder: Path) -> Sidecar:
    """Read both files.

    Raises:
        UsageError: they are missing, damaged, of another format or of a newer version.
    """
    content = read_content(folder / SIDECAR, FORMAT, VERSION, "exported checkpoint")
    if content.get("digest") != _digest(content):
        raise UsageError(f"{folder / SIDECAR} was changed or damaged after the export")
    try:
        arrays = load_tensors((folder / ARRAYS).read_bytes())
        schemes = tuple(Scheme(**entry) for entry in content["schemes"])
        sites = {site["name"]: (site["layer"], site["heads"]) for site in content["sites"]}
        ranges = {}
        for entry in content["ranges"]:
            least, most = arrays[entry["tensor"]].numpy()  # (H,) or (H, C) each
            ranges[schemes[entry["scheme"]], entry["site"]] = least, most
        static = any(scheme.static and scheme.quantizes for scheme in schemes)
        table = RangeTable(str(content["model"]["name"]), sites, ranges) if static else None
        logits = {name: arrays[name] for name in (LOGITS, QUANTIZED_LOGITS) if name in arrays}
        for part, entry in (("export", "format"), ("export", "dtype"), ("passage", "ids")):
            content[part][entry]
        logits[LOGITS], content["files"], content["reference"]
    except (OSError, SafetensorError, KeyError, ValueError, TypeError) as error:
        raise UsageError(
            f"{folder / ARRAYS} is damaged or does not belong to {SIDECAR} "
            f"({type(error).__name__}: {error})"
        ) from None
    return Sidecar(content, schemes, table, logits)


def describe_files(folder: Path) -> dict[str, dict[str, Any]]:
    """Size and hash of every file of a folder, by its path inside, but for those in `_UNHASHED`."""
    found = {}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.is_file() and name not in _UNHASHED:
            found[name] = {"bytes": path.stat().st_size, "sha256": sha256(path)}
    return found


def sha256(path: Path) -> str:
    """Of a file, as hex."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def _digest(content: dict[str, Any]) -> str:
    kept = {key: value for key, value in content.items() if key != "digest"}
    return hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()
