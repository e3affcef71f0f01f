"""What the result of a cell depends on, as a hash."""

import contextlib
import functools
import hashlib
import json
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path, PurePath
from typing import Any

import torch
from torch import Tensor, nn

from quantdiff.analysis.sweep.own_code import own_code, quantizer_versions
from quantdiff.calibration.table import CalibrationTable
from quantdiff.quantization.scheme import Scheme
from quantdiff.statistics.arrays import to_arrays
from quantdiff.versions import versions

__all__ = [
    "cell_id",
    "deciding_versions",
    "model_fingerprint",
    "table_fingerprint",
    "without_folders",
]

_LENGTH = 20  # hex digits of a cell's id: no two of 10⁹ cells share one

# Entries of a config about where a model comes from, how it was saved or what it may be used for;
# what it computes with is in the tensors, the class and the other entries.
_UNIMPORTANT = {
    "_name_or_path", "name_or_path", "_commit_hash", "transformers_version", "auto_map",
    "architectures", "dtype", "torch_dtype", "use_cache", "_attn_implementation",
    "_attn_implementation_internal", "_attn_implementation_autoset",
}  # fmt: skip
_PLACES = {"name_or_path", "is_local", "local_files_only"}  # a tokenizer's locations, besides files


def cell_id(
    *,
    model: str,
    device: str,
    evaluation: str,
    data: str,
    settings: Mapping[str, Any],
    schemes: Sequence[Scheme],
    calibration: str | None,
    remedy: tuple[str, str | None] | None = None,
) -> str:
    """The id of a cell: equal if and only if everything that the result depends on is equal.

    The exception is what changes only its last digits, such as processor, threads and batches: that
    is recorded separately (`conditions`).

    Args:
        model: fingerprint.
        device: its type; a GPU sums in a different order than a CPU.
        evaluation: its name; the folder of its file does not matter.
        data, settings: of the evaluation.
        schemes: empty for the unquantized model; their order does not matter.
        calibration: fingerprint of what a static range comes from.
        remedy: its name, and the fingerprint of the text that it sees, if any; None for no remedy.
    """
    return _hash({
        "model": model,
        "device": device,
        "evaluation": without_folders(evaluation),
        "data": data,
        "settings": settings,
        "schemes": sorted(map(_told, schemes), key=lambda one: (one["site"], one["layers"] or ())),
        "calibration": calibration,
        "versions": deciding_versions(),
    } | ({} if remedy is None else {"remedy": remedy}))[:_LENGTH]  # fmt: skip


@functools.cache
def deciding_versions() -> dict[str, str]:
    """Versions of what computes every result; the others change no number or are in the data.

    Those of libraries that compute with a quantized checkpoint belong to the model.
    """
    known = versions()
    return {name: known[name] for name in ("quantdiff", "torch", "transformers")}


def model_fingerprint(model: nn.Module, tokenizer: Any) -> str:
    """SHA-256, as hex, over everything that a model computes with, and its tokenizer.

    That is its class, config, attention implementation and tensors, the code that is part of no
    installed library, and the version of the library that computes with a quantized checkpoint.
    Where it was loaded from and where it is held do not matter; its dtype does.
    """
    config = getattr(model, "config", None)
    about = {
        "class": type(model).__qualname__,
        "attention": getattr(config, "_attn_implementation", None),
        "config": None if config is None else _important(config.to_dict()),
    }
    # Entries that most models lack; their results from before these were added stay valid.
    beside = {
        "code": own_code([*model.modules(), tokenizer]),
        "quantizers": quantizer_versions(model),
        "buffers": _unsaved_buffers(model),
    }
    about |= {name: value for name, value in beside.items() if value}
    digest = hashlib.sha256(_json(about))
    digest.update(_json(_rules(tokenizer)))
    first: dict[tuple[int, torch.Size, Any], str] = {}  # where a tied tensor was hashed
    for name, value in sorted(model.state_dict().items()):
        if not isinstance(value, Tensor):
            digest.update(_json({"name": name, "value": value}))
            continue
        place = value.data_ptr(), value.shape, value.stride()
        tied = first.setdefault(place, name) if value.numel() else name
        told = {"name": name, "as": tied, "shape": list(value.shape), "dtype": str(value.dtype)}
        digest.update(_json(told))
        if tied == name:
            digest.update(_bytes(value))
    return digest.hexdigest()


def table_fingerprint(table: CalibrationTable) -> str:
    """SHA-256, as hex, over the statistics that a table takes its ranges from."""
    digest = hashlib.sha256()
    for kind, sites in (("", table.sites), *((k, part.sites) for k, part in table.more.items())):
        names = [[site.name, site.layer] for site in sites]
        digest.update(_json([kind, names] if kind else names))
        for name, array in sorted(to_arrays(sites).items()):
            digest.update(_json([name, list(array.shape), str(array.dtype)]))
            digest.update(array.tobytes())
    return digest.hexdigest()


def without_folders(evaluation: str) -> str:
    """An evaluation without the folders of its file."""
    kind, colon, argument = evaluation.partition(":")
    return f"{kind}{colon}{PurePath(argument).name}"


def _told(scheme: Scheme) -> dict[str, Any]:
    """A scheme without unset entries that were added later, so that earlier results stay valid."""
    left_out = (("heads", None), ("newest", 0))
    return {name: value for name, value in asdict(scheme).items() if (name, value) not in left_out}


def _unsaved_buffers(model: nn.Module) -> dict[str, str]:
    """Dtypes of floating-point buffers outside the state dict, except fp32, by name.

    A model that was loaded in bf16 has rotary frequencies in fp32, and one that was converted to
    bf16 has them rounded; otherwise the two are the same. What the buffers hold follows from the
    config.
    """
    kept = model.state_dict().keys()
    return {
        name: str(value.dtype)
        for name, value in model.named_buffers()
        if name not in kept and value.is_floating_point() and value.dtype != torch.float32
    }


def _rules(tokenizer: Any) -> Any:
    """The rules by which a tokenizer makes tokens."""
    about = [type(tokenizer).__qualname__, getattr(tokenizer, "special_tokens_map", None)]
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        vocabulary = tokenizer.get_vocab() if hasattr(tokenizer, "get_vocab") else None
        given = {
            name: value
            for name, value in getattr(tokenizer, "init_kwargs", {}).items()
            if name not in _PLACES and not name.endswith("_file")
        }
        return [*about, vocabulary, given, _vocabulary_files(tokenizer)]
    rules = json.loads(backend.to_str())
    # Padding and truncation are those of the last call; every call sets them anew.
    return [*about, {k: v for k, v in rules.items() if k not in ("padding", "truncation")}]


def _vocabulary_files(tokenizer: Any) -> dict[str, str]:
    """SHA-256 of a tokenizer's vocabulary files, the only place with merges and scores."""
    if not hasattr(tokenizer, "save_vocabulary"):
        return {}
    with tempfile.TemporaryDirectory() as folder:
        with contextlib.suppress(NotImplementedError):
            tokenizer.save_vocabulary(folder)
        files = Path(folder).iterdir()
        return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


def _bytes(value: Tensor) -> memoryview:
    flat = value.detach().cpu().contiguous().flatten()
    return memoryview(flat.view(torch.uint8).numpy())


def _important(config: Any) -> Any:
    if isinstance(config, dict):
        return {
            str(name): _important(value)
            for name, value in config.items()
            if name not in _UNIMPORTANT
        }
    return [_important(value) for value in config] if isinstance(config, list) else config


def _hash(content: Any) -> str:
    return hashlib.sha256(_json(content)).hexdigest()


def _json(content: Any) -> bytes:
    return json.dumps(content, sort_keys=True, default=str).encode()
