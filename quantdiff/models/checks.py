"""Refusals before and after the weights are read: wrong kind of model, unsafe or unfit weights."""

import json
import struct
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError, safe_open
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_MASKED_LM_MAPPING,
    MODEL_MAPPING,
)

from quantdiff.errors import UsageError
from quantdiff.models.checkpoint import INDEX, WEIGHTS, Checkpoint

__all__ = [
    "check_architecture",
    "check_causal",
    "check_keys",
    "check_weight_files",
    "library_errors",
]

PICKLES = (".bin", ".pt", ".pth", ".ckpt")
# Pickles that a trainer leaves next to the weights and that hold no weights.
NOT_WEIGHTS = ("training_args", "optimizer", "scheduler", "rng_state", "scaler")

# Buffers that old checkpoints still hold and that models now compute themselves; transformers
# knows most of them, per class.
BUFFERS = (".masked_bias", ".inv_freq")

# What transformers and safetensors raise for a bad checkpoint, and for a bad request.
LIBRARY_ERRORS = (
    OSError,
    ValueError,
    RuntimeError,
    ImportError,
    KeyError,
    SafetensorError,
    StrictDataclassError,  # a config entry of the wrong type
    IndexError,  # a truncated GGUF header, like the next
    struct.error,
)


@contextmanager
def library_errors(sentence: str) -> Iterator[None]:
    """Turn the libraries' errors into a `UsageError` that starts with `sentence`."""
    try:
        yield
    except UsageError:
        raise
    except torch.OutOfMemoryError as error:
        raise UsageError(f"{sentence}: it does not fit into the memory of the GPU") from error
    except LIBRARY_ERRORS as error:
        raise UsageError(f"{sentence}: {first_sentences(error)}") from error


def first_sentences(error: Exception, limit: int = 300) -> str:
    """The message of an error on one line, cut at the end of a sentence before `limit`."""
    text = " ".join(str(error).split()) or type(error).__name__
    if len(text) <= limit:
        return text
    cut = text.rfind(". ", 0, limit)
    return text[: cut + 1] if cut > 0 else text[:limit] + "…"


def check_architecture(name: str, settings: dict[str, Any], trust_remote_code: bool) -> None:
    """Refuse, from the raw `config.json`, a model whose code is missing or not trusted.

    Raises:
        UsageError: the code lies in the checkpoint and is not trusted, or transformers does not
            know the architecture.
    """
    family = settings.get("model_type")
    if family in CONFIG_MAPPING and CONFIG_MAPPING[family] in MODEL_FOR_CAUSAL_LM_MAPPING:
        return  # transformers' own code is used, even where the checkpoint brings some
    if settings.get("auto_map"):
        if trust_remote_code:
            return
        raise UsageError(
            f"{name!r} brings its own modelling code: read it, and if you trust it pass "
            f"--trust-remote-code (trust_remote_code=True in Python)"
        )
    if family not in CONFIG_MAPPING:
        raise UsageError(
            f"{name!r} has the architecture {family!r}, which transformers "
            f"{transformers.__version__} does not know: check config.json, or install a newer "
            f"transformers"
        )


def check_causal(name: str, config: Any) -> None:
    """Refuse everything but a causal language model.

    Loading would succeed for some others: transformers turns a BERT, say, into a left-to-right
    model with a random head, with no more than a warning.

    Raises:
        UsageError: another kind of model; the message names it.
    """
    classes: list[str] = config.architectures or []
    what = f"{name!r} is a {' / '.join(classes) or 'model'} ({config.model_type})"
    remedy = "quantdiff measures causal language models"
    if config.is_encoder_decoder:
        raise UsageError(f"{what}, an encoder-decoder model: {remedy}")
    if "AutoModelForCausalLM" in (getattr(config, "auto_map", None) or {}):
        return
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise UsageError(f"{what}, not a causal language model: {remedy}")
    decodes = getattr(config, "is_decoder", False) or getattr(config, "causal", False)
    if type(config) in MODEL_FOR_MASKED_LM_MAPPING and not decodes:
        raise UsageError(f"{what}, an encoder that attends in both directions: {remedy}")
    # A bare base model is accepted: with tied embeddings it is complete, and without them the
    # missing head is reported when the weights are read.
    good = {MODEL_FOR_CAUSAL_LM_MAPPING[type(config)].__name__}
    if type(config) in MODEL_MAPPING:
        good.add(getattr(MODEL_MAPPING[type(config)], "__name__", ""))
    if classes and not any(
        entry in good or entry.endswith(("ForCausalLM", "LMHeadModel")) for entry in classes
    ):
        raise UsageError(f"{what}, not a causal language model: {remedy}")


def check_weight_files(checkpoint: Checkpoint, config: Any) -> None:
    """Refuse pickled, absent, truncated or corrupt weights before transformers reads any.

    Raises:
        UsageError: naming the file and the remedy.
    """
    name, files = checkpoint.name, checkpoint.files
    chosen = getattr(config, "transformers_weights", None)  # a config may name its own file
    entry = next((file for file in (chosen, WEIGHTS, INDEX) if file in files), None)
    if entry is None:
        raise UsageError(_no_weights(name, files))
    if not checkpoint.on_disk:
        return
    folder = Path(checkpoint.location)
    shards = [entry]
    if entry.endswith(".json"):
        try:
            shards = sorted(set(json.loads((folder / entry).read_text())["weight_map"].values()))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise UsageError(f"{name!r} has a broken {entry}: copy the folder again") from error
    for shard in shards:
        if not (folder / shard).is_file():
            raise UsageError(f"{name!r} lacks {shard}, which {entry} lists: copy the folder again")
        try:
            # Reads the header only, and compares it with the length of the file.
            with safe_open(folder / shard, framework="pt"):
                pass
        except SafetensorError as error:
            raise UsageError(
                f"{shard} of {name!r} is truncated or not a safetensors file ({error}): copy or "
                f"download it again (a Git LFS pointer becomes the file with `git lfs pull`)"
            ) from error


def _no_weights(name: str, files: Collection[str]) -> str:
    pickles = sorted(
        (file for file in files if file.endswith(PICKLES) and not file.startswith(NOT_WEIGHTS)),
        key=lambda file: (not file.startswith("pytorch_model"), file),
    )
    if pickles:
        return (
            f"{name!r} has its weights in {pickles[0]} only; a pickle can run any code and is "
            f"refused: in an environment you trust, load it once with transformers and "
            f"save_pretrained it, which writes {WEIGHTS}"
        )
    if "adapter_config.json" in files:
        return f"{name!r} holds an adapter, not a model: merge it into its base model and save that"
    packed = next((file for file in files if file.endswith(".gguf")), None)
    if packed is not None:
        return f"{name!r} has no {WEIGHTS}, but {packed}: give the path of that file"
    return f"{name!r} has no weights: neither {WEIGHTS} nor {INDEX} is there"


def check_keys(name: str, report: dict[str, Any]) -> None:
    """Refuse a checkpoint that does not fit its model: transformers would fill in random weights.

    Args:
        name: as the user wrote it.
        report: the loading info of `from_pretrained`; weights that are tied to others, and names
            the model class declares ignorable, are not in it.

    Raises:
        UsageError: naming the first keys.
    """
    misfits = {
        "missing": sorted(report["missing_keys"]),
        "unexpected": sorted(key for key in report["unexpected_keys"] if not key.endswith(BUFFERS)),
        "of another shape": sorted(
            f"{key} {tuple(stored)} for {tuple(wanted)}"
            for key, stored, wanted in report["mismatched_keys"]
        ),
    }
    for kind, keys in misfits.items():
        if keys:
            more = f" and {len(keys) - 3} more" if len(keys) > 3 else ""
            raise UsageError(
                f"the weights of {name!r} do not fit its config: {kind}: {', '.join(keys[:3])}"
                f"{more}; check config.json against the weights"
            )
