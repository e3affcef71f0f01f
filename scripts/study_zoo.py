"""What moves the outliers of small models: attention, seed, learning rate, context, heads, length.

Trains the `small` trio repeatedly, changing one thing at a time, and measures each model on the
held-out text: loss, the largest and the median attention logit and hidden state, and the loss with
quantized logits; the largest ones also during training, so that models can be compared at equal
loss. Models that are finished, or already in the results, are not trained again; interrupted ones
resume.

    python scripts/study_zoo.py --out runs/study
    python scripts/study_zoo.py --out runs/study --part 1/2     # and 2/2 beside it
    python scripts/study_zoo.py --out runs/study --collect      # into docs/
"""

import argparse
import contextlib
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from study_shown import draw, tables
from train_zoo import DATA, HELD_OUT_TEXT, Ranks, Run, held_out_loss
from zoo_recipe import KINDS, SIZES, Recipe, Stream, bigram_loss, train_tokenizer

import quantdiff
from quantdiff.files import write_bytes, write_json

BASE = replace(SIZES["small"], dtype="float32")
SEEDS = (0, 1, 2)
MEASURED = 32_768  # held-out tokens
BITS = (8, 6, 4, 3, 2)
LOOKS, LOOKED_AT = 24, 16  # how often outliers are measured during training; windows

# What is varied -> the recipes, by seed, in the order of training.
STUDY: dict[str, list[Recipe]] = {
    "rate 3e-3": [replace(BASE, seed=seed) for seed in SEEDS],
    "rate 1e-3": [replace(BASE, rate=1e-3)],
    "context 512": [replace(BASE, length=512, batch=BASE.batch // 2)],
    "8 heads of 16": [replace(BASE, heads=8)],
    "twice as long": [replace(BASE, tokens=2 * BASE.tokens)],
}
DOCS = Path(__file__).parent.parent / "docs"
RESULTS, PAGE = DOCS / "zoo_study.json", DOCS / "zoo.md"
FIGURE = DOCS / "figures" / "zoo_study"
CAPTION = (
    f"![Largest attention logit and hidden state against the loss](figures/{FIGURE.name}.png)\n\n"
    "Each line is one model's training, from left to right, measured on 16 held-out windows; its "
    "end is the dot."
)
BEGIN, END = "<!-- measured by scripts/study_zoo.py -->", "<!-- end -->"


def runs() -> list[tuple[str, Recipe, str]]:
    """(variant, recipe, kind) of every model."""
    return [(name, r, kind) for name, recipes in STUDY.items() for r in recipes for kind in KINDS]


def folder(out: Path, variant: str, recipe: Recipe) -> Path:
    return out / variant.replace(" ", "-") / f"seed-{recipe.seed}"


@torch.no_grad()
def measure(model: Any, windows: torch.Tensor) -> dict[str, Any]:
    """Outliers of a model, and its loss with logits quantized by dynamic ranges.

    Args:
        windows: held-out token ids, (W, N).
    """
    parts = windows.split(16)
    with quantdiff.record(model, top_k=100, detail="full") as recorder:
        for part in parts:
            model(input_ids=part, use_cache=False)
    profile = recorder.profile()
    told: dict[str, Any] = {}
    for site in ("attention_logits", "hidden_states"):
        values = getattr(profile, site)
        top = [item.value for item in values.top(100)]
        told[site] = {"top1": top[0], "top10": top[9], "top100": top[99], "median": values.median}
    losses = {"16": held_out_loss(model, windows, contextlib.nullcontext)[0]}
    for granularity in ("tensor", "head", "row"):
        for bits in BITS:
            scheme = quantdiff.Scheme("attention_logits", bits, granularity=granularity)
            with quantdiff.fake_quantize(model, scheme):
                value, _ = held_out_loss(model, windows, contextlib.nullcontext)
            losses[f"{granularity} {bits}"] = value
    return {**told, "losses": losses}


@torch.no_grad()
def look(model: Any, windows: torch.Tensor) -> dict[str, float]:
    """Loss and largest magnitudes of a model in training, over windows (W, N)."""
    with quantdiff.record(model, top_k=1, detail="extremes") as recorder:
        loss, _ = held_out_loss(model, windows, contextlib.nullcontext)
    profile = recorder.profile()
    logit, hidden = (
        getattr(profile, site).top(1)[0].value for site in ("attention_logits", "hidden_states")
    )
    return {"loss": loss, "logit": logit, "hidden": hidden}


def spread(windows: torch.Tensor, count: int) -> torch.Tensor:
    """Evenly spaced windows, `count` of them: the text is one source after another."""
    return windows[torch.linspace(0, len(windows) - 1, count).round().long()]


def train(out: Path, part: tuple[int, int]) -> None:
    """Train and measure what is missing of every n-th run."""
    tokenizer = train_tokenizer(DATA)
    streams = {n: Stream(DATA, tokenizer, n) for n in {r.length for _, r, _ in runs()}}
    test = Stream(HELD_OUT_TEXT, tokenizer, BASE.length)
    done = {key_of(told) for told in results()}
    # Shared out before finished runs are dropped: a part that starts later takes no other's models.
    shared = runs()[part[0] - 1 :: part[1]]
    mine = [run for run in shared if (run[0], run[1].seed, run[2]) not in done]
    columns = (
        TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed}/{task.total}"),
        TimeRemainingColumn(),
    )  # fmt: skip
    with Progress(*columns) as bar:
        every = bar.add_task("tokens", total=sum(r.tokens for _, r, _ in mine))
        for variant, recipe, kind in mine:
            place = folder(out, variant, recipe)
            if (place / kind / "measured.json").exists():
                bar.advance(every, recipe.tokens)
                continue
            length = recipe.length
            whole = test.tokens[: len(test.tokens) // length * length].astype(np.int64)
            held_out = spread(torch.from_numpy(whole).view(-1, length), MEASURED // length)
            run = Run(kind, recipe, place, streams[length], Ranks())
            run.resume()
            bar.advance(every, run.step * recipe.batch * length)
            bar.update(every, description=f"{variant}, seed {recipe.seed}, {kind}")
            few = spread(held_out, LOOKED_AT)
            for step in run.train(few, 120, contextlib.nullcontext):
                bar.advance(every, recipe.batch * length)
                if step % max(1, recipe.steps // LOOKS) == 0:
                    remember(run, few)
            if recipe.steps not in looks(run):
                remember(run, few)
            bigram = bigram_loss(streams[length].tokens, held_out.numpy())
            told = run.finish(held_out, tokenizer, bigram)
            # As saved: casting the module back would leave its rotary buffer rounded.
            model, _ = quantdiff.load(place / kind / "model", device="cpu", dtype="float32")
            measured = measure(model, held_out)
            path = [{"step": step, **told} for step, told in looks(run).items()]
            told |= {"variant": variant, "path": path}
            write_json(place / kind / "measured.json", {**told, **measured})
            (place / kind / "state.pt").unlink(missing_ok=True)


def remember(run: Run, windows: torch.Tensor) -> None:
    """Measure a model in training and save that: the step's own checkpoint came before."""
    rate = run.recipe.learning_rate(run.step - 1)
    run.records.append({"step": run.step, "look": look(run.model, windows) | {"rate": rate}})
    run.save()


def looks(run: Run) -> dict[int, dict[str, float]]:
    return {r["step"]: r["look"] for r in run.records if "look" in r}


def key_of(told: dict[str, Any]) -> tuple[str, int, str]:
    return told["variant"], told["recipe"]["seed"], told["kind"]


def results() -> list[dict[str, Any]]:
    """What was collected so far."""
    if not RESULTS.exists():
        return []
    models: list[dict[str, Any]] = json.loads(RESULTS.read_text())["models"]
    return models


def collect(out: Path) -> None:
    """Add what was measured to the results, and write them to docs/zoo.md."""
    found = {key_of(told): told for told in results()}
    for variant, recipe, kind in runs():
        path = folder(out, variant, recipe) / kind / "measured.json"
        if path.exists():
            told = json.loads(path.read_text())
            told["versions"] = {name: told["versions"][name] for name in ("torch", "transformers")}
            found[key_of(told)] = told
    order = [(variant, recipe.seed, kind) for variant, recipe, kind in runs()]
    models = [found[key] for key in order if key in found]
    write_json(RESULTS, {"measured_tokens": MEASURED, "models": models})
    before, _, rest = PAGE.read_text().partition(BEGIN)
    after = rest.partition(END)[2]
    told = f"{len(models)} of {len(order)} models are trained."
    if models:
        draw(models, FIGURE)
        told += f"\n\n{tables(models)}\n\n{CAPTION}"
    page = f"{before}{BEGIN}\n\n{told}\n\n{END}{after}"
    write_bytes(PAGE, page.encode())
    print(f"{len(models)} of {len(order)} models written to {RESULTS}")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--part", default="1/1", help="train every n-th model: 1/2, 2/2")
    parser.add_argument("--collect", action="store_true", help="write what was measured alone")
    options = parser.parse_args()
    if options.collect:
        collect(options.out)
        return 0
    first, count = (int(x) for x in options.part.split("/"))
    train(options.out, (first, count))
    return 0


if __name__ == "__main__":
    sys.exit(main())
