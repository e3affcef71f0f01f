"""Measure what low bits cost models, site by site: tables and figures of docs/bits.md.

    python scripts/measure_bits.py smollm2-135m
    torchrun --nproc-per-node 2 scripts/measure_bits.py smollm2-135m    # shared by two processes
    python scripts/measure_bits.py smollm2-135m --parts sites --tables-only
    python scripts/measure_bits.py zoo:transformer zoo:diff-v1 zoo:diff-v2    # docs/bits_zoo.md

Every part is a sweep in a folder of its own under --out; one that was stopped resumes.
"""

import argparse
import gc
import math
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from bits_page import Page, data, names

from quantdiff.analysis.evaluation import Text
from quantdiff.analysis.sensitivity import Sensitivity
from quantdiff.analysis.sweep import SweepResults, make_grid, sweep
from quantdiff.analysis.sweep.mixed import plan_bits
from quantdiff.analysis.sweep.ranking import plot_sensitivity
from quantdiff.analysis.text import four_digits
from quantdiff.errors import UsageError
from quantdiff.models import context_length, load
from quantdiff.quantization import Scheme, schemes
from quantdiff.quantization.scheme import SITES

FIRST = int(os.environ.get("RANK", "0")) == 0
# Windows are shorter where a model's context is.
TEXT = Text("corpus", tokens=16_384, seq_len=1024)
DEPLOYED = (
    "W8A16", "W4A16", "W4g{group}A16", "W8A8", "W4A8", "KV8", "KV4", "KV2",
    "W8A8+KV8", "W8A8+KV8+L8", "W4g{group}A16+KV4+L6", "W4A8+KV4+L4",
)  # fmt: skip
REMEDIED = ("W8A8", "W4A8", "W4A16", "W3A16", "L4")
REMEDIES = ("none", "smooth:0.5", "rotate", "gptq", "rotate+gptq")

# Layer by layer: sites, widths and text of the search, another text to compare its ranking with,
# and average bits. What the search proposes is measured on TEXT, which it has not seen.
LAYERS = "layers"
SEARCHED = ("attention_logits", "weights")
WIDTHS, RANKED, BUDGET = (6, 4, 3), 4, 4
SEARCH = Text("corpus:train", tokens=2048, seq_len=512)
OTHER = Text("corpus", tokens=2048, seq_len=512)


def remedied(_):
    """Short names, and, instead of a remedy, inputs whose largest values are clipped.

    For comparison, inputs on the same static grids without clipping: one grid for all tokens has
    its own cost.
    """
    static = [
        [
            replace(scheme, range=clipping, granularity="tensor")
            if scheme.site == "linear_inputs"
            else scheme
            for scheme in schemes("W8A8")
        ]
        for clipping in ("absmax", "percentile:99.9")
    ]
    return [(), *map(schemes, REMEDIED), *static]


def together(page):
    """Short names, with groups of weights that divide the rows of all models of a page."""
    return [(), *(schemes(name.format(group=page.group)) for name in DEPLOYED)]


def logits(_):
    """Ranges and granularities of the attention logits."""
    bits = (16, 8, 6, 5, 4, 3)
    dynamic = make_grid(bits=bits, granularities=("tensor", "head", "row"))
    static = make_grid(bits=bits, ranges=("absmax", "percentile:99.9", "mse", "entropy"))
    return [*dynamic.schemes, *static.schemes]


@dataclass(frozen=True)
class Part:
    """What one sweep computes.

    Attributes:
        schemes: gives those to try on a page's models.
        evaluation: of every cell.
        remedies: tried with each scheme.
        figure: kind and words, as `Page.content` takes them.
    """

    schemes: Callable[[Page], Sequence[object]]
    evaluation: str = "divergence"
    remedies: Sequence[str] = ("none",)
    figure: tuple[str, str] | None = None


PARTS = {
    "logits": Part(logits, figure=("ranges", "KL against bits, by range and granularity")),
    "questions": Part(
        lambda _: make_grid(bits=(16, 8, 6, 4)).schemes,
        "choice:goal_inference@400",
        figure=("bits", "accuracy against bits of the attention logits, and the paper's Figure 8"),
    ),
    "sites": Part(
        lambda _: make_grid(bits=(16, 8, 6, 4), sites=SITES).schemes,
        figure=("sites", "KL against bits, by site"),
    ),
    "together": Part(together),
    "remedies": Part(remedied, remedies=REMEDIES),
}


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", nargs="+", help="for example smollm2-135m runs/plain")
    parser.add_argument("--parts", nargs="*", choices=[*PARTS, LAYERS], default=[*PARTS, LAYERS])
    parser.add_argument("--out", type=Path, help="default: docs/bits, or docs/bits/zoo of the zoo")
    parser.add_argument("--tables-only", action="store_true", help="of what is measured already")
    options = parser.parse_args()
    try:
        page = Page.of(options.models)
        if options.out is not None:
            page = replace(page, results=options.out)
        seq_len = None if options.tables_only else shortest(options.models)
        for part in options.parts:
            if not options.tables_only:
                measure(options.models, part, page, seq_len)
            if FIRST and (page.results / part).exists():
                page.write(part, content(part, page))
    except UsageError as error:
        sys.exit(f"error: {error}")


def shortest(models):
    """The shortest context: models are compared on the same windows."""
    found = []
    for name in models:
        model, _ = load(name, device="cpu")
        found.append(context_length(model) or math.inf)
        del model
        gc.collect()
    return min(found)


def fitted(text, seq_len):
    return replace(text, seq_len=min(text.seq_len, seq_len))


def measure(models, part, page, seq_len):
    folder = page.results / part
    if part == LAYERS:
        measure_layers(models, folder, seq_len)
        return
    one = PARTS[part]
    computed(
        models, one.schemes(page), folder, fitted(TEXT, seq_len), one.evaluation,
        remedies=one.remedies,
    )  # fmt: skip


def content(part, page):
    if part == LAYERS:
        return layers_content(page)
    return page.content(part, SweepResults.load(page.results / part), PARTS[part].figure)


def computed(models, wanted, folder, text, evaluation="divergence", **more):
    found = sweep(
        models, wanted, [evaluation], out=folder, text=text, progress=show if FIRST else None,
        note=say if FIRST else None, device="cpu", dtype="float32", **more,
    )  # fmt: skip
    for row in found.failed:
        say(f"{row['model']}, {row['scheme']}: {row['error']}")
    return found


def say(sentence):
    print(f"\n{sentence}", file=sys.stderr)


def measure_layers(models, folder, seq_len):
    """Sweep one layer at a time on two texts, and mixed and uniform bits on a third."""
    ranked = [Scheme(site, RANKED) for site in SEARCHED]
    computed(models, ranked, folder / "other", fitted(OTHER, seq_len), each="layer")
    grid = [Scheme(site, bits) for site in SEARCHED for bits in WIDTHS]
    found = computed(models, grid, folder / "search", fitted(SEARCH, seq_len), each="layer")
    for model in models:
        wanted = [schemes for plan in plans(found, model) for schemes in plan.wanted]
        computed([model], [(), *wanted], folder / "unseen", fitted(TEXT, seq_len))


def plans(found, model):
    return [plan_bits(Sensitivity.of(found, model=model, site=site), BUDGET) for site in SEARCHED]


def layers_content(page):
    """The table of `measure_layers`, and one figure per model and site."""
    search, other, unseen = (
        SweepResults.load(page.results / LAYERS / name) for name in ("search", "other", "unseen")
    )
    rows = [
        f"| model | site | rank correlation at {RANKED} bits | average bits | "
        "sum of the layers' KL, search text | KL on unseen text | uniform bits | "
        "KL on unseen text |",
        "|---|---|---:|---:|---:|---:|---:|---:|",
    ]
    figures = []
    for model in search.models:
        for site, plan in zip(SEARCHED, plans(search, model), strict=True):
            one = plan.sensitivity
            ranks = one.correlation(Sensitivity.of(other, model=model, site=site), RANKED)
            told = plan.told(unseen)
            costs = (told[n] for n in ("expected", "measured", "uniform_measured"))
            expected, mixed, uniform = ("" if c is None else four_digits(c) for c in costs)
            rows.append(
                f"| {model} | {site.replace('_', ' ')} | {ranks:.3f} | {told['average']:.2f} | "
                f"{expected} | {mixed} | {told['uniform']} | {uniform} |"
            )
            words = f"KL of {model}, one layer's {site.replace('_', ' ')} at a time"
            name = f"{LAYERS}_{names(search)[model]}_{site}"
            figures.append(page.drawn(plot_sensitivity(one), name, words))
    told = [
        f"{what}: {sentence}"
        for what, results in (("Searched", search), ("Ranked again", other), ("Unseen", unseen))
        for sentence in data(results)
    ]
    return "\n\n".join(["\n".join(rows), *told, *figures])


def show(done):
    left = "" if done.left is None else f", {done.left / 60:.0f} minutes left"
    told = f"{done.done:.1f} of {done.total} cells{left}: {done.doing}"
    sys.stderr.write(f"\r{told:100.100}")


if __name__ == "__main__":
    main()
