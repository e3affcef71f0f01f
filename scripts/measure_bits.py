"""Measures what low bits cost models, site by site: tables and figures of docs/bits.md.

    python scripts/measure_bits.py smollm2-135m
    torchrun --nproc-per-node 2 scripts/measure_bits.py smollm2-135m    # shared by two processes
    python scripts/measure_bits.py smollm2-135m --parts sites --tables-only

Every part is a sweep in a folder of its own under --out: one that was stopped goes on.
"""

import argparse
import math
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from quantdiff.analysis.evaluation import Text
from quantdiff.analysis.sensitivity import Sensitivity
from quantdiff.analysis.style import save_page
from quantdiff.analysis.sweep import SweepResults, make_grid, sweep
from quantdiff.analysis.sweep.lines import NO_WAY, lines, measures, way_label
from quantdiff.analysis.sweep.mixed import plan_bits
from quantdiff.analysis.sweep.ranking import plot_sensitivity
from quantdiff.analysis.text import four_digits, slug
from quantdiff.files import write_bytes
from quantdiff.quantization import Scheme, schemes
from quantdiff.quantization.scheme import SITES

DOCS = Path(__file__).parents[1] / "docs"
PAGE = DOCS / "bits.md"
FIRST = int(os.environ.get("RANK", "0")) == 0
TEXT = Text("corpus", tokens=16_384, seq_len=1024)
DEPLOYED = (
    "W8A16", "W4A16", "W4g64A16", "W8A8", "W4A8", "KV8", "KV4", "KV2",
    "W8A8+KV8", "W8A8+KV8+L8", "W4g64A16+KV4+L6", "W4A8+KV4+L4",
)  # fmt: skip
REMEDIED = ("W8A8", "W4A8", "W4A16", "W3A16", "L4")
REMEDIES = ("none", "smooth:0.5", "rotate", "gptq", "rotate+gptq")

# Layer by layer: sites, widths and text of the search, another text to hold its ranking against,
# and average bits. What the search proposes is measured on TEXT, which it has not seen.
LAYERS = "layers"
SEARCHED = ("attention_logits", "weights")
WIDTHS, RANKED, BUDGET = (6, 4, 3), 4, 4
SEARCH = Text("corpus:train", tokens=2048, seq_len=512)
OTHER = Text("corpus", tokens=2048, seq_len=512)


def remedied():
    """Short names, and in place of a remedy inputs whose largest values are clipped."""
    clipped = [
        replace(scheme, range="percentile:99.9", granularity="tensor")
        if scheme.site == "linear_inputs"
        else scheme
        for scheme in schemes("W8A8")
    ]
    return [(), *map(schemes, REMEDIED), clipped]


def logits():
    """Ranges and granularities of the attention logits."""
    bits = (16, 8, 6, 5, 4, 3)
    dynamic = make_grid(bits=bits, granularities=("tensor", "head", "row"))
    static = make_grid(bits=bits, ranges=("absmax", "percentile:99.9", "mse", "entropy"))
    return [*dynamic.schemes, *static.schemes]


@dataclass(frozen=True)
class Part:
    """What one sweep computes.

    Attributes:
        schemes: that are tried.
        evaluation: of every cell.
        remedies: tried with each.
        figure: kind of figure, and what it shows.
    """

    schemes: Callable[[], Sequence[object]]
    evaluation: str = "divergence"
    remedies: Sequence[str] = ("none",)
    figure: tuple[str, str] | None = None


PARTS = {
    "logits": Part(logits, figure=("ranges", "KL against bits, by range and granularity")),
    "questions": Part(lambda: make_grid(bits=(16, 8, 6, 4)).schemes, "choice:goal_inference@400"),
    "sites": Part(
        lambda: make_grid(bits=(16, 8, 6, 4), sites=SITES).schemes,
        figure=("sites", "KL against bits, by site"),
    ),
    "together": Part(lambda: [(), *map(schemes, DEPLOYED)]),
    "remedies": Part(remedied, remedies=REMEDIES),
}
# Metric -> its title and layout, None where it falls by decades from one width to another.
SHOWN = {
    "perplexity": ("Perplexity", ".2f"),
    "kl": ("KL from the unquantized model (nats a token)", None),
    "agreement": ("Agreement of the likeliest token", ".1%"),
    "acc": ("Accuracy", ".3f"),
    "acc_norm": ("Accuracy, choices' log-likelihoods divided by their length", ".3f"),
}


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", nargs="+", help="for example smollm2-135m runs/plain")
    parser.add_argument("--parts", nargs="*", choices=[*PARTS, LAYERS], default=[*PARTS, LAYERS])
    parser.add_argument("--out", type=Path, default=DOCS / "bits")
    parser.add_argument("--tables-only", action="store_true", help="of what is measured already")
    options = parser.parse_args()
    for part in options.parts:
        folder = options.out / part
        if part == LAYERS:
            if not options.tables_only:
                measure_layers(options.models, folder)
            if FIRST:
                write(part, layers_content(folder))
            continue
        if not options.tables_only:
            chosen = PARTS[part]
            computed(
                options.models, chosen.schemes(), folder, TEXT, chosen.evaluation,
                remedies=chosen.remedies,
            )  # fmt: skip
        if FIRST:
            write(part, content(part, SweepResults.load(folder)))


def computed(models, wanted, folder, text, evaluation="divergence", **more):
    return sweep(
        models, wanted, [evaluation], out=folder, text=text, progress=show if FIRST else None,
        note=say if FIRST else None, **more,
    )  # fmt: skip


def say(sentence):
    print(f"\n{sentence}", file=sys.stderr)


def measure_layers(models, folder):
    """One layer at a time on two texts, and shared-out bits beside uniform ones on a third."""
    ranked = [Scheme(site, RANKED) for site in SEARCHED]
    computed(models, ranked, folder / "other", OTHER, each="layer")
    grid = [Scheme(site, bits) for site in SEARCHED for bits in WIDTHS]
    found = computed(models, grid, folder / "search", SEARCH, each="layer")
    for model in models:
        wanted = [schemes for plan in plans(found, model) for schemes in plan.wanted]
        computed([model], [(), *wanted], folder / "unseen", TEXT)


def plans(found, model):
    return [plan_bits(Sensitivity.of(found, model=model, site=site), BUDGET) for site in SEARCHED]


def layers_content(folder):
    """The table of `measure_layers`, and a figure a model and site."""
    search, other, unseen = (
        SweepResults.load(folder / name) for name in ("search", "other", "unseen")
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
            name = f"bits_layers_{slug(model)}_{site}"
            save_page(plot_sensitivity(one), DOCS / "figures" / name)
            words = f"KL of {model}, one layer's {site.replace('_', ' ')} at a time"
            figures.append(f"![{words}](figures/{name}.png)")
    return "\n\n".join(["\n".join(rows), *figures])


def show(done):
    left = "" if done.left is None else f", {done.left / 60:.0f} minutes left"
    told = f"{done.done:.1f} of {done.total} cells{left}: {done.doing}"
    sys.stderr.write(f"\r{told:100.100}")


def write(part, told):
    """Replace what a part says on the page."""
    begin, end = f"<!-- {part}: measured by scripts/measure_bits.py -->", f"<!-- end of {part} -->"
    text = PAGE.read_text(encoding="utf-8")
    before, rest = text.split(begin)
    after = rest.split(end)[1]
    write_bytes(PAGE, f"{before}{begin}\n\n{told}\n\n{end}{after}".encode())


def content(part, results):
    """A part's tables, and its figure."""
    told = list(tables(results))
    if PARTS[part].figure is not None:
        kind, words = PARTS[part].figure
        save_page(results.plot(kind, metric="kl"), DOCS / "figures" / f"bits_{part}")
        told.append(f"![{words}](figures/bits_{part}.png)")
    return "\n\n".join(told)


def tables(results):
    """One table a metric: a row a model and way of quantizing, a column a width."""
    for measure in measures(results):
        if measure.metric not in SHOWN:
            continue
        title, layout = SHOWN[measure.metric]
        of_one = lines(results, measure)
        widths = sorted({bits for line in of_one for bits in line.points}, reverse=True)
        rows = [
            f"{title}:", "",
            f"| model | quantized | {' | '.join(map(str, widths))} |",
            f"|---|---|{'---:|' * len(widths)}",
        ]  # fmt: skip
        for line in of_one:
            way = "nothing" if line.way == NO_WAY else way_label(line.way)
            cells = (cell(line.points.get(bits), layout) for bits in widths)
            rows.append(f"| {line.model} | {way} | {' | '.join(cells)} |")
        yield "\n".join(rows)


def cell(row, layout):
    if row is None:
        return ""
    if row["status"] != "ok":
        return "failed"
    value, error = row["value"], row["stderr"]
    if layout is None:
        if not error:
            return four_digits(value)
        # As far as the second digit of the error.
        layout = f".{max(1 - math.floor(math.log10(error)), 0)}f"
    return f"{value:{layout}}" + (f" ± {error:{layout}}" if error else "")


if __name__ == "__main__":
    main()
