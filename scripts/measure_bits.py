"""Measures what low bits cost models, site by site: tables and figures of docs/bits.md.

    python scripts/measure_bits.py smollm2-135m
    torchrun --nproc-per-node 2 scripts/measure_bits.py smollm2-135m    # shared by two processes
    python scripts/measure_bits.py smollm2-135m --parts sites --tables-only

Every part is a sweep in a folder of its own under --out: one that was stopped goes on.
"""

import argparse
import os
import sys
from pathlib import Path

from quantdiff.analysis.evaluation import Text
from quantdiff.analysis.style import save_page
from quantdiff.analysis.sweep import SweepResults, make_grid, sweep
from quantdiff.analysis.sweep.lines import NO_WAY, lines, measures, way_label
from quantdiff.files import write_bytes
from quantdiff.quantization import schemes
from quantdiff.quantization.scheme import SITES

DOCS = Path(__file__).parents[1] / "docs"
PAGE = DOCS / "bits.md"
TEXT = Text("corpus", tokens=16_384, seq_len=1024)
DEPLOYED = (
    "W8A16", "W4A16", "W4g64A16", "W8A8", "W4A8", "KV8", "KV4", "KV2",
    "W8A8+KV8", "W8A8+KV8+L8", "W4g64A16+KV4+L6", "W4A8+KV4+L4",
)  # fmt: skip


def logits():
    """Ranges and granularities of the attention logits."""
    bits = (16, 8, 6, 5, 4, 3)
    dynamic = make_grid(bits=bits, granularities=("tensor", "head", "row"))
    static = make_grid(bits=bits, ranges=("absmax", "percentile:99.9", "mse", "entropy"))
    return [*dynamic.schemes, *static.schemes]


# Part -> what is quantized how, and the evaluation.
PARTS = {
    "logits": (logits, "divergence"),
    "questions": (lambda: make_grid(bits=(16, 8, 6, 4)).schemes, "choice:goal_inference@400"),
    "sites": (lambda: make_grid(bits=(16, 8, 6, 4), sites=SITES).schemes, "divergence"),
    "together": (lambda: [(), *map(schemes, DEPLOYED)], "divergence"),
}
FIGURES = {
    "logits": ("ranges", "KL against bits, by range and granularity"),
    "sites": ("sites", "KL against bits, by site"),
}
SHOWN = {
    "perplexity": ("Perplexity", "{:.2f}"),
    "kl": ("KL from the unquantized model (nats a token)", "{:.5f}"),
    "agreement": ("Agreement of the likeliest token", "{:.1%}"),
    "acc": ("Accuracy", "{:.3f}"),
    "acc_norm": ("Accuracy, choices' log-likelihoods divided by their length", "{:.3f}"),
}


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", nargs="+", help="for example smollm2-135m runs/plain")
    parser.add_argument("--parts", nargs="*", choices=PARTS, default=list(PARTS))
    parser.add_argument("--out", type=Path, default=DOCS / "bits")
    parser.add_argument("--tables-only", action="store_true", help="of what is measured already")
    options = parser.parse_args()
    first = int(os.environ.get("RANK", "0")) == 0
    for part in options.parts:
        chosen, evaluation = PARTS[part]
        folder = options.out / part
        if not options.tables_only:
            sweep(
                options.models, chosen(), [evaluation], out=folder, text=TEXT,
                progress=show if first else None,
            )  # fmt: skip
        if first:
            write(part, SweepResults.load(folder))


def show(done):
    left = "" if done.left is None else f", {done.left / 60:.0f} minutes left"
    told = f"{done.done:.1f} of {done.total} cells{left}: {done.doing}"
    sys.stderr.write(f"\r{told:100.100}")


def write(part, results):
    """Replace a part's tables in the page, and its figure."""
    begin, end = f"<!-- {part}: measured by scripts/measure_bits.py -->", f"<!-- end of {part} -->"
    text = PAGE.read_text(encoding="utf-8")
    before, rest = text.split(begin)
    after = rest.split(end)[1]
    content = "\n\n".join(tables(results))
    if part in FIGURES:
        kind, told = FIGURES[part]
        save_page(results.plot(kind, metric="kl"), DOCS / "figures" / f"bits_{part}")
        content += f"\n\n![{told}](figures/bits_{part}.png)"
    write_bytes(PAGE, f"{before}{begin}\n\n{content}\n\n{end}{after}".encode())


def tables(results):
    """One table a metric: a row a model and way of quantizing, a column a width."""
    for measure in measures(results):
        if measure.metric not in SHOWN:
            continue
        title, form = SHOWN[measure.metric]
        of_one = lines(results, measure)
        widths = sorted({bits for line in of_one for bits in line.points}, reverse=True)
        rows = [
            f"{title}:", "",
            f"| model | quantized | {' | '.join(map(str, widths))} |",
            f"|---|---|{'---:|' * len(widths)}",
        ]  # fmt: skip
        for line in of_one:
            way = "nothing" if line.way == NO_WAY else way_label(line.way)
            cells = (cell(line.points.get(bits), form) for bits in widths)
            rows.append(f"| {line.model} | {way} | {' | '.join(cells)} |")
        yield "\n".join(rows)


def cell(row, form):
    if row is None:
        return ""
    if row["status"] != "ok":
        return "failed"
    error = f" ± {form.format(row['stderr'])}" if row["stderr"] else ""
    return form.format(row["value"]) + error


if __name__ == "__main__":
    main()
