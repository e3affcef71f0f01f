"""compressed-tensors: the layout that vLLM reads."""

import copy as copying
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quantdiff.errors import require
from quantdiff.export.copies import (
    SNIPPET,
    check_linears,
    copy_of,
    group_size,
    kept_modules,
    needs,
    no_options,
    quantized_linears,
    save_model,
    transformers_load,
)
from quantdiff.export.formats import Format, Options
from quantdiff.models.quiet import quiet_libraries

__all__ = ["FORMATS"]

_TITLES = {
    "ct-w8a16": "8-bit integer weights, one scale per row, of compressed-tensors",
    "ct-w4a16": "4-bit integer weights of compressed-tensors",
    "ct-w8a8": "8-bit integer weights and activations, one scale per row and token, of "
    "compressed-tensors",
}
# Shares of the largest magnitude that are tried as the scale's range at 4 bits. At 8 bits clipping
# gains nothing.
_SHARES = tuple(share / 50 for share in range(50, 26, -1))
_CHUNK = 1 << 22  # weights per search step


def _check(name: str, options: Options, _: torch.device) -> None:
    no_options(name, options)
    require("compressed_tensors", extra="compressed", purpose=f"write or load {name}")
    needs(name, "accelerate")


def _scheme(name: str, model: Any) -> Any:
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    bits = 4 if name == "ct-w4a16" else 8
    group = group_size(model) if bits == 4 else None
    weights = QuantizationArgs(
        num_bits=bits,
        type="int",
        strategy="channel" if group is None else "group",
        group_size=group,
        symmetric=True,
        dynamic=False,
    )
    inputs = None
    if name == "ct-w8a8":
        inputs = QuantizationArgs(
            num_bits=8, type="int", strategy="token", symmetric=True, dynamic=True
        )
    return QuantizationScheme(targets=["Linear"], weights=weights, input_activations=inputs)


@torch.no_grad()
def _quantize(name: str, model: Any, _: Options) -> Any:
    from compressed_tensors.compressors import ModelCompressor, compress_module
    from compressed_tensors.quantization import (
        QuantizationConfig,
        QuantizationStatus,
        apply_quantization_config,
    )

    check_linears(name, model)
    copy = copy_of(model)
    config = QuantizationConfig(
        config_groups={"group_0": _scheme(name, copy)},
        ignore=kept_modules(copy),
        quantization_status=QuantizationStatus.INITIALIZED,
    )
    linears = quantized_linears(copy)
    with quiet_libraries():
        apply_quantization_config(copy, config, show_progress=False)
        for module in linears.values():
            arguments = module.quantization_scheme.weights  # type: ignore[union-attr]
            scale = _scales(module.weight, arguments.num_bits, arguments.group_size)
            module.weight_scale.data = scale  # type: ignore[union-attr]
        compressor = ModelCompressor.from_pretrained_model(copy)
        for module in linears.values():
            compress_module(module)
    # What else compress_model does, without its progress bar.
    compressor.quantization_config.quantization_status = QuantizationStatus.COMPRESSED
    compressor.add_decompress_hook(copy)
    copy.compressor = copying.copy(compressor)
    return copy


def _scales(weight: Tensor, bits: int, group: int | None) -> Tensor:
    """Scales of a weight, as stored.

    Args:
        weight: (m, n).
        bits: of the grid −2^(b−1) … 2^(b−1)−1.
        group: elements of a row that share a scale; None for all of them.

    Returns:
        (m, n / group) or (m, 1), greater than 0, in the weight's dtype; at 4 bits those with the
        least squared error, computed with the scale as stored.
    """
    rows = weight.shape[0]
    width = group or weight.shape[1]
    found = []
    for part in weight.reshape(-1, width).split(max(1, _CHUNK // width)):  # (g, width)
        values = part.float()
        largest = values.abs().amax(1, keepdim=True)  # (g, 1)
        high = 2 ** (bits - 1) - 1
        best = _stored(largest / high, weight.dtype)
        if bits < 8:
            error = _error(values, best, high)
            for share in _SHARES[1:]:
                scale = _stored(largest * share / high, weight.dtype)
                now = _error(values, scale, high)
                best = torch.where(now < error, scale, best)
                error = torch.minimum(now, error)
        found.append(best)
    return torch.cat(found).reshape(rows, -1).to(weight.dtype)


def _stored(scale: Tensor, dtype: torch.dtype) -> Tensor:
    """The scale rounded to the storage dtype, greater than 0, in fp32."""
    # Weights of 1e-3 already have 8-bit scales below fp16's normal numbers.
    least = 2**-24 if dtype == torch.float16 else torch.finfo(dtype).tiny
    return scale.clamp(min=least).to(dtype).float()


def _error(values: Tensor, scale: Tensor, high: int) -> Tensor:
    grid = (values / scale).round_().clamp_(-high - 1, high).mul_(scale)
    return grid.sub_(values).square_().sum(1, keepdim=True)


def _save(model: Any, folder: Path, max_shard_size: str | int) -> None:
    compressor = model.__dict__.pop("compressor")
    save_model(model, folder, max_shard_size)
    compressor.update_config(folder)


FORMATS = {
    name: Format(
        name=name,
        title=title,
        packages=("compressed-tensors", "accelerate"),
        readers="transformers with compressed-tensors, and vLLM",
        snippet=SNIPPET,
        check=partial(_check, name),
        quantize=partial(_quantize, name),
        save=_save,
        load=transformers_load,
        grouped=name == "ct-w4a16",
        rounds_activations=name == "ct-w8a8",
    )
    for name, title in _TITLES.items()
}
