"""Export models in every format that works here, and write the tables of docs/export.md.

    python scripts/measure_exports.py smollm2-135m --tokens 16384
    python scripts/measure_exports.py --table-only    # of what is measured already

Results go to docs/export/results.jsonl as they come, so that a stopped run resumes. Results with
other tokens, windows or dtype are kept apart, in a table of their own. Results of other weights
under a model's name, or of other versions, are replaced. A checkpoint that does not reproduce the
logits from before it was saved is reported and makes the exit code 1.
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
from quantdiff.analysis.sweep.identity import deciding_versions, model_fingerprint
from quantdiff.analysis.text import four_digits
from quantdiff.errors import UsageError, VerificationError
from quantdiff.export import FORMATS
from quantdiff.export.card import percent
from quantdiff.files import write_bytes
from quantdiff.models import context_length, load

DOCS = Path(__file__).parents[1] / "docs"
DATA = "corpus"
BEGIN, END = "<!-- measured by scripts/measure_exports.py -->", "<!-- end -->"
WEIGHTS_ALONE = (
    "Weights alone are quantized, except that `ct-w8a8` and `bnb-int8` round the inputs of linear "
    "layers to 8 bits too, and `bf16`, `fp16` and `bnb-int8` compute in 16 bits. A "
    "source's size is that of the model as loaded."
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
    failed = []
    if not arguments.table_only:
        arguments.out.mkdir(parents=True, exist_ok=True)
        asked = {
            "dtype": arguments.dtype, "data": DATA, "tokens": arguments.tokens,
            "seq_len": arguments.seq_len,
        }  # fmt: skip
        for name in arguments.models:
            rows = measure(name, arguments.formats, asked, rows, results, failed)
    if rows:
        write(rows)
    elif not failed:
        sys.exit(f"{results} has no results: name a model to measure")
    if failed:
        sys.exit(1)


def measure(name, formats, asked, rows, results, failed):
    """Measure what a model still lacks, saving each row as it comes, and return all rows."""
    model, tokenizer = load(name, dtype=asked["dtype"])
    about = {
        "model": name, "asked": asked, "versions": deciding_versions(),
        "model_fingerprint": model_fingerprint(model, tokenizer),
    }  # fmt: skip
    rows = [row for row in rows if not of_other_weights(row, about)]
    done = [row["format"] for row in rows if row | about == row]
    wanted = [format_ for format_ in formats if format_ not in done]
    for row in measured(model, tokenizer, wanted, about, failed):
        rows = [other for other in rows if not replaced(other, row)] + [row]
        write_bytes(results, "".join(json.dumps(one) + "\n" for one in rows).encode())
        print(json.dumps(row), flush=True)
    return rows


def of_other_weights(row, about):
    """Whether a row has the model's name and dtype, but not its weights."""
    return (
        row["model"] == about["model"]
        and row["asked"]["dtype"] == about["asked"]["dtype"]
        and row.get("model_fingerprint") != about["model_fingerprint"]
    )


def replaced(row, by):
    return all(row[entry] == by[entry] for entry in ("model", "format", "asked"))


def measured(model, tokenizer, formats, about, failed):
    """A row for each format that works; one whose checkpoint fails its check goes to `failed`."""
    asked = about["asked"]
    length = min(asked["seq_len"], context_length(model) or asked["seq_len"])
    text = Text(asked["data"], asked["tokens"], length)
    for format_ in formats:
        function, _ = measuring(model, tokenizer, text)
        with tempfile.TemporaryDirectory(prefix="quantdiff-exports-") as place:
            try:
                made = quantdiff.export(
                    model, tokenizer, Path(place) / "checkpoint", format=format_, measure=function
                )
            except (UsageError, VerificationError) as error:
                print(f"{about['model']} {format_}: {error}", flush=True)
                if isinstance(error, VerificationError):
                    failed.append(format_)
                continue
        row = made.to_json()
        exact = [c for c in row.pop("verification")["checks"] if c["name"] == "logits"]
        command = shlex.join(["python", "scripts/measure_exports.py", *sys.argv[1:]])
        yield row | about | {"command": command, "reload": exact[0]["detail"], "folder": None}
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
        "| model | format | MB | bits per weight | perplexity | KL, nats | agreement | reload |",
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
