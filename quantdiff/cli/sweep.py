"""`quantdiff sweep`: what low bit widths cost, for a grid of models, schemes and evaluations."""

from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from quantdiff.cli import common
from quantdiff.cli.sweep_shown import cell_progress, note, show_sweep

if TYPE_CHECKING:
    from quantdiff.analysis.sensitivity import Sensitivity
    from quantdiff.analysis.sweep import SweepResults
    from quantdiff.analysis.sweep.mixed import Plan
    from quantdiff.quantization import Scheme

EPILOG = """
Examples:

  quantdiff sweep smollm2-135m --bits 16,8,6,4 --eval perplexity --out runs/sweep

  quantdiff sweep smollm2-135m --bits 16,8,6,5,4,3
  --range dynamic,absmax,percentile:99.9,mse,entropy --granularity tensor,head,row
  --eval perplexity --eval divergence --tokens 16384 --seq-len 1024 --out runs/ranges

  quantdiff sweep runs/plain runs/diff --bits 16,8,6,4 --eval choice:questions.jsonl
  --eval lm-eval:hellaswag --published --out runs/figure-8

  quantdiff sweep smollm2-135m --scheme W8A8,W4g64A16,KV8,KV4,W8A8+KV8+L6 --eval divergence
  --out runs/deployed

  quantdiff sweep smollm2-135m --scheme W8A8,W4A8 --remedy none,smooth:0.5,rotate,gptq
  --eval divergence --out runs/remedies

  quantdiff sweep smollm2-135m --scheme W8A16,W6A16,W5A16,W4A16,W3A16 --per-layer --budget 5
  --eval divergence --out runs/layers

  torchrun --nproc-per-node 8 -m quantdiff sweep my/model --eval perplexity --out runs/many
"""

# Parameter -> option, for those that apply to --bits only.
_OF_GRID = {
    "sites": "--site",
    "ranges": "--range",
    "granularities": "--granularity",
    "asymmetric": "--asymmetric",
}


@common.app.command(epilog=EPILOG)
def sweep(
    context: typer.Context,
    models: Annotated[
        list[str],
        typer.Argument(
            metavar="MODEL…",
            help="smollm2-135m, hub ids, folders, or .gguf files; each is opened by itself.",
            show_default=False,
        ),
    ],
    out: Annotated[
        Path,
        typer.Option(
            "--out",
            help="Folder for results.jsonl, items and figures. A sweep that was stopped there goes "
            "on; one that was finished may be extended.",
        ),
    ],
    evaluations: Annotated[
        list[str],
        typer.Option(
            "--eval",
            help="perplexity, divergence, choice:FILE.jsonl, lm-eval:TASK, needles, "
            "order:FILE.jsonl or noise; may repeat.",
            show_default=False,
        ),
    ],
    bits: Annotated[
        list[str],
        typer.Option(
            "--bits",
            help="2 to 8; 16 is the model as it is. Lists have commas. Default: 16,8,6,4, or 16 "
            "with --scheme.",
            show_default=False,
        ),
    ] = [],  # noqa: B006  (typer copies it)
    together: Annotated[
        list[str],
        typer.Option(
            "--scheme",
            help="Sites together, by a short name: W8A8, W4g64A16+KV4, W8A8+L6. W weights, A "
            "linear inputs, KV keys and values (KV4r128: the newest 128 tokens as they are), L "
            "logits, P maps, H hidden states.",
            show_default=False,
        ),
    ] = [],  # noqa: B006
    sites: Annotated[
        list[str],
        typer.Option(
            "--site",
            help="What is quantized, one at a time: attention_logits, attention_maps, keys, "
            "values, linear_inputs, hidden_states or weights.",
        ),
    ] = ["attention_logits"],  # noqa: B006
    ranges: Annotated[
        list[str],
        typer.Option(
            "--range",
            help="dynamic, or static: absmax, percentile[:P], mse, entropy; not for weights and "
            "attention_maps.",
        ),
    ] = ["dynamic"],  # noqa: B006
    granularities: Annotated[
        list[str],
        typer.Option(
            "--granularity",
            help="tensor, head or row of logits and maps; token, channel or group:N elsewhere. "
            "Default: the site's own, tensor of logits.",
            show_default=False,
        ),
    ] = [],  # noqa: B006
    asymmetric: Annotated[
        bool, typer.Option("--asymmetric", help="Asymmetric grids too, beside the symmetric ones.")
    ] = False,
    data: common.Data = "corpus",
    tokens: Annotated[
        int, typer.Option("--tokens", help="Tokens of text for perplexity and divergence.")
    ] = 16384,
    seq_len: Annotated[
        int | None,
        typer.Option("--seq-len", help="Tokens per window. Default: 2048, or the model's context."),
    ] = None,
    remedies: Annotated[
        list[str],
        typer.Option(
            "--remedy",
            help="none, smooth[:ALPHA] (SmoothQuant), rotate (the residual stream), gptq (the "
            "weights), or sums such as rotate+gptq; calibrated on corpus:train.",
        ),
    ] = ["none"],  # noqa: B006
    per_layer: Annotated[
        bool,
        typer.Option(
            "--per-layer",
            help="Quantize one layer at a time, of those that hold the site, and rank them.",
        ),
    ] = False,
    per_head: Annotated[
        bool,
        typer.Option(
            "--per-head",
            help="Quantize one head of a layer at a time, of logits, maps, keys or values.",
        ),
    ] = False,
    budget: Annotated[
        float | None,
        typer.Option(
            "--budget",
            help="With --per-layer: share bits out so that the average one of these layers has at "
            "most so many, and measure that beside the same bits everywhere.",
            show_default=False,
        ),
    ] = None,
    tables: Annotated[
        list[Path],
        typer.Option(
            "--table",
            help="A folder that quantdiff calibrate wrote, for static ranges; may repeat, one per "
            "model. Default: calibrate on corpus:train.",
            show_default=False,
        ),
    ] = [],  # noqa: B006
    calibration_tokens: Annotated[
        int,
        typer.Option(
            "--calibration-tokens",
            help="Tokens to calibrate remedies on, and ranges without --table.",
        ),
    ] = 16384,
    batch_size: Annotated[
        int,
        typer.Option(
            "--batch-size",
            min=1,
            help="Sequences in a pass; moves results by rounding alone: in fp32 by 1e-5 at most, "
            "but a quantized value at a rounding boundary may go to its other side.",
        ),
    ] = 1,
    overwrite: common.Overwrite = False,
    published: Annotated[
        bool,
        typer.Option("--published", help="Draw the paper's Figure 8 beside measured accuracies."),
    ] = False,
    attention: common.Attention = None,
    dtype: common.Dtype = None,
    device: common.Device = None,
    trust_remote_code: common.TrustRemoteCode = False,
    as_json: common.Json = False,
) -> None:
    """Evaluate models at low bit widths: a grid of cells that resumes where it was stopped."""
    from quantdiff.analysis.evaluation import Stopped, Text
    from quantdiff.analysis.sweep import SweepResults, make_grid
    from quantdiff.analysis.sweep import sweep as run
    from quantdiff.analysis.sweep.distributed import is_first
    from quantdiff.analysis.sweep.mixed import check_budget, plan_bits
    from quantdiff.analysis.sweep.sensitivities import sensitivities
    from quantdiff.errors import UsageError
    from quantdiff.export.card import scheme_in_words
    from quantdiff.quantization import schemes

    named = [schemes(name) for name in common.listed(together)]
    widths = _whole_numbers(common.listed(bits or ["16" if named else "16,8,6,4"]))
    if named and all(width == 16 for width in widths):
        _refuse_of_grid(context)
    grid = make_grid(
        bits=widths, ranges=common.listed(ranges),
        granularities=common.listed(granularities) or [""], sites=common.listed(sites),
        symmetric=(True, False) if asymmetric else (True,),
    )  # fmt: skip
    wanted: list[Sequence[Scheme]] = [*([scheme] for scheme in grid.schemes), *named]
    each = _each(per_layer=per_layer, per_head=per_head, budget=budget)
    if budget is not None:
        check_budget(wanted, budget)
    first = is_first()
    quiet = as_json or not first
    if quiet:
        common.silence_libraries()
    if first:
        for sentence in grid.notes:
            note(sentence)
        for name, together_ in zip(common.listed(together), named, strict=True):
            note(f"{name}: {'; '.join(map(scheme_in_words, together_)) or 'not quantized'}")
    ranked: list[Sensitivity] | None = None
    plans: list[Plan] = []
    asked: set[str] = set()
    stopped = False
    with (
        common.interruptible() as stop,
        cell_progress(quiet=quiet) as progress,
    ):

        def compute(
            models: list[str], wanted: "Sequence[Sequence[Scheme]]", **more: Any
        ) -> "SweepResults":
            found = run(
                models, wanted, evaluations, out=out, text=Text(data, tokens, seq_len),
                calibration_tokens=calibration_tokens, batch_size=batch_size, dtype=dtype,
                device=device, attention=attention, trust_remote_code=trust_remote_code,
                command=common.command_line(), note=note, progress=progress, stop=stop, **more,
            )  # fmt: skip
            asked.update(found.record["asked"])
            return found

        try:
            results = compute(
                models, wanted, tables=tables, remedies=common.listed(remedies), each=each,
                overwrite=overwrite,
            )  # fmt: skip
            # Before any plan: it is a request of its own, and while cells of others are missing,
            # only those of the last request count.
            ranked = sensitivities(results)
            own = sensitivities(results, cells=asked)
            if each is not None and not results.failed and not own:
                raise UsageError(
                    f"nothing that {', '.join(evaluations)} measures tells which {each} costs the "
                    "most: add --eval divergence or --eval perplexity"
                )
            if budget is not None:
                plans = [plan_bits(one, budget) for one in own if not one.of_heads]
            for plan in plans:
                table = _tables_of(plan, results, tables)
                results = compute([plan.sensitivity.model], plan.wanted, tables=table)
        except Stopped:
            stopped = True
    if not first:
        raise typer.Exit(130 if stopped else 0)
    if stopped:
        if not (out / "sweep.json").exists():  # stopped before the first cell
            raise typer.Exit(130)
        results = SweepResults.load(out)
    for sentence in _shorter(results, models, evaluations, data, tokens):
        note(sentence)
    if ranked is None:
        ranked = sensitivities(results)
    show_sweep(results, ranked, plans, published=published, as_json=as_json)
    if stopped:
        raise typer.Exit(130)
    if any(row["cell"] in asked for row in results.failed):
        raise typer.Exit(1)


def _each(*, per_layer: bool, per_head: bool, budget: float | None) -> str | None:
    from quantdiff.errors import UsageError

    if per_layer and per_head:
        raise UsageError("--per-layer and --per-head are two sweeps: run one after the other")
    if budget is not None and not per_layer:
        raise UsageError("--budget shares bits out by what layers cost: add --per-layer")
    return "layer" if per_layer else "head" if per_head else None


def _tables_of(plan: "Plan", results: "SweepResults", tables: Sequence[Path]) -> list[Path]:
    """The tables, at most one, whose static ranges a plan uses."""
    from quantdiff.analysis.sweep.identity import table_fingerprint
    from quantdiff.calibration import CalibrationTable

    one = plan.sensitivity
    if not any(scheme.static for scheme in one.template):
        return []
    known = results.record["models"][one.model]["calibration"]["fingerprint"]
    return [path for path in tables if table_fingerprint(CalibrationTable.load(path)) == known]


def _shorter(
    results: "SweepResults",
    models: Sequence[str],
    evaluations: Sequence[str],
    data: str,
    asked: int,
) -> list[str]:
    """One sentence for each text that holds fewer tokens than were requested."""
    found: dict[str, None] = {}
    for model, name in product(models, evaluations):
        about = results.record["models"].get(model, {"evaluations": {}})
        settings = about["evaluations"].get(name, {"settings": {}})["settings"]
        wanted = min(asked, settings.get("most", asked))
        held = settings.get("tokens", wanted)
        if held < wanted - 1:  # a last window of one token is dropped
            start = f"{model}: " if len(models) > 1 else ""
            found[f"{start}{data} holds {held:,} tokens, not the {wanted:,} asked for"] = None
    return list(found)


def _refuse_of_grid(context: typer.Context) -> None:
    """Refuse options that do not apply to schemes given by a short name.

    Raises:
        UsageError: there is one; the message names the first.
    """
    from quantdiff.errors import UsageError

    for name, option in _OF_GRID.items():
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            raise UsageError(
                f"{option} is for the widths of --bits, and what --scheme names has its own: add "
                f"--bits below 16, or leave {option} out"
            )


def _whole_numbers(entries: list[str]) -> list[int]:
    from quantdiff.errors import UsageError

    for entry in entries:
        if not entry.isdecimal():
            raise UsageError(f"--bits takes whole numbers, such as 16,8,6,4, and not {entry!r}")
    return [int(entry) for entry in entries]
