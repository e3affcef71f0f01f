"""Writing results so that a reader never meets half of one."""

import errno
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from quantdiff.errors import UsageError

__all__ = ["staged_folder", "write_bytes", "write_json"]

# What a disk says that is full, read-only, or not ours.
_REFUSALS = {
    errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM, errno.EIO,
    errno.ENOTDIR, errno.EEXIST, errno.ENAMETOOLONG, errno.ENOENT, errno.EISDIR,
}  # fmt: skip


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
def staged_folder(
    out: str | Path, *, marker: str, owned: Sequence[str], overwrite: bool
) -> Iterator[Path]:
    """A folder to write into, whose files move to `out` when the block ends without an error.

    Args:
        out: the folder that is wanted; made if missing.
        marker: the file that tells that a whole run of this kind is in a folder.
        owned: patterns of all files that such a run may leave; an earlier run's are removed.
        overwrite: whether an earlier run's files may be replaced.

    Raises:
        UsageError: `out` holds another run, is no folder, or cannot be written.
    """
    out = Path(out)
    if (out / marker).exists() and not overwrite:
        raise UsageError(
            f"{out} holds another run ({marker}); choose another --out or pass --overwrite"
        )
    made: list[Path] = []
    try:
        try:
            stage = _stage(out, made)
        except OSError as error:
            raise _refusal(out, error) from None
        try:
            yield stage
            _deliver(stage, out, marker, owned)
        except OSError as error:
            named = [str(name) for name in (error.filename, error.filename2) if name]
            ours = all(name.startswith((str(stage), str(out))) for name in named)
            if error.errno not in _REFUSALS or not ours:
                raise
            raise _refusal(out, error) from None
        finally:
            shutil.rmtree(stage, ignore_errors=True)
    except BaseException:
        for folder in made:  # those that were made for this run and hold nothing
            try:
                folder.rmdir()
            except OSError:
                break
        raise


def _stage(out: Path, made: list[Path]) -> Path:
    """A temporary folder on the same file system as `out`; folders made for it go to `made`."""
    if out.exists():
        if not out.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, "it is a file", str(out))
        return Path(tempfile.mkdtemp(dir=out, prefix=".staged-"))
    missing = [folder for folder in out.parents if not folder.exists()]
    out.parent.mkdir(parents=True, exist_ok=True)
    made += missing
    return Path(tempfile.mkdtemp(dir=out.parent, prefix=f".{out.name}."))


def _deliver(stage: Path, out: Path, marker: str, owned: Sequence[str]) -> None:
    if not out.exists():  # all at once, even if the process is killed now
        stage.chmod(0o777 & ~_umask())
        stage.rename(out)
        return
    # Without its marker the earlier run is no run: a reader never meets a mixture of two.
    (out / marker).unlink(missing_ok=True)
    for pattern in owned:
        for file in out.glob(pattern):
            file.unlink()
    for file in sorted(stage.rglob("*"), key=lambda file: file.name == marker):
        if file.is_file():
            target = out / file.relative_to(stage)
            target.parent.mkdir(parents=True, exist_ok=True)
            file.replace(target)


def _refusal(out: Path, error: OSError) -> UsageError:
    return UsageError(f"{out} cannot be written: {error.strerror}; choose another --out")


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
