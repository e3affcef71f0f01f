"""Finding the checkpoint for the name a user gives, and registries of what can be opened."""

import importlib
import os
from pathlib import Path

from quantdiff.errors import UsageError
from quantdiff.models.checkpoint import Checkpoint, checkpoint_on_disk

__all__ = ["ARCHITECTURES", "FORMATS", "SOURCES", "known_names", "locate"]

# Name -> module with `locate(name: str) -> Path`, which returns a folder or a .gguf file. A name
# that ends in a colon is a prefix; its module may have `shipped()`, the full names. A registered
# name wins over a folder of the same name in the working directory, which `./name` still reaches.
SOURCES = {
    "smollm2-135m": "quantdiff.models.smollm2",
    "zoo:": "quantdiff.models.zoo",
}

# Model type in config.json -> module that registers its classes with transformers' Auto classes
# when it is imported. Code that such a checkpoint brings is neither needed nor run.
ARCHITECTURES: dict[str, str] = {"diff_v2": "quantdiff.models.diff_v2"}

# File that marks a folder whose weights transformers cannot read -> module with
# `open_model(checkpoint, config, dtype, device, attention) -> model`, which raises UsageError.
FORMATS: dict[str, str] = {"quanto_qmap.json": "quantdiff.models.quanto"}


def known_names() -> tuple[str, ...]:
    """The registered names; one that ends in a colon is a prefix for names not known in advance."""
    names: list[str] = []
    for name, module in SOURCES.items():
        whole = getattr(importlib.import_module(module), "shipped", None) if ":" in name else None
        names += [name] if whole is None else whole()
    return tuple(names)


def locate(name: str | Path, revision: str | None = None) -> Checkpoint:
    """Find the files behind a name.

    Args:
        name: registered name, folder, `.gguf` file or hub id; a `Path` is never a hub id.
        revision: branch, tag or commit; for hub ids only.

    Raises:
        UsageError: nothing is there, or `revision` is given for something that is not on the hub.
    """
    text = os.fspath(name)
    if not text.strip():
        raise UsageError(
            "the model's name is empty: give a hub id, a folder, a .gguf file or a known name "
            f"({', '.join(known_names())})"
        )
    found = _registered(text) if isinstance(name, str) else None
    if found is None:
        path = Path(name).expanduser()
        if path.exists() or not isinstance(name, str) or _looks_like_a_path(text):
            found = checkpoint_on_disk(text, path)
    if found is None:
        from quantdiff.models.hub import find_on_hub

        return find_on_hub(text, revision, known=known_names())
    if revision is not None:
        raise UsageError(
            f"revision={revision!r} was given, but {text!r} is not on the hub: leave it out"
        )
    return found


def _registered(text: str) -> Checkpoint | None:
    for key, module in SOURCES.items():
        if text == key or (key.endswith(":") and text.startswith(key)):
            return checkpoint_on_disk(text, importlib.import_module(module).locate(text))
    return None


def _looks_like_a_path(text: str) -> bool:
    """Whether a name that does not exist was meant as a path: a hub id has at most one slash."""
    return (
        text.startswith((".", "~", "/"))
        or text.endswith(("/", ".gguf"))
        or text.count("/") > 1
        or "\\" in text
    )
