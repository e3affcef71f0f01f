"""The schemes of an exported folder, which are left out when only its weights are opened."""

import json
import warnings
from pathlib import Path

from quantdiff.errors import SchemesLeftOutWarning
from quantdiff.models.checkpoint import Checkpoint

__all__ = ["SIDECAR", "tell_schemes"]

SIDECAR = "quantdiff.json"  # of an exported folder


def tell_schemes(checkpoint: Checkpoint) -> None:
    """Warn the caller's caller about the schemes that a folder was exported with, if any."""
    if SIDECAR not in checkpoint.files:
        return
    try:
        path = Path(checkpoint.location) / SIDECAR
        if not checkpoint.on_disk:
            from quantdiff.models.hub import fetch

            path = fetch(checkpoint, SIDECAR)
        content = json.loads(path.read_text(encoding="utf-8"))
        told = [f"{scheme['site']} at {scheme['bits']} bits" for scheme in content["schemes"]]
    except (OSError, ValueError, KeyError, TypeError):  # the weights are whole without it
        return
    if told:
        warnings.warn(
            f"{checkpoint.name} is opened without the schemes that it was exported with "
            f"({', '.join(told)}): quantdiff.load gives the model with them",
            SchemesLeftOutWarning,
            stacklevel=3,
        )
