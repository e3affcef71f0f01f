"""Checks of an exported folder that do not run its model."""

import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from quantdiff.export.sidecar import ARRAYS, sha256
from quantdiff.models.checks import PICKLES
from quantdiff.models.sources import FORMATS

__all__ = ["check_files", "check_tensors", "pickles"]

_PICKLES = (*PICKLES, ".pkl", ".pickle", ".joblib", ".npy", ".npz")
# Files that a loader would read or run: an additional one is not harmless.
_READ = (".safetensors", ".index.json", ".py", ".gguf", "_config.json", "config.json")
# Files that decide what a model computes.
_COMPUTING = (".safetensors", ".index.json", ".py")
_SETTINGS = ("config.json", "quantize_config.json", *FORMATS)

# Suffixes of the names of scale tensors. In bitsandbytes' formats a block of zeros has the largest
# magnitude 0, from which its code restores zeros; a scale that is divided by is never 0.
_DIVIDED = ("weight_scale", "weight._scale", ".scales")
_MAGNITUDES = (".absmax", ".nested_absmax", ".SCB")


def check_files(
    folder: Path, content: dict[str, Any], *, computing_only: bool = False
) -> list[str]:
    """What is wrong with the files, one sentence each; empty if they are as exported.

    Args:
        folder: the checkpoint.
        content: of its `quantdiff.json`.
        computing_only: skip files that the logits of given tokens do not depend on, such as a chat
            template or a tokenizer.
    """
    wrong = []
    listed: dict[str, dict[str, Any]] = content["files"]
    for name, known in listed.items():
        path = folder / name
        if computing_only and not (name.endswith(_COMPUTING) or name in _SETTINGS):
            continue
        if not path.is_file():
            wrong.append(f"{name} is missing")
        elif path.stat().st_size != known["bytes"]:
            wrong.append(
                f"{name} has {path.stat().st_size:,} bytes where {known['bytes']:,} were exported"
            )
        elif sha256(path) != known["sha256"]:
            wrong.append(f"{name} has other content than was exported (its SHA-256 differs)")
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        hidden = any(part.startswith(".") for part in path.relative_to(folder).parts)
        if path.is_file() and not hidden and name not in listed and name.endswith(_READ):
            wrong.append(f"{name} was not exported, but loaders would read it")
    return wrong


def pickles(folder: Path) -> list[str]:
    """The files that are pickles, by name or content."""
    found = []
    for path in sorted(folder.rglob("*")):
        if not path.is_file() or path.suffix == ".safetensors":  # never read as anything else
            continue
        if path.suffix.lower() in _PICKLES or _is_pickle(path):
            found.append(path.relative_to(folder).as_posix())
    return found


def _is_pickle(path: Path) -> bool:
    with path.open("rb") as file:
        start = file.read(2)
    if len(start) == 2 and start[0] == 0x80 and 2 <= start[1] <= 5:  # PROTO 2 to 5
        return True
    if start != b"PK":
        return False
    try:  # a zip archive, as torch.save writes it
        with zipfile.ZipFile(path) as archive:
            return any(name.endswith(".pkl") for name in archive.namelist())
    except zipfile.BadZipFile:
        return False


def check_tensors(folder: Path) -> tuple[int, list[str]]:
    """The number of tensors, and what is wrong with them, one sentence each."""
    count = 0
    wrong: list[str] = []
    for path in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118  (it is no dict)
                    count += 1
                    wrong += _judge(path.name, name, file.get_tensor(name))
        except SafetensorError as error:
            wrong.append(f"{path.name} is truncated or no safetensors file ({error})")
    return count, wrong


def _judge(file: str, name: str, value: torch.Tensor) -> Iterator[str]:
    if not value.is_floating_point() or not value.numel():
        return
    value = value.float()
    if not bool(torch.isfinite(value).all()):
        yield f"{name} in {file} holds NaN or infinity"
    elif file == ARRAYS:
        return
    elif name.endswith(_DIVIDED) and not bool((value > 0).all()):
        yield f"{name} in {file} holds a scale that is not greater than 0"
    elif name.endswith(_MAGNITUDES) and not bool((value >= 0).all()):
        yield f"{name} in {file} holds a largest magnitude below 0"
