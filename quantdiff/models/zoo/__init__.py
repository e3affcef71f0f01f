"""The zoo: small models that differ in their attention, shipped with the package."""

import json
from pathlib import Path
from typing import Any

from quantdiff.errors import UsageError

__all__ = ["PREFIX", "locate", "shipped"]

PREFIX = "zoo:"
FOLDER = Path(__file__).parent
ORDER = ("transformer", "diff-v1", "diff-v2")  # the standard model first, for ratios


def shipped() -> dict[str, dict[str, Any]]:
    """Name, such as `zoo:diff-v1` -> content of its `training.json`.

    It has kind, recipe, parameters, tokens, held_out_loss (nats per token), held_out_stderr,
    held_out_tokens, bigram_loss, text (its fingerprint), seconds, finished (a date), hardware and
    versions.
    """
    found = {}
    for kind in ORDER:
        path = FOLDER / kind / "training.json"
        if path.exists():
            found[PREFIX + kind] = json.loads(path.read_text(encoding="utf-8"))
    return found


def locate(name: str) -> Path:
    """Folder of a model.

    Raises:
        UsageError: the zoo has no such model.
    """
    if name not in shipped():
        known = ", ".join(shipped()) or "no model in this installation"
        raise UsageError(f"there is no {name!r} in the zoo; it has {known}")
    return FOLDER / name.removeprefix(PREFIX)
