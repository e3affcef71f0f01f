"""Writing results so that a reader never sees half of one."""

import errno
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from quantdiff.errors import UsageError

__all__ = ["staged_folder", "write_bytes", "write_json"]

# Errors of a disk that is full or read-only, or of a path that is not ours to write.
_REFUSALS = {
    errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM, errno.EIO,
    errno.ENOTDIR, errno.EEXIST, errno.ENAMETOOLONG, errno.ENOENT, errno.EISDIR,
}  # fmt: skip

_STAGED = ".staged-"  # prefix of a stage inside the target folder
_EARLIER = "-earlier"  # suffix of an earlier run while the new one takes its place


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
    """A folder to write into, which becomes `out` when the block ends without an error.

    Whenever the process is killed, `out` is the earlier run or the new one, each complete, or it is
    missing for a moment and the next call restores the earlier one. Files of other origin stay.
    Where a folder cannot or should not be renamed (a mount, the working directory, a folder that
    holds other folders, which another run may be writing to), files are moved one by one instead,
    and a folder without its marker was not finished.

    Args:
        out: the target folder; created if missing.
        marker: the file that marks a folder as holding a complete run of this kind.
        owned: patterns of all files that such a run may write; an earlier run's are removed.
        overwrite: whether an earlier run's files may be replaced.

    Raises:
        UsageError: `out` holds another run, is not a folder, or cannot be written.
    """
    out = Path(out)
    try:
        place = out.resolve()  # a symlink stays one
        _recover(place, marker)
        there = (place / marker).exists()
    except OSError as error:
        raise _refusal(out, error) from None
    except RuntimeError:  # a symlink loop, before Python 3.13
        raise UsageError(f"{out} is a link that leads to itself; choose another --out") from None
    if there and not overwrite:
        raise UsageError(
            f"{out} holds another run ({marker}); choose another --out or pass --overwrite"
        )
    made: list[Path] = []
    try:
        try:
            stage = _stage(place, owned, made)
        except OSError as error:
            raise _refusal(out, error) from None
        try:
            yield stage
            _deliver(stage, place, marker, owned)
        except OSError as error:
            named = [str(name) for name in (error.filename, error.filename2) if name]
            ours = all(name.startswith((str(stage), str(out), str(place))) for name in named)
            if error.errno not in _REFUSALS or not ours:
                raise
            raise _refusal(out, error) from None
        finally:
            shutil.rmtree(stage, ignore_errors=True)
    except BaseException:
        for folder in made:  # those created for this run, if empty
            try:
                folder.rmdir()
            except OSError:
                break
        raise


def _recover(out: Path, marker: str) -> None:
    """Restore the name of a run whose replacement was killed between two renames.

    What is left of a run that was replaced must not come back later: it is removed.
    """
    earlier = [path for path in out.parent.glob(f".*{_EARLIER}") if path.stem == f".{out.name}"]
    if (out / marker).exists():
        for path in earlier:
            shutil.rmtree(path, ignore_errors=True)
    elif earlier and not out.exists():
        with suppress(OSError):
            max(earlier, key=lambda path: path.stat().st_ctime).rename(out)


def _stage(out: Path, owned: Sequence[str], made: list[Path]) -> Path:
    """A temporary folder on the same file system as `out`; folders made for it go to `made`.

    It lies next to `out` if it may take its place, otherwise inside.
    """
    if not out.exists():
        missing = [folder for folder in out.parents if not folder.exists()]
        out.parent.mkdir(parents=True, exist_ok=True)
        made += missing
        return Path(tempfile.mkdtemp(dir=out.parent, prefix=f".{out.name}."))
    if not out.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, "it is a file", str(out))
    stage = Path(tempfile.mkdtemp(dir=out, prefix=_STAGED))
    if _alone(out, owned, stage):
        # Fails for a mount, and in a parent that is not writable.
        with suppress(OSError):
            return stage.rename(out.with_name(f".{out.name}.{stage.name.removeprefix(_STAGED)}"))
    return stage


def _alone(out: Path, owned: Sequence[str], stage: Path) -> bool:
    """Whether nobody else works in a folder, neither the parent shell nor another run."""
    own = {Path(pattern).parts[0] for pattern in owned} | {stage.name}
    folders = {path.name for path in out.iterdir() if path.is_dir() and not path.is_symlink()}
    if folders - own:
        return False
    try:
        return not Path.cwd().is_relative_to(out)
    except OSError:  # it was removed
        return False


def _deliver(stage: Path, out: Path, marker: str, owned: Sequence[str]) -> None:
    if not out.exists():  # all at once, even if the process is killed now
        stage.chmod(0o777 & ~_umask())
        stage.rename(out)
        return
    earlier = {out / marker, *(path for pattern in owned for path in out.glob(pattern))}
    earlier = {path for path in earlier if not path.is_dir()}
    # Checked again: hours may have passed, and the folder may be new.
    beside = stage.parent != out and _alone(out, owned, stage)
    if not (beside and _swapped(stage, out, earlier)):
        _move(stage, out, marker, earlier)


def _swapped(stage: Path, out: Path, earlier: set[Path]) -> bool:
    """Put the stage in the place of `out`, keeping the files of others; returns whether it did.

    Args:
        stage: a folder next to `out`, complete except for the files of others.
        out: an earlier run, or an empty folder.
        earlier: the files of the earlier run.
    """

    def left(folder: str, names: list[str]) -> list[str]:
        """Names that are not carried over."""
        paths = [Path(folder, name) for name in names]
        return [
            path.name
            for path in paths
            if path in earlier
            or (not path.is_dir() and os.path.lexists(stage / path.relative_to(out)))
        ]

    aside = stage.with_name(stage.name + _EARLIER)
    try:
        # As hard links, so that both folders are complete until the old one goes.
        shutil.copytree(
            out, stage, symlinks=True, ignore=left, copy_function=os.link, dirs_exist_ok=True
        )
        out.rename(aside)
    except OSError:  # not every file system has links, nor may every folder be renamed
        return False
    try:
        stage.rename(out)
    except BaseException:
        if not out.exists():
            aside.rename(out)
        raise
    with suppress(OSError):
        aside.rename(stage)  # where it is removed
    return True


def _move(stage: Path, out: Path, marker: str, earlier: set[Path]) -> None:
    """Move the files of the stage one by one to `out`, and remove those of the earlier run."""
    # Without its marker the earlier run does not count: a reader never sees a mixture of two.
    (out / marker).unlink(missing_ok=True)
    new = [path for path in stage.rglob("*") if not path.is_dir()]
    targets = {out / path.relative_to(stage) for path in new}
    for path in earlier - targets:
        path.unlink(missing_ok=True)
    for path in sorted(new, key=lambda path: path.name == marker):
        target = out / path.relative_to(stage)
        target.parent.mkdir(parents=True, exist_ok=True)
        path.replace(target)


def _refusal(out: Path, error: OSError) -> UsageError:
    return UsageError(f"{out} cannot be written: {error.strerror}; choose another --out")


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
