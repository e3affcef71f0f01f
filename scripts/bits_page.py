"""The pages that `measure_bits.py` writes: docs/bits.md, and docs/bits_zoo.md for the zoo."""

import math
from dataclasses import dataclass
from pathlib import Path

from quantdiff.analysis.published import FIGURE_8, FIGURE_8_SOURCE, FIGURE_8_UNSAID, MODELS
from quantdiff.analysis.style import save_page
from quantdiff.analysis.sweep.lines import NO_WAY, lines, measures, model_labels, way_label
from quantdiff.analysis.text import four_digits, slug
from quantdiff.errors import UsageError
from quantdiff.files import write_bytes

DOCS = Path(__file__).parents[1] / "docs"
# Metric -> its title and format; None where it varies by orders of magnitude between widths.
SHOWN = {
    "perplexity": ("Perplexity", ".2f"),
    "kl": ("KL from the unquantized model (nats per token)", None),
    "agreement": ("Agreement of the likeliest token", ".1%"),
    "acc": ("Accuracy", ".3f"),
    "acc_norm": ("Accuracy, choices' log-likelihoods divided by their length", ".3f"),
}


@dataclass(frozen=True)
class Page:
    """A page, and what belongs to it.

    Attributes:
        file: the page; its figures are in `figures` beside it.
        results: folder of the sweeps.
        prefix: of the names of its figures.
        group: weights per group, for schemes with groups; divides the rows of all its models.
    """

    file: Path
    results: Path
    prefix: str
    group: int

    @classmethod
    def of(cls, models):
        """The zoo's page, or that of all other models."""
        of_zoo = [name.startswith("zoo:") for name in models]
        if not any(of_zoo):
            return cls(DOCS / "bits.md", DOCS / "bits", "bits", 64)
        if not all(of_zoo):
            raise UsageError("the zoo has a page of its own: measure its models by themselves")
        return cls(DOCS / "bits_zoo.md", DOCS / "bits" / "zoo", "bits_zoo", 8)

    def write(self, part, told):
        """Replace the content of a part."""
        begin = f"<!-- {part}: measured by scripts/measure_bits.py -->"
        end = f"<!-- end of {part} -->"
        before, rest = self.file.read_text(encoding="utf-8").split(begin)
        after = rest.split(end)[1]
        write_bytes(self.file, f"{before}{begin}\n\n{told}\n\n{end}{after}".encode())

    def drawn(self, figure, name, words):
        """Write a figure and return the line that shows it."""
        name = f"{self.prefix}_{name}"
        save_page(figure, self.file.parent / "figures" / name)
        return f"![{words}](figures/{name}.png)"

    def content(self, part, results, figure):
        """The tables of a part, what they were measured on, and its figures.

        Args:
            part: name.
            results: of its sweep.
            figure: kind, and what it shows; one figure per model, except `bits`, which has one line
                per model, beside the published ones. None where schemes, not widths, are compared:
                such a part has no figure.
        """
        drawn = tables(results) if figure else scheme_tables(results)
        told = [*drawn, *failures(results), *data(results)]
        done = {row["model"] for row in results.rows if row["status"] == "ok" and row["site"]}
        if figure is None or not done:
            return "\n\n".join(told)
        kind, words = figure
        if kind == "bits":
            told += [published(), self.drawn(results.plot(kind, published=True), part, words)]
            return "\n\n".join(told)
        short = names(results)
        for model in (model for model in results.models if model in done):
            name, of_one = part, words
            if len(results.models) > 1:
                name, of_one = f"{part}_{short[model]}", f"{words}: {model}"
            told.append(self.drawn(results.plot(kind, metric="kl", model=model), name, of_one))
        return "\n\n".join(told)


def names(results):
    """The models' names in file names."""
    return {model: slug(label) for model, label in model_labels(results.models).items()}


def tables(results):
    """One table per metric: one row per model and scheme, one column per width."""
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


def scheme_tables(results):
    """One row per scheme and remedy; columns are metrics, or models if there are several."""
    found = {}  # (scheme, remedy) -> (metric, model) -> line of the results
    shown = [measure for measure in measures(results) if measure.metric in SHOWN]
    for measure in shown:
        for line in lines(results, measure):
            for row in line.points.values():
                key = scheme_label(row, line.way), row["options"].get("remedy", "")
                found.setdefault(key, {})[measure.metric, line.model] = row
    remedied = any(remedy for _, remedy in found)
    if len(results.models) == 1:
        wanted = [
            (
                f"{results.models[0]}:\n\n",
                [(*SHOWN[one.metric], one.metric, results.models[0]) for one in shown],
            )
        ]
    else:
        wanted = [
            (f"{SHOWN[one.metric][0]}:\n\n",
             [(model, SHOWN[one.metric][1], one.metric, model) for model in results.models])
            for one in shown
        ]  # fmt: skip
    for title, columns in wanted:
        heads = ["quantized", *["remedy"] * remedied, *(head for head, *_ in columns)]
        rows = [f"| {' | '.join(heads)} |", f"|{'---|' * (1 + remedied)}{'---:|' * len(columns)}"]
        for (scheme, remedy), of_one in found.items():
            cells = [cell(of_one.get((metric, m)), layout) for _, layout, metric, m in columns]
            rows.append(f"| {' | '.join([scheme, *[remedy] * remedied, *cells])} |")
        yield title + "\n".join(rows)


def scheme_label(row, way):
    if row["site"] is None:
        return "nothing"
    told = way_label(way._replace(remedy=None))
    return told if told.startswith(row["scheme"]) else f"{row['scheme']}: {told}"


def cell(row, layout):
    """A value and its error; `layout` as in `SHOWN`."""
    if row is None:
        return ""
    if row["status"] != "ok":
        return "failed"
    value, error = row["value"], row["stderr"]
    if layout is None:
        if not error:
            return four_digits(value)
        # Down to the second digit of the error.
        layout = f".{max(1 - math.floor(math.log10(error)), 0)}f"
    if value >= 1000:  # a perplexity of a model that is broken
        layout = ",.0f"
    return f"{value:{layout}}" + (f" ± {error:{layout}}" if error else "")


def failures(results):
    """Why cells failed, one sentence each."""
    for row in results.failed:
        yield f"Failed: {row['model']}, {row['scheme']}: {row['error']}"


def data(results):
    """What the evaluations of a sweep ran on, one sentence each."""
    told = {}
    for about in results.record["models"].values():
        for one in about["evaluations"].values():
            settings, source = one["settings"], one["source"]
            if "seq_len" in settings:
                what = f"{settings['tokens']:,} tokens of `{source}` in windows of"
                told[f"{what} {settings['seq_len']:,}."] = None
            else:
                told[f"{settings['questions']:,} questions of `{source}`."] = None
    return list(told)


def published():
    """The paper's Figure 8 as a table."""
    widths = list(next(iter(FIGURE_8.values())))
    rows = [f"| published | {' | '.join(map(str, widths))} |", f"|---|{'---:|' * len(widths)}"]
    for model, values in FIGURE_8.items():
        rows.append(f"| {model} | {' | '.join(f'{values[bits]:.3f}' for bits in widths)} |")
    return "\n".join([*rows, "", f"{FIGURE_8_SOURCE}. {MODELS}. {FIGURE_8_UNSAID}"])
