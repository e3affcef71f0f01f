"""Looking up a repository of the Hugging Face hub in one short request."""

from pathlib import Path

import huggingface_hub
from huggingface_hub import errors as hub_errors
from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

from quantdiff.errors import UsageError
from quantdiff.models.checkpoint import Checkpoint, checkpoint_on_disk

__all__ = ["download", "fetch", "find_on_hub"]

# Seconds to wait for the hub. transformers itself would retry six times (23 s without a network).
TIMEOUT = 5.0

# The client's own base class moved from httpx to httpx2 between releases of huggingface_hub; both
# are found here. A refused connection in offline mode is an OSError.
UNREACHABLE = (hub_errors.HTTPError, OSError)  # type: ignore[attr-defined]


def find_on_hub(name: str, revision: str | None, known: tuple[str, ...]) -> Checkpoint:
    """The repository `name` at `revision`, or its copy in the cache if the hub is unreachable.

    Args:
        name: repository id, `organisation/name`.
        revision: branch, tag or commit; None is the default branch.
        known: names that work, for the message.

    Raises:
        UsageError: no such repository or revision, or the hub cannot be reached and the cache
            does not hold it.
    """
    neither = (
        f"{name!r} is neither a folder, nor a .gguf file, nor a name quantdiff knows "
        f"({', '.join(known)})"
    )
    try:
        validate_repo_id(name)
    except hub_errors.HFValidationError as error:
        raise UsageError(f"{neither}, and cannot be a hub id: check the spelling") from error
    try:
        info = huggingface_hub.HfApi().model_info(name, revision=revision, timeout=TIMEOUT)
    except hub_errors.RevisionNotFoundError as error:
        raise UsageError(f"{name!r} has no revision {revision!r} on the hub") from error
    except hub_errors.RepositoryNotFoundError as error:
        raise UsageError(
            f"{neither}, and was not found on the hub: check the spelling, and log in with "
            f"`hf auth login` if the repository is private"
        ) from error
    except UNREACHABLE as error:
        cached = huggingface_hub.try_to_load_from_cache(name, "config.json", revision=revision)
        if isinstance(cached, str):
            return checkpoint_on_disk(name, Path(cached).parent)
        raise UsageError(
            f"{neither}, and was not found on the hub, or the hub cannot be reached "
            f"({type(error).__name__}): check the spelling and the connection"
        ) from error
    names = (sibling.rfilename for sibling in info.siblings or [])
    files = tuple(sorted(entry for entry in names if "/" not in entry))
    # Not pinned to info.sha: the cache would then not know which commit the branch is at, and the
    # model could not be found again without the hub.
    return Checkpoint(name, name, files, on_disk=False, revision=revision)


def fetch(checkpoint: Checkpoint, name: str) -> Path:
    """One file of a repository.

    Raises:
        UsageError: the hub cannot be reached, or refuses it.
    """
    try:
        found = huggingface_hub.hf_hub_download(
            checkpoint.location, name, revision=checkpoint.revision
        )
    except UNREACHABLE as error:
        raise _failed(checkpoint, error) from error
    return Path(found)


def download(checkpoint: Checkpoint) -> Path:
    """A whole repository, as a folder of the cache.

    Raises:
        UsageError: the hub cannot be reached, or refuses it.
    """
    try:
        return Path(
            huggingface_hub.snapshot_download(checkpoint.location, revision=checkpoint.revision)
        )
    except UNREACHABLE as error:
        raise _failed(checkpoint, error) from error


def _failed(checkpoint: Checkpoint, error: Exception) -> UsageError:
    return UsageError(
        f"{checkpoint.name!r} cannot be downloaded ({type(error).__name__}: {error}): check the "
        "connection"
    )
