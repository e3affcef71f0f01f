"""Exports models in every format that works here, and writes the tables of docs/export.md.

    python scripts/measure_exports.py smollm2-135m --tokens 16384
    python scripts/measure_exports.py --table-only    # of what is measured already

Results go to docs/export/results.jsonl as they come, so that a run that was stopped goes on. Other
tokens, other windows or another dtype are other results, and have a table of their own.
"""

import argparse
import gc
import json
import shlex
import sys
import tempfile
from itertools import groupby
from pathlib import Path

import quantdiff
from quantdiff.analysis.evaluation import Text
from quantdiff.analysis.exported import measuring
from quantdiff.analysis.text import four_digits
from quantdiff.errors import UsageError
from quantdiff.export import FORMATS
from quantdiff.export.card import percent
from quantdiff.models import context_length, load

DOCS = Path(__file__).parents[1] / "docs"
DATA = "corpus"
BEGIN, END = "<!-- measured by scripts/measure_exports.py -->", "<!-- end -->"
WEIGHTS_ALONE = (
    "Weights alone are quantized, except that `ct-w8a8` and `bnb-int8` round the inputs of linear "
    "layers to 8 bits too, and `bf16`, `fp16` and `bnb-int8` compute in 16 bits."
)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", nargs="*", help="for example smollm2-135m zoo:diff-v1")
    parser.add_argument("--formats", nargs="*", default=list(FORMATS))
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--seq-len", type=int, default=1024, help="or a model's context")
    parser.add_argument("--out", type=Path, default=DOCS / "export")
    parser.add_argument("--table-only", action="store_true", help="write the tables again")
    arguments = parser.parse_args()
    results = arguments.out / "results.jsonl"
    rows = [json.loads(line) for line in results.open()] if results.exists() else []
    if not arguments.table_only:
        arguments.out.mkdir(parents=True, exist_ok=True)
        asked = {
            "dtype": arguments.dtype, "data": DATA, "tokens": arguments.tokens,
            "seq_len": arguments.seq_len,
        }  # fmt: skip
        done = {(row["model"], row["format"]) for row in rows if row["asked"] == asked}
        for name in arguments.models:
            wanted = [f for f in arguments.formats if (name, f) not in done]
            for row in measure(name, wanted, asked):
                with results.open("a") as file:
                    file.write(json.dumps(row) + "\n")
                rows.append(row)
                print(json.dumps(row), flush=True)
    if not rows:
        sys.exit(f"{results} has no results: name a model to measure")
    write(rows)


def measure(name, formats, asked):
    if not formats:
        return
    model, tokenizer = load(name, dtype=asked["dtype"])
    length = min(asked["seq_len"], context_length(model) or asked["seq_len"])
    text = Text(asked["data"], asked["tokens"], length)
    for format_ in formats:
        function, _ = measuring(model, tokenizer, text)
        with tempfile.TemporaryDirectory(prefix="quantdiff-exports-") as place:
            try:
                made = quantdiff.export(
                    model, tokenizer, Path(place) / "checkpoint", format=format_, measure=function
                )
            except UsageError as error:
                print(f"{name} {format_}: {error}", flush=True)
                continue
        row = made.to_json()
        exact = [c for c in row.pop("verification")["checks"] if c["name"] == "logits"]
        command = shlex.join(["python", "scripts/measure_exports.py", *sys.argv[1:]])
        yield row | {
            "model": name, "asked": asked, "command": command, "reload": exact[0]["detail"],
            "folder": None,
        }  # fmt: skip
        gc.collect()


def write(rows):
    page = DOCS / "export.md"
    text = page.read_text(encoding="utf-8")
    before, rest = text.split(BEGIN)
    after = rest.split(END)[1]
    page.write_text(f"{before}{BEGIN}\n\n{tables(rows)}\n\n{END}{after}", encoding="utf-8")


def tables(rows):
    """A table for each dtype and text, with what it was measured on."""
    parts = []
    for _, group in groupby(sorted(rows, key=_how), key=_how):
        own = list(group)
        data, dtype = own[0]["measured"]["data"], own[0]["asked"]["dtype"]
        commands = " and ".join(f"`{one}`" for one in dict.fromkeys(row["command"] for row in own))
        parts.append(table(own))
        parts.append(f"Measured on {data}, from {dtype}, by {commands}. {WEIGHTS_ALONE}")
    return "\n\n".join(parts)


def _how(row):
    return json.dumps([row["asked"], row["measured"]["data"]])


def table(rows):
    lines = [
        "| model | format | MB | bits a weight | perplexity | KL, nats | agreement | reload |",
        "|---|---|---|---|---|---|---|---|",
    ]
    order = list(FORMATS)
    rows = sorted(rows, key=lambda row: (row["model"], order.index(row["format"])))
    for number, row in enumerate(rows):
        measured = row["measured"]
        if not number or rows[number - 1]["model"] != row["model"]:
            bits = 8 * row["source_bytes"] / row["parameters"]
            lines.append(
                f"| {row['model']} | source | {row['source_bytes'] / 1e6:.1f} | {bits:.2f} | "
                f"{measured['source']['perplexity']:.3f} | | | |"
            )
        reload = "to the bit" if row["reload"].endswith("to the bit") else row["reload"]
        lines.append(
            f"| | {row['format']} | {row['bytes'] / 1e6:.1f} | {row['bits_per_weight']:.2f} | "
            f"{measured['perplexity']:.3f} | {four_digits(measured['kl'])} | "
            f"{percent(measured['agreement'])} | {reload} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
