"""`quantdiff export`: a quantized checkpoint that is proven to reload."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from quantdiff.cli import common
from quantdiff.cli.sweep_shown import note

if TYPE_CHECKING:
    from quantdiff.analysis.evaluation import Text
    from quantdiff.export import Exported
    from quantdiff.quantization import Scheme

EPILOG = """
Examples:

  quantdiff export smollm2-135m --format bnb-nf4 --out runs/smollm2-nf4

  quantdiff export smollm2-135m --format bf16 --bits 6 --granularity head --out runs/logits-6

  quantdiff export ./my-model --format ct-w4a16 --bits 8 --range percentile:99.9
  --table runs/table --out runs/w4

  quantdiff export smollm2-135m --format bf16 --site keys,values --bits 8,4 --out runs/kv

Formats: bf16, fp16; bnb-int8, bnb-nf4, bnb-fp4 (bitsandbytes); quanto-int8, quanto-int4,
quanto-int2, quanto-fp8 (optimum-quanto); ct-w8a16, ct-w4a16, ct-w8a8 (compressed-tensors, which
vLLM reads); gptq-4bit, gptq-8bit (gptqmodel; a GPU for models of size).
"""


@common.app.command(epilog=EPILOG)
def export(
    context: typer.Context,
    model: common.Model,
    format_: Annotated[str, typer.Option("--format", help="Of the weights; see below.")],
    out: Annotated[Path, typer.Option("--out", help="Folder to write; new or empty.")],
    sites: Annotated[
        list[str],
        typer.Option(
            "--site",
            help="What is quantized beside the weights. Lists have commas. Default: "
            "attention_logits.",
            show_default=False,
        ),
    ] = [],  # noqa: B006  (typer copies it)
    bits: Annotated[
        list[str],
        typer.Option(
            "--bits",
            help="2 to 8, for the site; one per site, or one for all. Lists have commas. Without "
            "it the weights alone are quantized.",
            show_default=False,
        ),
    ] = [],  # noqa: B006
    range_: Annotated[
        str,
        typer.Option("--range", help="dynamic, or static: absmax, percentile[:P], mse, entropy."),
    ] = "dynamic",
    granularity: Annotated[
        str, typer.Option("--granularity", help="tensor, head or row; other sites have their own.")
    ] = "",
    asymmetric: Annotated[
        bool, typer.Option("--asymmetric", help="An asymmetric grid for the sites.")
    ] = False,
    table: Annotated[
        Path | None,
        typer.Option("--table", help="A folder that quantdiff calibrate wrote, for static ranges."),
    ] = None,
    double_quant: Annotated[
        bool,
        typer.Option("--double-quant", help="Quantize the scales of bnb-nf4 and bnb-fp4 too."),
    ] = False,
    max_shard_size: Annotated[
        str, typer.Option("--max-shard-size", help="Of a weight file, such as 500MB.")
    ] = "5GB",
    measure: Annotated[
        bool,
        typer.Option(
            "--measure/--no-measure",
            help="Perplexity, KL and agreement with the source, for the model card.",
        ),
    ] = True,
    data: common.Data = "corpus",
    tokens: Annotated[int, typer.Option("--tokens", help="Tokens to measure on.")] = 4096,
    seq_len: Annotated[
        int | None,
        typer.Option("--seq-len", help="Tokens per window. Default: 2048, or the model's context."),
    ] = None,
    calibration_data: Annotated[
        str, typer.Option("--calibration-data", help="Text that GPTQ is calibrated on.")
    ] = "corpus:train",
    calibration_tokens: Annotated[
        int, typer.Option("--calibration-tokens", help="How much of it.")
    ] = 65536,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace the export that is in --out.")
    ] = False,
    dtype: common.Dtype = None,
    device: common.Device = None,
    trust_remote_code: common.TrustRemoteCode = False,
    as_json: common.Json = False,
) -> None:
    """Quantize a model's weights into a checkpoint, and prove that it reloads as measured."""
    from quantdiff.analysis.evaluation import Text
    from quantdiff.analysis.profiling import check_length
    from quantdiff.analysis.sweep.ranges import data_of
    from quantdiff.calibration import CalibrationTable, text_windows
    from quantdiff.errors import UsageError
    from quantdiff.export.exporting import export as run
    from quantdiff.export.formats import Options, find_format
    from quantdiff.export.refusals import check_out, check_shard_size, check_source, check_table
    from quantdiff.models import context_length, describe, load
    from quantdiff.models.options import resolve_device

    # Everything that can be refused before a large model is loaded.
    chosen = find_format(format_)
    chosen.check(Options(double_quant), resolve_device(device))
    check_out(out, overwrite)
    check_shard_size(max_shard_size)
    schemes = _schemes(sites, bits, range_, granularity, asymmetric)
    _refuse_unused(
        context, format_, calibrated=chosen.calibrated, measure=measure,
        static=any(scheme.static for scheme in schemes),
    )  # fmt: skip
    ranges = None if table is None else CalibrationTable.load(table)
    for scheme in schemes:
        if scheme.static and ranges is None:
            raise UsageError(
                f"the range {scheme.range} comes from a calibration: give --table, a folder that "
                "quantdiff calibrate wrote"
            )
    common.silence_libraries()
    loaded, tokenizer = load(model, dtype=dtype, device=device, trust_remote_code=trust_remote_code)
    check_source(out, loaded)
    calibrated_on: dict[str, dict[str, Any]] = {}
    if ranges is not None:
        check_table(ranges, loaded)
        known = ranges.model.get("name")
        if known not in (model, describe(loaded)["name"]):
            note(f"{table} was calibrated on {known} and is used for {model}")
        calibrated_on["the static ranges"] = ranges.data
    calibration: tuple[Any, ...] = ()
    if chosen.calibrated:
        if seq_len is not None:
            check_length(loaded, seq_len)
        length = min(2048, seq_len or context_length(loaded) or 2048)
        windows = text_windows(
            calibration_data, tokenizer, tokens=calibration_tokens, seq_len=length
        )
        calibration = tuple(windows.windows)
        calibrated_on["the weights"] = data_of(windows)
    function = None
    if measure:
        function = shown_measurement(
            loaded, tokenizer, Text(data, tokens, seq_len), calibrated_on, quiet=as_json
        )
    exported = run(
        loaded, tokenizer, out, format=format_, schemes=schemes, table=ranges,
        double_quant=double_quant, calibration=calibration, max_shard_size=max_shard_size,
        overwrite=overwrite, measure=function, command=common.command_line(),
        report=None if as_json else common.report_step,
    )  # fmt: skip
    if as_json:
        print(json.dumps(exported.to_json(), ensure_ascii=False, allow_nan=False))
    else:
        _print(exported)


def shown_measurement(
    model: Any, tokenizer: Any, text: "Text", calibrated_on: dict[str, dict[str, Any]], *,
    quiet: bool,
) -> Callable[[Any], dict[str, Any]]:  # fmt: skip
    """See `analysis.exported.measuring`; with a progress bar, which appears when it begins."""
    from quantdiff.analysis.exported import measuring

    bars: list[Callable[[int], None]] = []

    def tell(tokens: int) -> None:
        bars[-1](tokens)

    measured, total = measuring(model, tokenizer, text, calibrated_on=calibrated_on, progress=tell)

    def measure(copy: Any) -> dict[str, Any]:
        with common.token_progress("measuring", total, quiet=quiet) as progress:
            bars.append(progress)
            return measured(copy)

    return measure


def _schemes(
    asked: list[str], bits: list[str], range_: str, granularity: str, asymmetric: bool
) -> list["Scheme"]:
    from quantdiff.errors import UsageError
    from quantdiff.quantization import Scheme

    sites = common.listed(asked) or ["attention_logits"]
    widths = _whole_numbers(bits)
    if not widths:
        if asked or range_ != "dynamic" or granularity or asymmetric:
            raise UsageError("--site, --range, --granularity and --asymmetric need --bits")
        return []
    if len(widths) == 1:
        widths = widths * len(sites)
    if len(widths) != len(sites):
        raise UsageError(
            f"{len(widths)} --bits for {len(sites)} --site: give one each, or one --bits"
        )
    return [
        Scheme(site, width, range_, granularity, symmetric=not asymmetric)
        for site, width in zip(sites, widths, strict=True)
    ]


def _refuse_unused(
    context: typer.Context, format_: str, *, calibrated: bool, measure: bool, static: bool
) -> None:
    """Refuse options that would have no effect.

    Raises:
        UsageError: there is one; the message names the first.
    """
    from quantdiff.errors import UsageError

    unused = {}
    if not static:
        unused["--table"] = "static ranges: add --bits and a --range such as absmax"
    if not calibrated:
        why = f"formats that are calibrated on text, as {format_} is not: choose a gptq format"
        unused |= dict.fromkeys(("--calibration-data", "--calibration-tokens"), why)
    if not measure:
        why = "the measurement: leave out --no-measure"
        unused |= {"--data": why, "--tokens": why}
        if not calibrated:
            unused["--seq-len"] = why
    for option, why in unused.items():
        source = context.get_parameter_source(option[2:].replace("-", "_"))
        if source is not None and source.name == "COMMANDLINE":
            raise UsageError(f"{option} is for {why}, or leave {option} out")


def _whole_numbers(values: list[str]) -> list[int]:
    """The entries of `--bits`, in their order, repetitions included."""
    from quantdiff.errors import UsageError

    entries = [entry.strip() for value in values for entry in value.split(",") if entry.strip()]
    for entry in entries:
        if not entry.isdecimal():
            raise UsageError(f"--bits takes whole numbers, such as 8 or 8,4, and not {entry!r}")
    return [int(entry) for entry in entries]


def _print(exported: "Exported") -> None:
    from rich.console import Console

    from quantdiff.analysis.exported import export_table
    from quantdiff.export.card import scheme_in_words

    console = Console()
    console.print(export_table(exported))
    for scheme in exported.schemes:
        console.print(f"with {scheme_in_words(scheme)}", highlight=False, soft_wrap=True)
    if exported.measured:
        console.print(f"measured on {exported.measured['data']}", highlight=False, soft_wrap=True)
    if exported.verification is not None:
        for check in exported.verification.checks:
            console.print(f"{check.name}: {check.detail}", markup=False, highlight=False,
                          soft_wrap=True)  # fmt: skip
    console.print(f"written to {exported.folder}", markup=False, highlight=False, soft_wrap=True)
