"""Writing results so that a reader never meets half of one."""

import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from quantdiff.errors import UsageError

__all__ = ["staged_folder", "write_bytes", "write_json"]


def write_bytes(path: Path, content: bytes) -> None:
    """Write a file under a temporary name and rename it.

    Raises:
        OSError: the disk is full or may not be written; no part of the file remains.
    """
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        Path(name).chmod(0o666 & ~_umask())
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def write_json(path: Path, content: Any) -> None:
    """Write JSON (UTF-8, no NaN) under a temporary name and rename it."""
    text = json.dumps(content, indent=1, ensure_ascii=False, allow_nan=False)
    write_bytes(path, (text + "\n").encode())


@contextmanager
def staged_folder(out: str | Path, *, marker: str, overwrite: bool) -> Iterator[Path]:
    """A folder to write into, whose files move to `out` when the block ends without an error.

    Args:
        out: the folder that is wanted; made if missing.
        marker: the file that tells that a run of this kind is in a folder.
        overwrite: whether an earlier run's files may be replaced.

    Raises:
        UsageError: `out` holds another run, is no folder, or cannot be written.
    """
    out = Path(out)
    if (out / marker).exists() and not overwrite:
        raise UsageError(
            f"{out} holds another run ({marker}); choose another --out or pass --overwrite"
        )
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        if out.exists() and not out.is_dir():
            raise NotADirectoryError(20, "it is a file", str(out))
        stage = Path(tempfile.mkdtemp(dir=out.parent, prefix=f".{out.name}."))
    except OSError as error:
        raise UsageError(
            f"{out} cannot be written: {error.strerror}; choose another --out"
        ) from None
    try:
        yield stage
        out.mkdir(exist_ok=True)
        for file in sorted(stage.rglob("*"), key=lambda file: file.name == marker):
            if file.is_file():
                target = out / file.relative_to(stage)
                target.parent.mkdir(parents=True, exist_ok=True)
                file.replace(target)
    except OSError as error:
        if not _concerns(error, stage, out):
            raise
        raise UsageError(
            f"{out} cannot be written: {error.strerror}; choose another --out"
        ) from None
    finally:
        shutil.rmtree(stage, ignore_errors=True)


def _concerns(error: OSError, *folders: Path) -> bool:
    names = [str(name) for name in (error.filename, error.filename2) if name]
    # A failed write carries no name.
    return not names or any(str(folder) in name for folder in folders for name in names)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
