"""Where a model's files are, found but not yet opened."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quantdiff.errors import UsageError

__all__ = ["INDEX", "WEIGHTS", "Checkpoint", "checkpoint_on_disk"]

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
GGUF_MAGIC = b"GGUF"


@dataclass(frozen=True)
class Checkpoint:
    """A folder, one GGUF file in a folder, or a repository of the hub at one revision."""

    name: str  # as the user wrote it, for messages and records
    location: str  # the folder, or the hub id
    files: tuple[str, ...]  # names at the top of the folder or repository, sorted
    gguf: str | None = None  # name of the GGUF file inside the folder
    on_disk: bool = True  # whether the files can be read without a download
    revision: str | None = None  # as requested; for the hub only, None is the default branch

    @property
    def arguments(self) -> dict[str, Any]:
        """Keywords that every `from_pretrained` needs to find the files."""
        named = {"revision": self.revision, "gguf_file": self.gguf}
        return {key: value for key, value in named.items() if value is not None}


def checkpoint_on_disk(name: str, path: Path) -> Checkpoint:
    """The checkpoint at a path: a folder or a `.gguf` file.

    Raises:
        UsageError: nothing is there, or a file of another kind.
    """
    if path.is_dir():
        return Checkpoint(name, str(path), _listing(path))
    if not path.is_file():
        raise UsageError(
            f"{name!r} does not exist: there is no folder or file at {path.absolute()}"
        )
    if path.suffix.lower() != ".gguf":
        raise UsageError(
            f"{name!r} is a single file: a model is a folder with config.json and "
            f"model.safetensors, or a .gguf file"
        )
    with path.open("rb") as file:
        magic = file.read(len(GGUF_MAGIC))
    if magic != GGUF_MAGIC:
        raise UsageError(
            f"{name!r} is not a GGUF file (it starts with {magic!r}, not {GGUF_MAGIC!r}): "
            f"download or convert it again"
        )
    return Checkpoint(name, str(path.parent), _listing(path.parent), gguf=path.name)


def _listing(folder: Path) -> tuple[str, ...]:
    return tuple(sorted(entry.name for entry in folder.iterdir() if entry.is_file()))
