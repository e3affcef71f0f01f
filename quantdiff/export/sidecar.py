"""The sidecar beside the weights: what a checkpoint format has no field for.

`quantdiff.json` records what was exported and a hash of every file; `quantdiff.safetensors` holds
the static ranges and the logits of a short passage. Other loaders ignore both: some would read
every safetensors file of a folder, were it not for an index that names those of the model.
"""

import hashlib
import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
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
from quantdiff.models.checkpoint import INDEX, WEIGHTS
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
    "DamagedError",
    "Sidecar",
    "describe_files",
    "read_sidecar",
    "reading",
    "sha256",
    "write_sidecar",
]

FORMAT, VERSION, WORD = "quantdiff.export", 1, "exported checkpoint"
ARRAYS, VERIFICATION = "quantdiff.safetensors", "verification.json"
CARD = "README.md"

# Logits from the weights alone, as from any loader, and under the schemes.
LOGITS, QUANTIZED_LOGITS = "logits", "quantized_logits"

# Written after the hashes, or meant to be edited.
_UNHASHED = {SIDECAR, VERIFICATION, CARD}
_CHUNK = 1 << 22


class DamagedError(UsageError):
    """A sidecar is not what was written."""


@dataclass(frozen=True)
class Sidecar:
    """A sidecar as read.

    Attributes:
        content: of `quantdiff.json`.
        schemes: what is quantized besides the weights.
        table: the static ranges; None if all schemes are dynamic.
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
    """Write both files into a folder whose other files are complete, and an index if it has none.

    Args:
        folder: the checkpoint.
        content: of `quantdiff.json`, except what this function adds: format, schemes, sites, the
            files with their hashes, and the digest.
        schemes, table, logits: as in `Sidecar`.

    Returns:
        The whole content of `quantdiff.json`.
    """
    if not (folder / INDEX).is_file():
        _write_index(folder)
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
    """Read both files of a sidecar.

    Raises:
        DamagedError: they are missing, damaged or of another format.
        UsageError: they are of a newer version, or cannot be read here.
    """
    path = folder / SIDECAR
    packed: bytes | None = None
    with reading(folder):
        for file in (path, folder / ARRAYS):
            packed = file.read_bytes() if file.is_file() else None
    try:
        read_content(path, FORMAT, sys.maxsize, WORD)
    except UsageError as error:
        raise DamagedError(str(error)) from None
    content = read_content(path, FORMAT, VERSION, WORD)  # refuses one that is intact but newer
    if content.get("digest") != _digest(content):
        raise DamagedError(f"{path} was changed or damaged after the export")
    if packed is None:
        raise DamagedError(f"{folder / ARRAYS} is missing, which belongs to {SIDECAR}")
    try:
        arrays = load_tensors(packed)
        schemes = tuple(Scheme(**entry) for entry in content["schemes"])
        sites = {site["name"]: (site["layer"], site["heads"]) for site in content["sites"]}
        ranges = {}
        for entry in content["ranges"]:
            least, most = arrays[entry["tensor"]].numpy()  # (H,) or (H, C) each
            ranges[schemes[entry["scheme"]], entry["site"]] = least, most
        static = any(scheme.static and scheme.quantizes for scheme in schemes)
        name, calibration = str(content["model"]["name"]), content.get("calibration")
        table = RangeTable(name, sites, ranges, calibration) if static else None
        logits = {name: arrays[name] for name in (LOGITS, QUANTIZED_LOGITS) if name in arrays}
        for part, entry in (("export", "format"), ("export", "dtype"), ("passage", "ids")):
            content[part][entry]
        logits[LOGITS], content["files"], content["reference"]
    except (SafetensorError, KeyError, ValueError, TypeError) as error:
        raise DamagedError(
            f"{folder / ARRAYS} is damaged or does not belong to {SIDECAR} "
            f"({type(error).__name__}: {error})"
        ) from None
    return Sidecar(content, schemes, table, logits)


@contextmanager
def reading(folder: Path) -> Iterator[None]:
    """Refuse a folder with unreadable files, which say nothing about the checkpoint.

    Raises:
        UsageError: instead of an `OSError`.
    """
    try:
        yield
    except OSError as error:
        raise UsageError(
            f"{error.filename or folder} cannot be read ({error.strerror or error}): what is in "
            f"{folder} has to be readable here"
        ) from None


def _write_index(folder: Path) -> None:
    """Write the index that transformers writes beside shards, for weights in a single file."""
    with (folder / WEIGHTS).open("rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        size = (folder / WEIGHTS).stat().st_size - file.tell()
    names = sorted(header.keys() - {"__metadata__"})
    content = {"metadata": {"total_size": size}, "weight_map": dict.fromkeys(names, WEIGHTS)}
    write_json(folder / INDEX, content)


def describe_files(folder: Path) -> dict[str, dict[str, Any]]:
    """Size and hash of every file in a folder, by relative path, except those in `_UNHASHED`."""
    found = {}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.is_file() and name not in _UNHASHED:
            found[name] = {"bytes": path.stat().st_size, "sha256": sha256(path)}
    return found


def sha256(path: Path) -> str:
    """SHA-256 of a file, as hex."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def _digest(content: dict[str, Any]) -> str:
    kept = {key: value for key, value in content.items() if key != "digest"}
    return hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()
