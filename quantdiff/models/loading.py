"""Opening a model and its tokenizer by any kind of name."""

import importlib
import importlib.util
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedConfig

from quantdiff.errors import UsageError
from quantdiff.models.checkpoint import Checkpoint
from quantdiff.models.checks import (
    check_architecture,
    check_causal,
    check_keys,
    check_weight_files,
    first_sentences,
    library_errors,
)
from quantdiff.models.description import remember_name
from quantdiff.models.gguf import dequantizing_arguments, forget_gguf, require_gguf
from quantdiff.models.options import (
    check_attention,
    check_flash_dtype,
    resolve_device,
    resolve_dtype,
)
from quantdiff.models.quiet import quiet_libraries
from quantdiff.models.schemes import tell_schemes
from quantdiff.models.sources import ARCHITECTURES, FORMATS, locate

__all__ = ["load"]

# Any of these means that a tokenizer was saved; transformers decides whether it is complete.
VOCABULARIES = ("tokenizer", "vocab", "merges", "spiece", "sentencepiece", "tekken", "spm")


def load(
    name: str | Path | Checkpoint,
    *,
    dtype: str | torch.dtype | None = None,
    device: str | torch.device | None = None,
    attention: str | None = None,
    trust_remote_code: bool = False,
    revision: str | None = None,
) -> tuple[Any, Any]:
    """Open a causal language model and its tokenizer.

    Args:
        name: a registered name (`known_names()`), a folder, a `.gguf` file or a hub id; or a
            checkpoint already located.
        dtype: "float32", "bfloat16", "float16", "float64", a torch dtype, or "auto" for the
            checkpoint's own; by default "auto" on a GPU and float32 on a CPU.
        device: "cpu", "cuda", "cuda:N"; by default CUDA if available.
        attention: "eager", "sdpa", "flex_attention", "flash_attention_2", "…_3", "…_4"; by
            default the model's own choice.
        trust_remote_code: run modelling code that the checkpoint brings.
        revision: branch, tag or commit of a hub id.

    Returns:
        The model, in eval mode on `device`, and the tokenizer. Weights come from safetensors or
        GGUF, never from pickles; those of a GGUF file are unpacked, so that the model can be
        saved like any other. An exported folder is opened without its schemes, which a
        `SchemesLeftOutWarning` names.

    Raises:
        UsageError: the request cannot be met; the message names the problem and the remedy.
        MissingExtraError: a required package is not installed.
    """
    target = resolve_device(device)
    precision = resolve_dtype(dtype, target)
    check_attention(attention, target)
    check_flash_dtype(attention, precision)
    checkpoint = name if isinstance(name, Checkpoint) else locate(name, revision)
    tell_schemes(checkpoint)
    with quiet_libraries(bars=True):
        config = _open_config(checkpoint, trust_remote_code)
        if precision == "auto":
            check_flash_dtype(attention, config.dtype)
        tokenizer = _open_tokenizer(checkpoint, trust_remote_code)
        model = _open_model(checkpoint, config, precision, target, attention, trust_remote_code)
    remember_name(model, checkpoint.name)
    return model, tokenizer


def _open_config(checkpoint: Checkpoint, trust_remote_code: bool) -> Any:
    name = checkpoint.name
    failure = f"the config of {name!r} cannot be read"
    if checkpoint.gguf is not None:
        require_gguf()
        failure = f"{name!r} cannot be read as GGUF (is it complete?)"
    elif "config.json" not in checkpoint.files:
        raise UsageError(
            f"{name!r} has no config.json: a model folder is what save_pretrained writes"
        )
    with library_errors(failure):
        if checkpoint.gguf is None:
            settings, _ = PreTrainedConfig.get_config_dict(
                checkpoint.location, **checkpoint.arguments
            )
            family = settings.get("model_type")
            if family in ARCHITECTURES:
                importlib.import_module(ARCHITECTURES[family])
            check_architecture(name, settings, trust_remote_code)
        config = AutoConfig.from_pretrained(
            checkpoint.location, trust_remote_code=trust_remote_code, **checkpoint.arguments
        )
    check_causal(name, config)
    if checkpoint.gguf is None and _format_module(checkpoint) is None:
        check_weight_files(checkpoint, config)
    return config


def _format_module(checkpoint: Checkpoint) -> str | None:
    """Module that opens the checkpoint if transformers cannot read its weights, else None."""
    return next((FORMATS[marker] for marker in FORMATS if marker in checkpoint.files), None)


def _open_tokenizer(checkpoint: Checkpoint, trust_remote_code: bool) -> Any:
    present = [
        file
        for file in checkpoint.files
        if file.startswith(VOCABULARIES) or file.endswith((".tiktoken", ".model"))
    ]
    if checkpoint.gguf is None and not present:
        raise UsageError(
            f"{checkpoint.name!r} has no tokenizer (no tokenizer.json, tokenizer.model or "
            f"vocabulary): save the one it was trained with into the same place"
        )
    try:
        return AutoTokenizer.from_pretrained(
            checkpoint.location, trust_remote_code=trust_remote_code, **checkpoint.arguments
        )
    # Broad, because the Rust tokenizers raise bare Exceptions for a broken file.
    except Exception as error:
        raise UsageError(
            f"the tokenizer of {checkpoint.name!r} cannot be built from "
            f"{checkpoint.gguf or ', '.join(present)}: {first_sentences(error)}"
        ) from error


def _open_model(
    checkpoint: Checkpoint,
    config: Any,
    dtype: torch.dtype | str,
    device: torch.device,
    attention: str | None,
    trust_remote_code: bool,
) -> Any:
    module = _format_module(checkpoint)
    if module is not None:
        opener = importlib.import_module(module).open_model
        return opener(checkpoint, config, dtype, device, attention).eval()
    arguments: dict[str, Any] = {
        "config": config,
        "dtype": dtype,
        "trust_remote_code": trust_remote_code,
        "output_loading_info": True,
        "ignore_mismatched_sizes": True,  # check_keys refuses them, with names
        **checkpoint.arguments,
    }
    if checkpoint.gguf is None:
        arguments["use_safetensors"] = True
    else:
        arguments |= dequantizing_arguments()
    chosen = ""
    if attention is not None:
        arguments["attn_implementation"] = attention
        chosen = f" with attention {attention!r}"
    # Straight onto the GPU where accelerate allows it, without a copy in host memory.
    if device.type != "cpu" and importlib.util.find_spec("accelerate") is not None:
        arguments["device_map"] = {"": device}
    with library_errors(f"{checkpoint.name!r} cannot be loaded{chosen}"):
        model, report = AutoModelForCausalLM.from_pretrained(checkpoint.location, **arguments)
        check_keys(checkpoint.name, report)
        if checkpoint.gguf is not None:
            forget_gguf(model)
        if getattr(model, "quantization_method", None) == "bitsandbytes":
            from quantdiff.models.bnb import compute_as_stored

            compute_as_stored(model)
        if model.device != device:
            model.to(device)
    return model.eval()
