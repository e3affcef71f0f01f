"""`quantdiff verify`: whether an exported checkpoint is what was measured."""

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from quantdiff.cli import common

EPILOG = """
Examples:

  quantdiff verify runs/smollm2-nf4

  quantdiff verify runs/smollm2-nf4 --keep --json
"""


@common.app.command(epilog=EPILOG)
def verify(
    folder: Annotated[
        Path,
        typer.Argument(
            metavar="DIR", help="A folder that quantdiff export wrote.", show_default=False
        ),
    ],
    keep: Annotated[
        bool,
        typer.Option(
            "--keep", help="Leave a checkpoint that fails where it is, instead of in DIR.failed."
        ),
    ] = False,
    device: common.Device = None,
    trust_remote_code: common.TrustRemoteCode = False,
    as_json: common.Json = False,
) -> None:
    """Check an exported folder: its files, its tensors, and the logits of the reloaded model.

    A checkpoint that is not what was exported is renamed, so that nobody uses it: DIR becomes
    DIR.failed. One that cannot be read or loaded here keeps its name.
    """
    from quantdiff.export.verifying import set_aside
    from quantdiff.export.verifying import verify as run

    result = run(
        folder, device=device, trust_remote_code=trust_remote_code,
        report=None if as_json else common.report_step,
    )  # fmt: skip
    if as_json:
        print(json.dumps(result.to_json(), ensure_ascii=False, allow_nan=False))
    else:
        for check in result.checks:
            print(f"{'ok' if check.passed else 'FAILED'}  {check.name}: {check.detail}")
    if result.unwritten:
        sys.stderr.write(f"note: {result.unwritten}\n")
    if result.passed:
        return
    wrong = "; ".join(result.failures)
    if not result.differs:
        sys.stderr.write(f"error: {folder} could not be checked: {wrong}\n")
        raise typer.Exit(1)
    sys.stderr.write(f"error: {folder} is not what was exported: {wrong}\n")
    if not keep:
        sys.stderr.write(f"it is now {set_aside(folder)}\n")
    raise typer.Exit(1)
