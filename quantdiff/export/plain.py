"""16-bit weights, not quantized: for schemes that quantize only activations."""

from functools import partial
from typing import Any

import torch

from quantdiff.errors import UsageError
from quantdiff.export.copies import SNIPPET, copy_of, no_options, save_model, transformers_load
from quantdiff.export.formats import Format, Options

__all__ = ["FORMATS"]

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def _check(name: str, options: Options, _: torch.device) -> None:
    no_options(name, options)


def _quantize(name: str, model: Any, _: Options) -> Any:
    dtype = _DTYPES[name]
    limit = torch.finfo(dtype).max
    for parameter, value in model.named_parameters():
        if not bool(value.detach().abs().amax() <= limit):  # NaN too
            raise UsageError(
                f"{parameter} of this model has values beyond {name}, or none: export it as "
                f"{'bf16' if name == 'fp16' else 'another format'}"
            )
    return copy_of(model, dtype)


FORMATS = {
    name: Format(
        name=name,
        title=f"{'bfloat16' if name == 'bf16' else 'float16'} weights",
        packages=(),
        readers="transformers, vLLM and everything else that reads safetensors",
        snippet=SNIPPET,
        check=partial(_check, name),
        quantize=partial(_quantize, name),
        save=save_model,
        load=transformers_load,
    )
    for name in _DTYPES
}
