"""GPTQ: integer weights whose rounding is chosen by calibration, through optimum and gptqmodel."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import torch

from quantdiff.errors import require
from quantdiff.export.copies import (
    SNIPPET,
    check_linears,
    copy_of,
    group_size,
    needs,
    no_options,
    quantized_linears,
    transformers_load,
)
from quantdiff.export.formats import Format, Options
from quantdiff.files import write_json
from quantdiff.models.checks import library_errors
from quantdiff.models.quiet import quiet_libraries

__all__ = ["FORMATS"]

_BITS = {"gptq-4bit": 4, "gptq-8bit": 8}


def _check(name: str, options: Options, _: torch.device) -> None:
    no_options(name, options)
    require("gptqmodel", extra="gptq", purpose=f"write or load {name}")
    needs(name, "accelerate")


def _quantize(bits: int, model: Any, options: Options) -> Any:
    from optimum.gptq import GPTQQuantizer
    from optimum.gptq.utils import get_block_name_with_pattern

    check_linears("GPTQ", model)
    copy = copy_of(model)
    block = get_block_name_with_pattern(copy)
    inside = [n.removeprefix(f"{block}.0.") for n in quantized_linears(copy) if f"{block}.0." in n]
    group = group_size(copy)
    quantizer = GPTQQuantizer(
        bits=bits,
        dataset=[
            {"input_ids": [window.tolist()], "attention_mask": [[1] * len(window)]}
            for window in options.windows
        ],
        group_size=group or -1,
        act_group_aware=group is not None,
        modules_in_block_to_quantize=[inside],
        model_seqlen=max(len(window) for window in options.windows),
    )
    with quiet_libraries(), library_errors("gptqmodel cannot quantize this model"):
        copy = quantizer.quantize_model(copy)
    quantizer.dataset = None  # token ids, which have no place in config.json
    copy.gptq_quantizer = quantizer
    return copy


def _save(model: Any, folder: Path, max_shard_size: str | int) -> None:
    quantizer = model.__dict__.pop("gptq_quantizer")
    quantizer.save(model, folder, max_shard_size=max_shard_size)
    # It writes the weights in the format's first version, which all kernels read; the config saved
    # with them and the model in memory are still those of the second.
    settings = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    settings["quantization_config"] = quantizer.to_dict()
    write_json(folder / "config.json", settings)
    quantizer.post_init_model(model)


FORMATS = {
    name: Format(
        name=name,
        title=f"{bits}-bit GPTQ weights",
        packages=("gptqmodel", "optimum", "accelerate"),
        readers="transformers with gptqmodel, and vLLM",
        snippet=SNIPPET,
        check=partial(_check, name),
        quantize=partial(_quantize, bits),
        save=_save,
        load=transformers_load,
        calibrated=True,
        grouped=True,
    )
    for name, bits in _BITS.items()
}
