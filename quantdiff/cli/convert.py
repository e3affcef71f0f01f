"""`quantdiff convert`: official DIFF weights to a transformers model and back."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from quantdiff.cli import common

if TYPE_CHECKING:
    from quantdiff.models.converting_card import Converted

EPILOG = """
Examples:

  quantdiff convert my-diff-v1 --to diffllama --out my-diffllama

  quantdiff convert my-diff-v2 --from official-v2 --to diff_v2 --out my-diff-v2-model

  quantdiff convert my-diffllama --to official-v1 --out my-diff-v1-again --json
"""


@common.app.command(epilog=EPILOG)
def convert(
    folder: Annotated[
        Path,
        typer.Argument(
            metavar="FOLDER",
            help="config.json with Llama's entries and safetensors with Llama's names.",
            show_default=False,
        ),
    ],
    to: Annotated[
        str, typer.Option("--to", help="diffllama, diff_v2, official-v1 or official-v2.")
    ],
    out: Annotated[Path, typer.Option("--out", help="Folder to write; new or empty.")],
    from_: Annotated[
        str | None,
        typer.Option(
            "--from",
            help="What FOLDER holds, of the same four. V1's two are told by the weights' names, "
            "V2's two by nothing but this or model_type in config.json.",
        ),
    ] = None,
    depth_offset: Annotated[
        int | None,
        typer.Option(
            "--depth-offset",
            help="What the training of V1 added to a layer's index for λ_init. Default: 0, or "
            "lambda_init_depth_offset in config.json.",
        ),
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace the model that is in --out.")
    ] = False,
    as_json: common.Json = False,
) -> None:
    """Convert official DIFF V1 or V2 weights to a transformers model, or back."""
    from quantdiff.models import convert_folder

    common.silence_libraries()
    converted = convert_folder(
        folder, out, to, from_=from_, depth_offset=depth_offset, overwrite=overwrite,
        command=common.command_line(), report=None if as_json else common.report_step,
    )  # fmt: skip
    if as_json:
        print(json.dumps(converted.to_json(), ensure_ascii=False, allow_nan=False))
    else:
        _print(converted)


def _print(converted: "Converted") -> None:
    source, target = converted.kinds
    check = converted.check
    print(
        f"{source} to {target}: {converted.layers} layers, {converted.query_heads} query and "
        f"{converted.kv_heads} key-value heads of width {converted.head_dim}, "
        f"{converted.parameters / 1e6:.1f}M parameters, {' and '.join(converted.dtypes)}"
    )
    layers = ", ".join(map(str, check.layers))
    print(
        f"attention of layers {layers} compared: largest difference {check.difference:.1e} of the "
        "outputs' root mean square, in fp64"
    )
    if converted.lossy:
        print(f"{converted.lossy}; as stored the largest difference is {check.stored:.1e}")
    print(f"written to {converted.out}")
