"""Export of a live model to a checkpoint folder that is proven to reload."""

import gc
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quantdiff.errors import UsageError, VerificationError
from quantdiff.export.card import card
from quantdiff.export.copies import (
    check_exportable,
    group_size,
    kept_modules,
    quantized_share,
)
from quantdiff.export.formats import Options, find_format, package_versions
from quantdiff.export.passage import ROWS, environment, last_logits, passage_ids
from quantdiff.export.ranges import AskedTable, RangeTable, calibration_of
from quantdiff.export.refusals import check_out, check_shard_size, check_source, check_table
from quantdiff.export.result import Exported
from quantdiff.export.sidecar import (
    CARD,
    LOGITS,
    QUANTIZED_LOGITS,
    SIDECAR,
    VERIFICATION,
    write_sidecar,
)
from quantdiff.export.verifying import verify
from quantdiff.files import staged_folder, write_bytes
from quantdiff.models import describe
from quantdiff.models.checkpoint import INDEX
from quantdiff.models.checks import library_errors
from quantdiff.models.converting_files import TOKENIZER, readable
from quantdiff.models.quanto import MAP
from quantdiff.models.quiet import quiet_libraries
from quantdiff.quantization import Scheme, fake_quantize
from quantdiff.quantization.definitions import DEFINITIONS
from quantdiff.quantization.table import Table
from quantdiff.versions import versions

__all__ = ["export"]

# Everything that an export may write; a later one with overwrite=True removes it first.
OWNED = (
    *TOKENIZER, CARD, "*.safetensors", INDEX, "*.py", SIDECAR, VERIFICATION, MAP,
    "quantize_config.json", "config.json",
)  # fmt: skip

_STORED = {
    "ranges": "least and most, fp32, in quantdiff.safetensors: (2, H) of attention logits, for H "
    "query heads; (2, H) or, by channel, (2, H, C) of keys and values, for H key-value heads; "
    "(2, 1) of linear inputs and hidden states",
    "bits_per_weight": "8 · bytes of the model's safetensors files / parameters, tied ones once",
}


def export(
    model: Any,
    tokenizer: Any,
    out: str | Path,
    *,
    format: str,
    schemes: Sequence[Scheme] = (),
    table: Table | None = None,
    double_quant: bool = False,
    calibration: Sequence[Tensor] = (),
    max_shard_size: str | int = "5GB",
    overwrite: bool = False,
    check: bool = True,
    measure: Callable[[Any], Mapping[str, Any]] | None = None,
    command: str = "",
    report: Callable[[str], None] | None = None,
) -> Exported:
    """Quantize a copy of a model's weights and write it as a folder that is proven to reload.

    The folder holds config, generation config, tokenizer, chat template, weights as safetensors,
    modelling code where transformers has none, a model card, and a sidecar with the schemes, their
    static ranges and the logits of a short passage. Before it gets its name, it is loaded in a new
    process, by the format's own loader and by `quantdiff.load`, and must reproduce those logits
    (`verify`).

    The live model is neither written to nor moved.

    Args:
        model: a causal language model of transformers, on one device, not quantized.
        tokenizer: its tokenizer.
        out: the folder to write; new, empty, or with `overwrite` an earlier export.
        format: one of `quantdiff.export.FORMATS`, for example `bnb-nf4`.
        schemes: what is quantized besides the weights, one per site, as in `fake_quantize`.
        table: static ranges for them, from `quantdiff.calibrate`.
        double_quant: quantize the scales of bitsandbytes' 4-bit formats too.
        calibration: windows of token ids, (n,) int64 each, for GPTQ.
        max_shard_size: largest size of a weight file, such as "500MB", or in bytes.
        overwrite: replace the export in `out`.
        check: whether to verify the folder; otherwise it is not proven to reload.
        measure: called with the quantized copy, which computes with the schemes; returns the
            numbers for the model card, by name, as JSON values.
        command: the one that made the export, for the record.
        report: called with the name of each step.

    Raises:
        UsageError: the request cannot be met; nothing is left behind.
        MissingExtraError: a package that the format needs is not installed.
        VerificationError: what was written is not what was measured; nothing is left behind.
    """
    out, schemes = Path(out).expanduser(), tuple(schemes)
    step = report or _silent
    chosen = find_format(format)
    check_exportable(model)
    options = Options(double_quant, tuple(calibration))
    chosen.check(options, model.device)
    if chosen.calibrated and not options.windows:
        raise UsageError(
            f"{format} is calibrated on text: give calibration=…, windows of token ids"
        )
    if any(scheme.site == "weights" for scheme in schemes):
        raise UsageError(
            "the weights are what the format quantizes: choose another --format, and schemes for "
            "activations alone"
        )
    check_shard_size(max_shard_size)
    fake_quantize(model, *schemes, table=table)  # refuses what does not fit together
    if table is not None:
        check_table(table, model)
    passage = passage_ids(model, tokenizer)
    check_source(out, model)
    check_out(out, overwrite)
    with staged_folder(out, marker="config.json", owned=OWNED, overwrite=overwrite) as stage:
        step(f"quantizing to {format}")
        copy = chosen.quantize(model, options)
        dtype = str(copy.dtype).removeprefix("torch.")
        step("writing")
        # safetensors' own errors too: it raises one of them on a full disk.
        with quiet_libraries(), library_errors(f"{out} cannot be written"):
            chosen.save(copy, stage, max_shard_size)
            tokenizer.save_pretrained(stage)
        readable(stage)
        size = sum(path.stat().st_size for path in stage.glob("*.safetensors"))
        step("computing the passage" if measure is None else "measuring")
        asked = None if table is None else AskedTable(table)
        logits, measured = _computed(copy, passage, schemes, asked, measure)
        del copy
        gc.collect()  # the check loads the model again,
        torch.cuda.empty_cache()  # in another process, which cannot use this one's cache
        described = describe(model)
        result = Exported(
            folder=str(out),
            format=format,
            model=described["name"],
            parameters=described["parameters"],
            bytes=size,
            source_bytes=_bytes(model),
            source_dtype=described["dtype"],
            schemes=schemes,
            measured=measured,
            verification=None,
        )
        with library_errors(f"{out} cannot be written"):
            static = any(scheme.static and scheme.quantizes for scheme in schemes)
            content = {
                "export": {
                    "format": format, "dtype": dtype, "double_quant": double_quant,
                    "kept": kept_modules(model) if chosen.packages else [],
                    "share": quantized_share(model) if chosen.packages else 0.0,
                    **({"group": group_size(model)} if chosen.grouped else {}),
                },
                "model": described,
                "definitions": DEFINITIONS | _STORED,
                "causal": all(scheme.causal for scheme in schemes),
                "calibration": calibration_of(table) if static else None,
                "passage": {"ids": passage, "positions": min(ROWS, len(passage))},
                "reference": environment(model.device) | versions(),
                "size": {"bytes": size, "bits_per_weight": result.bits_per_weight},
                "measured": measured,
                "packages": package_versions(chosen),
                "command": command,
            }  # fmt: skip
            stored = RangeTable(described["name"], asked.sites, asked.ranges) if asked else None
            told = card(
                result, chosen, content, out.absolute().name, brings_code=_brings_code(stage)
            )
            write_bytes(stage / CARD, told.encode())
            write_sidecar(stage, content, schemes, stored if static else None, logits)
        if check:
            step("checking")
            result = _checked(result, stage, str(model.device))
    return result


def _silent(step: str) -> None:
    """Report nothing."""


def _computed(
    copy: Any,
    passage: list[int],
    schemes: tuple[Scheme, ...],
    table: AskedTable | None,
    measure: Callable[[Any], Mapping[str, Any]] | None,
) -> tuple[dict[str, Tensor], dict[str, Any] | None]:
    """The passage's logits from the weights alone and under the schemes, and the measurement.

    Called after the weights are written: a library's first pass may rearrange them in place.
    """
    logits = {LOGITS: last_logits(copy, passage)}
    with fake_quantize(copy, *schemes, table=table):
        if schemes:
            logits[QUANTIZED_LOGITS] = last_logits(copy, passage)
        measured = None if measure is None else dict(measure(copy))
    for values in logits.values():
        if not bool(values.isfinite().all()):
            raise UsageError(
                "the quantized model gives NaN or infinity on a plain English text: choose a "
                "format or a scheme of more bits"
            )
    return logits, measured


def _checked(result: Exported, stage: Path, device: str) -> Exported:
    """The result with its verification, which trusts the code that the live model ran."""
    verification = verify(stage, device=device, trust_remote_code=True)
    if not verification.passed:
        raise VerificationError(
            f"{result.folder} was not written, since the checkpoint is not what was measured: "
            f"{'; '.join(verification.failures)}"
        )
    verification.folder = result.folder
    return replace(result, verification=verification)


def _bytes(model: Any) -> int:
    return sum(value.numel() * value.element_size() for value in model.parameters())


def _brings_code(folder: Path) -> bool:
    """Whether the config names code beside it, which loaders run only if trusted."""
    settings = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return "auto_map" in settings and any(folder.glob("*.py"))
