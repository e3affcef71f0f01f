"""Copies of a live model to quantize; the live model is never written to."""

import copy as copying
import importlib.util
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from quantdiff.errors import MissingExtraError, UsageError
from quantdiff.models.checks import check_keys, library_errors
from quantdiff.models.quiet import quiet_libraries

__all__ = [
    "SNIPPET",
    "check_exportable",
    "check_linears",
    "copy_of",
    "group_size",
    "kept_modules",
    "needs",
    "no_options",
    "quantized_linears",
    "quantized_share",
    "save_model",
    "transformers_load",
]

# Packages whose modules hold weights that are already quantized.
_QUANTIZERS = ("bitsandbytes", "optimum", "compressed_tensors", "gptqmodel", "auto_gptq", "torchao")

SNIPPET = """from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("{folder}", dtype="auto"{trust})
tokenizer = AutoTokenizer.from_pretrained("{folder}"{trust})"""

# Widest first, for fewer scales. vLLM's kernels support no others.
_GROUPS = (128, 64, 32)


def check_exportable(model: Any) -> None:
    """Refuse what cannot be written as a checkpoint.

    Raises:
        UsageError: it is not a causal transformers model, parameters are missing or on several
            devices, weights are already quantized, or embeddings contradict the config.
    """
    kind = type(model).__name__
    if not isinstance(model, PreTrainedModel):
        raise UsageError(
            f"{kind} is no transformers model: only those can be exported (merge an adapter into "
            "its base model first)"
        )
    if model.get_output_embeddings() is None:
        raise UsageError(f"{kind} has no language-model head: only causal models can be exported")
    for name, module in model.named_modules():
        packages = {kind.__module__.partition(".")[0] for kind in type(module).__mro__}
        if packages.intersection(_QUANTIZERS) or hasattr(module, "quantization_scheme"):
            raise UsageError(
                f"{name} of this model is quantized already ({type(module).__name__}): export the "
                "model that it was made from"
            )
    _check_ties(model)
    devices = set()
    for name, value in model.named_parameters():
        if value.device.type == "meta":
            raise UsageError(f"{name} of this model is not in memory: load it without offloading")
        if not value.is_floating_point() or value.element_size() < 2:
            raise UsageError(
                f"{name} of this model is {value.dtype}, quantized already: export the model that "
                "it was made from"
            )
        devices.add(value.device)
    if len(devices) > 1:
        raise UsageError(
            f"this model lies on {len(devices)} devices: load it onto one, with device='cpu'"
        )


def _check_ties(model: Any) -> None:
    """Refuse embeddings whose tying differs from the config, which is what loaders follow."""
    head, embedding = model.get_output_embeddings().weight, model.get_input_embeddings().weight
    said = bool(getattr(model.config.get_text_config(), "tie_word_embeddings", False))
    if said == (head is embedding) or (said and torch.equal(head, embedding)):
        return
    raise UsageError(
        f"the config of this model says tie_word_embeddings={said}, but its output embedding is "
        f"{'not its' if said else 'its'} input embedding: set it to {not said}"
    )


def copy_of(model: Any, dtype: torch.dtype | None = None, **options: Any) -> Any:
    """A model of the same class, config and weights, without anything done to the live one.

    Its attention implementation is the default, as from a loader. It is on the live model's
    device, and weights that need no change share memory with the live model's.

    Args:
        model: checked by `check_exportable`.
        dtype: of the copy; None for the model's.
        options: further keywords of `from_pretrained`, such as `quantization_config`.

    Raises:
        UsageError: transformers cannot build it.
    """
    # Through the dictionary, which omits what belongs only to the live model. A quantizer left in
    # the config of plain weights is that of the GGUF file they were unpacked from.
    settings = {k: v for k, v in model.config.to_dict().items() if k != "quantization_config"}
    if model.device.type != "cpu":
        # Otherwise transformers builds it on the CPU, and its logits may differ from a loader's.
        options = _placed(model.device) | options
    with quiet_libraries(), library_errors(f"{type(model).__name__} cannot be copied"):
        copy, report = type(model).from_pretrained(
            None,
            config=type(model.config).from_dict(settings),
            state_dict=model.state_dict(),
            dtype=dtype or model.dtype,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # check_keys refuses them, with names
            **options,
        )
        # Adapters and parametrizations, for example, have other names.
        check_keys(type(model).__name__, report)
    if copy.device != model.device:
        copy.to(model.device)
    copy.eval()
    if getattr(model, "generation_config", None) is not None:
        # Copied whole, so that it still counts as unchanged since loading: otherwise transformers
        # refuses to save what many published ones hold, such as a temperature that greedy
        # decoding does not use.
        copy.generation_config = copying.deepcopy(model.generation_config)
    return copy


def kept_modules(model: Any) -> list[str]:
    """Names of the linear modules that are not quantized.

    The output embedding, as in all of these formats, because it may be tied to the input's; and
    the projection of DIFF V2's λ, which is about 0.1 % of the weights and scales whole heads.
    """
    head = model.get_output_embeddings()
    return [
        name
        for name, module in model.named_modules()
        if module is head or name.rpartition(".")[2] == "lambda_proj"
    ]


def quantized_linears(model: Any) -> dict[str, nn.Linear]:
    """The linear modules that are quantized, by name."""
    kept = set(kept_modules(model))
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and name not in kept
    }


def check_linears(name: str, model: Any) -> None:
    """Refuse a model in which a format would quantize nothing.

    Raises:
        UsageError: there is no linear module.
    """
    if not quantized_linears(model):
        raise UsageError(
            f"{type(model).__name__} has no linear layers that {name} quantizes (its projections "
            "are modules of another kind): use a bnb format"
        )


def quantized_share(model: Any) -> float:
    """Share of the parameters in modules that the formats quantize, 0 to 1."""
    kept = set(kept_modules(model))
    inside = sum(
        module.weight.numel()
        for name, module in model.named_modules()
        if isinstance(module, (nn.Linear, Conv1D)) and name not in kept
    )
    return inside / sum(value.numel() for value in model.parameters())


def group_size(model: Any) -> int | None:
    """The largest group size that divides all rows to be quantized; None if there is none."""
    widths = {module.in_features for module in quantized_linears(model).values()}
    return next((size for size in _GROUPS if not any(width % size for width in widths)), None)


def needs(name: str, distribution: str) -> None:
    """Refuse a format whose package is not installed.

    Raises:
        MissingExtraError: names the command that installs it.
    """
    try:
        metadata.version(distribution)
    except metadata.PackageNotFoundError:
        raise MissingExtraError(
            f"{name} needs {distribution}, which is not installed: pip install {distribution}"
        ) from None


def no_options(name: str, options: Any) -> None:
    """Refuse options that a format does not have.

    Raises:
        UsageError: one was given.
    """
    if options.double_quant:
        raise UsageError(f"{name} has no double quantization: it is for bnb-nf4 and bnb-fp4")


def save_model(model: Any, folder: Path, max_shard_size: str | int) -> None:
    """Write a transformers model: config, generation config, weights and its own code."""
    model.save_pretrained(folder, max_shard_size=max_shard_size)


def transformers_load(
    folder: Path, device: torch.device, dtype: torch.dtype, trust_remote_code: bool
) -> Any:
    """Open a folder with transformers alone."""
    model = AutoModelForCausalLM.from_pretrained(
        folder,
        dtype=dtype,
        trust_remote_code=trust_remote_code,
        use_safetensors=True,
        **_placed(device),
    )
    if model.device != device:
        model.to(device)
    return model.eval()


def _placed(device: torch.device) -> dict[str, Any]:
    """Keywords of `from_pretrained` that build a model on a device, which needs accelerate."""
    if importlib.util.find_spec("accelerate") is None:
        return {}
    return {"device_map": {"": device}}
