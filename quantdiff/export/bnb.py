"""bitsandbytes: LLM.int8() and the 4-bit types NF4 and FP4."""

from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import BitsAndBytesConfig

from quantdiff.export.copies import (
    SNIPPET,
    copy_of,
    kept_modules,
    needs,
    no_options,
    save_model,
    transformers_load,
)
from quantdiff.export.formats import Format, Options

__all__ = ["FORMATS"]

_TITLES = {
    "bnb-int8": "8-bit weights of bitsandbytes (LLM.int8())",
    "bnb-nf4": "4-bit NormalFloat weights of bitsandbytes",
    "bnb-fp4": "4-bit floating-point weights of bitsandbytes",
}

_READERS = "transformers with bitsandbytes"
_CPUS = (
    "On CPUs with AVX-512, bitsandbytes itself computes 4-bit weights wrongly where rows are no "
    "multiple of 64; quantdiff.load does not"
)


def _check(name: str, options: Options, _: torch.device) -> None:
    if name == "bnb-int8":
        no_options(name, options)
    needs(name, "bitsandbytes")
    needs(name, "accelerate")


def _quantize(name: str, model: Any, options: Options) -> Any:
    # One list for both widths, despite its name.
    kept = {"llm_int8_skip_modules": kept_modules(model)}
    if name == "bnb-int8":
        config = BitsAndBytesConfig(load_in_8bit=True, **kept)
    else:
        config = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type=name.removeprefix("bnb-"),
            bnb_4bit_use_double_quant=options.double_quant,
            bnb_4bit_compute_dtype=model.dtype,
            **kept,
        )
    copy = copy_of(model, quantization_config=config, device_map={"": model.device})
    _compute_as_stored(copy)
    return copy


def _load(folder: Path, device: torch.device, dtype: torch.dtype, trust_remote_code: bool) -> Any:
    model = transformers_load(folder, device, dtype, trust_remote_code)
    _compute_as_stored(model)
    return model


def _compute_as_stored(model: Any) -> None:
    from quantdiff.models.bnb import compute_as_stored  # an import of seconds

    compute_as_stored(model)


FORMATS = {
    name: Format(
        name=name,
        title=title,
        packages=("bitsandbytes", "accelerate"),
        readers=_READERS if name == "bnb-int8" else f"{_READERS}, and vLLM. {_CPUS}",
        snippet=SNIPPET,
        check=partial(_check, name),
        quantize=partial(_quantize, name),
        save=save_model,
        load=_load,
        rounds_activations=name == "bnb-int8",
    )
    for name, title in _TITLES.items()
}
