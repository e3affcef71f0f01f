"""The files of a converted model folder: weights, config, tokenizer, model card."""

import json
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from quantdiff.errors import UsageError
from quantdiff.models.checkpoint import INDEX, WEIGHTS
from quantdiff.models.checks import BUFFERS, NOT_WEIGHTS, PICKLES, library_errors

__all__ = [
    "CARD",
    "KEPT_CARD",
    "OWNED",
    "TOKENIZER",
    "copy_companions",
    "dtype_name",
    "find_weights",
    "read_settings",
    "readable",
    "same_bits",
    "tensors",
    "write_weights",
]

# Files that make a model usable, besides config and weights. Code is not among them: the source's
# is the code of another kind of model.
TOKENIZER = (
    "tokenizer*.json", "*.model", "*.tiktoken", "vocab.*", "merges.txt", "spiece.*", "tekken.json",
    "special_tokens_map.json", "added_tokens.json", "chat_template*.jinja", "chat_template*.json",
    "additional_chat_templates/*.jinja", "generation_config.json",
)  # fmt: skip
COMPANIONS = (*TOKENIZER, "LICENSE*", "NOTICE*")
CARD, KEPT_CARD = "README.md", "README.source.md"

_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}

# All files that a conversion may write, which a later one with overwrite=True removes first.
OWNED = (*COMPANIONS, CARD, KEPT_CARD, "*.safetensors", INDEX, "*_diff_v2.py")


def read_settings(folder: Path) -> dict[str, Any]:
    """The entries of `config.json`.

    Raises:
        UsageError: there is none, it is not a JSON object, or the weights are quantized.
    """
    path = folder / "config.json"
    if not path.is_file():
        raise UsageError(
            f"{folder} has no config.json: write one with Llama's entries (hidden_size, "
            "num_hidden_layers, vocab_size, rms_norm_eps, rope_theta, …)"
        )
    try:
        settings = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UsageError(f"config.json of {folder} is not JSON ({error})") from None
    if not isinstance(settings, dict):
        raise UsageError(f"config.json of {folder} is no JSON object")
    if settings.get("quantization_config"):
        raise UsageError(
            f"{folder} is quantized (quantization_config in config.json): convert the weights that "
            "it was made from"
        )
    return settings


def find_weights(folder: Path) -> tuple[list[Path], set[str]]:
    """The safetensors files of a folder, and the parameters that an index lists.

    Raises:
        UsageError: there are none, only pickles, or several without an index.
    """
    files = sorted(path.name for path in folder.iterdir() if path.is_file())
    single = [name for name in files if name.endswith(".safetensors")]
    indices = [name for name in files if name.endswith(".safetensors.index.json")]
    if WEIGHTS in single:
        return [folder / WEIGHTS], set()
    if len(indices) == 1:
        shards = _index(folder / indices[0])
        return [folder / name for name in sorted(set(shards.values()))], set(shards)
    if len(single) == 1 and not indices:
        return [folder / single[0]], set()
    if single or indices:
        raise UsageError(
            f"{folder} has {len(single)} safetensors files and {len(indices)} indices: there has "
            f"to be one {INDEX} that lists the shards, or one file {WEIGHTS}"
        )
    pickles = [n for n in files if n.endswith(PICKLES) and not n.startswith(NOT_WEIGHTS)]
    if pickles:
        raise UsageError(
            f"{folder} has its weights in {pickles[0]} only; a pickle can run any code and is "
            "refused: in an environment you trust, load it with torch.load(…, weights_only=True) "
            f"and write {WEIGHTS} with safetensors.torch.save_file"
        )
    raise UsageError(f"{folder} has no weights: neither {WEIGHTS} nor {INDEX} is there")


def _index(path: Path) -> dict[str, str]:
    try:
        return dict(json.loads(path.read_text(encoding="utf-8"))["weight_map"])
    except (ValueError, KeyError, TypeError) as error:
        raise UsageError(f"{path} is broken: copy the folder again") from error


def tensors(folder: Path) -> Iterator[tuple[str, Tensor]]:
    """Name and value of every parameter, shard by shard.

    Raises:
        UsageError: a file is missing or damaged, or lacks what the index lists, or a parameter is
            not a float of at least 16 bits; and what `find_weights` raises.
    """
    paths, listed = find_weights(folder)
    for path in paths:
        if not path.is_file():
            raise UsageError(f"{folder} lacks {path.name}, which its index lists: copy it again")
        with (
            library_errors(f"{path} is truncated or not a safetensors file; copy it again"),
            safe_open(path, framework="pt") as file,
        ):
            for name in file.keys():  # noqa: SIM118  (it is not a dict)
                listed.discard(name)
                if name.endswith(BUFFERS):
                    continue
                value = file.get_tensor(name)
                if not value.is_floating_point() or value.element_size() < 2:
                    raise UsageError(
                        f"{name} of {folder} is {value.dtype}: weights that are quantized cannot "
                        "be converted"
                    )
                yield name, value
    if listed:
        raise UsageError(f"{folder} lacks {min(listed)}, which its index lists: copy it again")


def write_weights(state: Mapping[str, Tensor], folder: Path) -> None:
    """Write safetensors under Hugging Face's names, large ones in shards with an index."""
    from huggingface_hub import save_torch_state_dict

    save_torch_state_dict(dict(state), folder, metadata={"format": "pt"})


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors are equal bit by bit, NaN and signed zeros included."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    a, b = (t.detach().reshape(-1).contiguous().view(_BITS[t.element_size()]) for t in (a, b))
    return bool((a == b).all())


def dtype_name(value: Tensor) -> str:
    """Short name of the dtype, for example `bfloat16`."""
    return str(value.dtype).removeprefix("torch.")


def readable(folder: Path) -> None:
    """Give the weights the config's permissions: safetensors lets only the owner read them."""
    mode = (folder / "config.json").stat().st_mode
    for path in folder.glob("*.safetensors"):
        path.chmod(mode)


def copy_companions(source: Path, target: Path) -> None:
    """Copy tokenizer, generation config, chat templates and licence; a card under another name."""
    for pattern in COMPANIONS:
        for path in source.glob(pattern):
            if path.is_file():
                copy = target / path.relative_to(source)
                copy.parent.mkdir(exist_ok=True)
                shutil.copyfile(path, copy)
    if (source / CARD).is_file():
        shutil.copyfile(source / CARD, target / KEPT_CARD)
