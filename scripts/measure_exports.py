"""Exports models in every format that works here, and writes the table of docs/export.md.

Results go to runs/exports/results.jsonl as they come, so that a run that was stopped goes on.
"""

import argparse
import gc
import json
import shutil
from pathlib import Path

import quantdiff
from quantdiff.analysis.evaluation import Text
from quantdiff.analysis.exported import measuring
from quantdiff.errors import UsageError
from quantdiff.export import FORMATS
from quantdiff.models import load

ROOT = Path(__file__).parents[1]
BEGIN, END = "<!-- measured by scripts/measure_exports.py -->", "<!-- end -->"


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="+", help="for example smollm2-135m zoo:diff-v1")
    parser.add_argument("--formats", nargs="*", default=list(FORMATS))
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--seq-len", type=int, default=1024)
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "exports")
    parser.add_argument("--table-only", action="store_true", help="write the table again")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    results = arguments.out / "results.jsonl"
    rows = [json.loads(line) for line in results.open()] if results.exists() else []
    if not arguments.table_only:
        done = {(row["model"], row["format"]) for row in rows}
        for name in arguments.models:
            wanted = [f for f in arguments.formats if (name, f) not in done]
            for row in measure(name, wanted, arguments):
                with results.open("a") as file:
                    file.write(json.dumps(row) + "\n")
                rows.append(row)
                print(json.dumps(row), flush=True)
    write(rows)


def measure(name, formats, arguments):
    if not formats:
        return
    model, tokenizer = load(name, dtype=arguments.dtype)
    text = Text("corpus", arguments.tokens, arguments.seq_len)
    for format_ in formats:
        folder = arguments.out / "checkpoint"
        shutil.rmtree(folder, ignore_errors=True)
        function, _ = measuring(model, tokenizer, text)
        try:
            made = quantdiff.export(model, tokenizer, folder, format=format_, measure=function)
        except UsageError as error:
            print(f"{name} {format_}: {error}", flush=True)
            continue
        row = made.to_json()
        exact = [c for c in row.pop("verification")["checks"] if c["name"] == "logits"]
        yield row | {"model": name, "reload": exact[0]["detail"], "folder": None}
        shutil.rmtree(folder, ignore_errors=True)
        gc.collect()


def write(rows):
    page = ROOT / "docs" / "export.md"
    text = page.read_text(encoding="utf-8")
    before, rest = text.split(BEGIN)
    after = rest.split(END)[1]
    page.write_text(f"{before}{BEGIN}\n\n{table(rows)}\n\n{END}{after}", encoding="utf-8")


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
            f"{measured['perplexity']:.3f} | {measured['kl']:.5f} | {measured['agreement']:.1%} | "
            f"{reload} |"
        )
    if rows:
        lines += ["", f"Measured on {rows[0]['measured']['data']}, weights alone quantized."]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
