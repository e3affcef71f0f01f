"""Reading GGUF files through transformers, as ordinary models that can be saved again."""

from typing import Any

import transformers

from quantdiff.errors import require

__all__ = ["dequantizing_arguments", "forget_gguf", "require_gguf"]


def require_gguf() -> None:
    """Check that GGUF files can be read.

    Raises:
        MissingExtraError: gguf or accelerate is not installed.
    """
    for module in ("gguf", "accelerate"):
        require(module, extra="smollm2", purpose="read a .gguf file")


def dequantizing_arguments() -> dict[str, Any]:
    """Keywords for `from_pretrained` that request plain weights in every case.

    Where its kernels are installed, transformers would otherwise keep the blocks packed, and
    attention would run in a kernel that no hook can see into.
    """
    # Releases without the packed path always unpack, and have no such class.
    config_class = getattr(transformers, "GgufConfig", None)
    return {} if config_class is None else {"quantization_config": config_class(dequantize=True)}


def forget_gguf(model: Any) -> None:
    """Remove the quantizer from a model whose weights are already plain.

    transformers leaves traces of the GGUF file on it, and so refuses `save_pretrained`.
    """
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.hf_quantizer = None
    model.is_quantized = False
    if hasattr(model, "quantization_method"):
        del model.quantization_method
