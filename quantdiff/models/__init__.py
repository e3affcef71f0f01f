"""Models: loading by name, description of a loaded model, conversion.

The names are imported on first use, so that importing this package does not import transformers.
"""

from typing import TYPE_CHECKING

from quantdiff.lazy import lazy_names

if TYPE_CHECKING:
    from quantdiff.models.conversion import convert_state
    from quantdiff.models.converting import convert_folder
    from quantdiff.models.description import context_length, describe, vocabulary_size
    from quantdiff.models.diff_v2 import DiffV2Config, DiffV2ForCausalLM
    from quantdiff.models.loading import load
    from quantdiff.models.sources import known_names

__all__ = [
    "DiffV2Config",
    "DiffV2ForCausalLM",
    "context_length",
    "convert_folder",
    "convert_state",
    "describe",
    "known_names",
    "load",
    "vocabulary_size",
]

# Public name -> module of this package that defines it.
_HOMES = {
    "DiffV2Config": "diff_v2",
    "DiffV2ForCausalLM": "diff_v2",
    "context_length": "description",
    "convert_folder": "converting",
    "convert_state": "conversion",
    "describe": "description",
    "known_names": "sources",
    "load": "loading",
    "vocabulary_size": "description",
}

__getattr__, __dir__ = lazy_names("quantdiff.models", _HOMES)
