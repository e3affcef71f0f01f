"""optimum-quanto: integer weights of 8, 4 and 2 bits, and 8-bit floating point."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import torch

from quantdiff.export.copies import (
    check_linears,
    copy_of,
    kept_modules,
    needs,
    no_options,
    save_model,
)
from quantdiff.export.formats import Format, Options
from quantdiff.models.quanto import MAP

__all__ = ["FORMATS"]

_TYPES = {
    "quanto-int8": ("qint8", "8-bit integer weights of optimum-quanto"),
    "quanto-int4": ("qint4", "4-bit integer weights of optimum-quanto"),
    "quanto-int2": ("qint2", "2-bit integer weights of optimum-quanto"),
    "quanto-fp8": ("qfloat8", "8-bit floating-point weights of optimum-quanto"),
}

SNIPPET = """from optimum.quanto import QuantizedModelForCausalLM
from transformers import AutoTokenizer
{register}
model = QuantizedModelForCausalLM.from_pretrained("{folder}")
tokenizer = AutoTokenizer.from_pretrained("{folder}"{trust})"""


def _check(name: str, options: Options, _: torch.device) -> None:
    no_options(name, options)
    needs(name, "optimum-quanto")
    needs(name, "accelerate")  # to load it again


def _optimizer(kind: str) -> Any:
    """quanto's own ranges, except scale 1 for a row of zeros: with 0, fp8 weights become NaN."""
    from optimum.quanto import AbsmaxOptimizer, MaxOptimizer

    class Absmax(AbsmaxOptimizer):  # type: ignore[misc]
        def optimize(self, *arguments: Any, **options: Any) -> Any:
            scale = super().optimize(*arguments, **options)
            return torch.where(scale > 0, scale, torch.ones_like(scale))

    class Affine(MaxOptimizer):  # type: ignore[misc]
        def optimize(self, *arguments: Any, **options: Any) -> Any:
            scale, shift = super().optimize(*arguments, **options)
            return torch.where(scale > 0, scale, torch.ones_like(scale)), shift

    return Affine() if kind in ("qint4", "qint2") else Absmax()


def _quantize(kind: str, model: Any, _: Options) -> Any:
    from optimum.quanto import freeze, quantize

    check_linears("optimum-quanto", model)
    copy = copy_of(model)
    quantize(copy, weights=kind, exclude=kept_modules(copy), optimizer=_optimizer(kind))
    freeze(copy)
    return copy


def _save(model: Any, folder: Path, max_shard_size: str | int) -> None:
    from optimum.quanto import quantization_map

    save_model(model, folder, max_shard_size)
    # QuantizedModelForCausalLM.save_pretrained writes this too, but takes no shard size.
    content = json.dumps(quantization_map(model), indent=1)
    (folder / MAP).write_text(content + "\n", encoding="utf-8")


def _load(folder: Path, device: torch.device, dtype: torch.dtype, trust_remote_code: bool) -> Any:
    from optimum.quanto import QuantizedModelForCausalLM

    # It builds the model from the config without passing trust_remote_code on, so custom code has
    # to be registered first.
    import quantdiff.models.diff_v2  # noqa: F401

    loaded = QuantizedModelForCausalLM.from_pretrained(folder, trust_remote_code=trust_remote_code)
    return loaded._wrapped.to(device)


FORMATS = {
    name: Format(
        name=name,
        title=title,
        packages=("optimum-quanto", "accelerate"),
        readers="optimum-quanto's QuantizedModelForCausalLM; neither transformers alone nor vLLM",
        snippet=SNIPPET,
        check=partial(_check, name),
        quantize=partial(_quantize, kind),
        save=_save,
        load=_load,
    )
    for name, (kind, title) in _TYPES.items()
}
