"""Opening exported folders with the schemes of their sidecars, and any other model as it is."""

import os
import warnings
from pathlib import Path
from typing import Any

from quantdiff.errors import SchemesLeftOutWarning, UsageError
from quantdiff.models import load as load_model
from quantdiff.models.checkpoint import Checkpoint
from quantdiff.models.description import remember_name
from quantdiff.models.schemes import SIDECAR

__all__ = ["load", "restore"]


def load(name: str | Path, *, dtype: Any = None, **options: Any) -> tuple[Any, Any]:
    """Open a causal language model and its tokenizer.

    A model from a folder that `quantdiff.export` wrote computes with the schemes it was exported
    with: its attribute `fake_quantizer` is their context (`quantdiff.fake_quantize`), entered
    permanently, or None if there are no schemes. The hashes of weights, config and code are checked
    first; tokenizer and chat template may have been edited.

    Args:
        name: a registered name (`quantdiff.models.known_names()`), a folder, a `.gguf` file or a
            hub id.
        dtype: "float32", "bfloat16", "float16", "float64", a torch dtype, or "auto" for the
            checkpoint's own; by default "auto" on a GPU and float32 on a CPU, and for an exported
            folder the dtype in which it was measured.
        options: as in `quantdiff.models.load`: device, attention, trust_remote_code, revision.

    Returns:
        The model, in eval mode, and the tokenizer.

    Raises:
        UsageError: the request cannot be met, or the folder is not what was exported.
        MissingExtraError: a package that it needs is not installed.
    """
    from quantdiff.models.sources import locate

    checkpoint = locate(name, options.pop("revision", None))
    folder = _exported(checkpoint)
    if folder is None:
        return load_model(checkpoint, dtype=dtype, **options)
    from quantdiff.export.contents import check_files, pickles
    from quantdiff.export.sidecar import read_sidecar, reading

    sidecar = read_sidecar(folder)
    with reading(folder):
        wrong = check_files(folder, sidecar.content, computing_only=True)
        found = pickles(folder)
    if wrong:
        raise UsageError(f"{folder} is not what was exported: {wrong[0]}; export it again")
    if found:
        raise UsageError(f"{folder} holds a pickle, {found[0]}, which can run any code: remove it")
    if dtype is None:
        dtype = sidecar.content["export"]["dtype"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SchemesLeftOutWarning)
        # Opens exactly what was checked, even if the hub has moved on.
        model, tokenizer = load_model(folder, dtype=dtype, **options)
    remember_name(model, os.fspath(name))
    restore(model, sidecar)
    return model, tokenizer


def restore(model: Any, sidecar: Any) -> None:
    """Make a model compute with the schemes of a sidecar from now on.

    Args:
        model: as it was loaded from the sidecar's folder.
        sidecar: a `quantdiff.export.sidecar.Sidecar`.

    Raises:
        UsageError: the ranges are those of another model.
    """
    from quantdiff.quantization import fake_quantize

    model.fake_quantizer = None
    if sidecar.schemes:
        quantizer = fake_quantize(model, *sidecar.schemes, table=sidecar.table)
        quantizer.__enter__()
        model.fake_quantizer = quantizer


def _exported(checkpoint: Checkpoint) -> Path | None:
    """The folder, if it holds a sidecar; one on the hub is downloaded whole."""
    if checkpoint.gguf is not None or SIDECAR not in checkpoint.files:
        return None
    if checkpoint.on_disk:
        return Path(checkpoint.location)
    from quantdiff.models.hub import download

    return download(checkpoint)
