"""The registry of checkpoint formats, and what a format is."""

import importlib
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any, Protocol

import torch

from quantdiff.errors import UsageError

__all__ = ["FORMATS", "Format", "Loader", "Options", "Saver", "find_format", "package_versions"]

# Name -> module with `FORMATS`, a dictionary that holds the `Format` of that name.
FORMATS = {
    "bf16": "quantdiff.export.plain",
    "fp16": "quantdiff.export.plain",
    "bnb-int8": "quantdiff.export.bnb",
    "bnb-nf4": "quantdiff.export.bnb",
    "bnb-fp4": "quantdiff.export.bnb",
    "quanto-int8": "quantdiff.export.quanto",
    "quanto-int4": "quantdiff.export.quanto",
    "quanto-int2": "quantdiff.export.quanto",
    "quanto-fp8": "quantdiff.export.quanto",
    "ct-w8a16": "quantdiff.export.compressed",
    "ct-w4a16": "quantdiff.export.compressed",
    "ct-w8a8": "quantdiff.export.compressed",
    "gptq-8bit": "quantdiff.export.gptq",
    "gptq-4bit": "quantdiff.export.gptq",
}


@dataclass(frozen=True)
class Options:
    """What a user may choose besides the format.

    Attributes:
        double_quant: quantize the scales too; bitsandbytes' 4-bit formats.
        windows: token ids to calibrate on, (n,) int64 each; for calibrated formats.
    """

    double_quant: bool = False
    windows: tuple[torch.Tensor, ...] = field(default=(), repr=False)


class Saver(Protocol):
    """Writes a quantized model's config and weights, as safetensors, into a folder."""

    def __call__(self, model: Any, folder: Path, max_shard_size: str | int) -> None:
        """Write them."""


class Loader(Protocol):
    """Opens a folder as someone who has never heard of quantdiff would."""

    def __call__(
        self, folder: Path, device: torch.device, dtype: torch.dtype, trust_remote_code: bool
    ) -> Any:
        """Load the model in eval mode, in `dtype` where the format leaves a choice."""


@dataclass(frozen=True)
class Format:
    """A checkpoint format.

    Attributes:
        name: for example `bnb-nf4`.
        title: what the weights are, worded to follow "with".
        packages: distributions whose versions are recorded.
        readers: what can load it, in words.
        snippet: Python code that loads `{folder}` without quantdiff.
        check: refuses what cannot work here before any work is done (UsageError,
            MissingExtraError), given the options and the model's device; the windows may not be
            there yet.
        quantize: makes a quantized copy of a model, which itself is left as it is.
        save: writes the copy, before it has computed anything.
        load: the format's own loader.
        calibrated: whether it needs windows of text.
        grouped: whether weights share scales in groups of `copies.group_size`.
        rounds_activations: whether its own loader rounds activations to few bits.
    """

    name: str
    title: str
    packages: tuple[str, ...]
    readers: str
    snippet: str
    check: Callable[[Options, torch.device], None]
    quantize: Callable[[Any, Options], Any]
    save: Saver
    load: Loader
    calibrated: bool = False
    grouped: bool = False
    rounds_activations: bool = False


def find_format(name: str) -> Format:
    """The format of the given name.

    Raises:
        UsageError: there is none.
    """
    if name not in FORMATS:
        raise UsageError(f"the format {name!r} is unknown; known: {', '.join(FORMATS)}")
    found: Format = importlib.import_module(FORMATS[name]).FORMATS[name]
    return found


def package_versions(chosen: Format) -> dict[str, str]:
    """Versions of the packages that a format needs, by name."""
    return {name: metadata.version(name) for name in chosen.packages}
