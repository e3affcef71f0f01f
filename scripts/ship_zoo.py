"""Puts trained models of the zoo where the package ships them, each with its card and log.

    python scripts/ship_zoo.py runs/zoo                      # whichever of the three are finished
    python scripts/ship_zoo.py runs/zoo --kinds transformer

A model that is shipped already is replaced. Draws the training curves of all that are.
"""

import argparse
import json
import shutil
import sys
from pathlib import Path
from typing import Any

from train_zoo import draw
from zoo_recipe import KINDS, SIZES

from quantdiff.files import write_bytes, write_json
from quantdiff.models.zoo import FOLDER

LOGS = Path(__file__).parent / "zoo_logs"
FIGURE = Path(__file__).parents[1] / "docs" / "figures" / "zoo_curves.png"
LARGEST = 15e6  # bytes of a model's folder

ARCHITECTURES = {
    "transformer": "a Llama-style decoder with standard attention",
    "diff-v1": "DiffLlama: the same with differential attention (arXiv 2410.05258)",
    "diff-v2": "DIFF V2: the same with the second version of differential attention",
}

CARD = """\
---
license: apache-2.0
language: en
library_name: transformers
pipeline_tag: text-generation
---

# {name}

One of three models that differ in nothing but their attention: same tokenizer, text, token order,
steps, schedule and seed, parameter counts within 1 %. They exist so that activation outliers and
quantization can be compared; they are shipped with quantdiff and open as
`quantdiff.load("zoo:{kind}")`.

| | |
|---|---|
| architecture | {architecture} |
| parameters | {parameters:,} (embeddings tied) |
| trained on | {tokens:,} tokens in windows of {length}, {batch} windows a step |
| held-out loss | {held_out_loss:.4f} ± {held_out_stderr:.4f} nats a token |
| held-out tokens | {held_out_tokens:,} |
| a bigram model, same tokens | {bigram_loss:.4f} nats a token |
| optimizer | AdamW, β 0.9 and 0.95, weight decay {decay}, gradients clipped to norm 1 |
| learning rate | {rate:g} at most, {warmup} steps of warm-up, cosine down to a tenth |
| precision | {dtype} while training, weights shipped in bfloat16 |
| seed | {seed} |
| finished | {finished}, after {hours:.1f} hours on {hardware} |

**Data.** State of the Union addresses, WordNet glosses, the King James Bible and Moby-Dick: in the
public domain or under permissive licences (`scripts/zoo_text/` and `calibration/corpus/` tell the
sources and notices). A document is held out by the hash of its name. The tokenizer, a byte-level
BPE of 4,096 tokens, was trained on the training text alone.

**What it is not good for.** Anything but measuring. It has seen {millions:.1f} million tokens of
old and narrow prose, follows no instruction, knows no facts to rely on, and repeats the views of
its sources. Its outliers are those of a small, briefly trained model: they need not say what
happens in large ones. Contexts beyond {length} tokens were never trained.

Made by `scripts/train_zoo.py --size {size} --kinds {kind} --dtype {dtype}` of quantdiff.
"""


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", type=Path, help="the --out of train_zoo.py")
    parser.add_argument("--kinds", nargs="*", choices=KINDS, default=list(KINDS))
    options = parser.parse_args()
    finished = [k for k in options.kinds if (options.runs / k / "training.json").exists()]
    if not finished:
        sys.exit(f"{options.runs} holds no finished model")
    for kind in finished:
        ship(kind, options.runs / kind)
        print(f"zoo:{kind} is in {FOLDER / kind}")
    draw(LOGS, [kind for kind in KINDS if (LOGS / kind / "log.jsonl").exists()])
    (LOGS / "curves.png").replace(FIGURE)
    return 0


def size_of(recipe: dict[str, Any]) -> str:
    """The `--size` that a recipe is of, whatever options replaced."""
    shape = ("hidden", "layers", "ffn")
    return next(
        name
        for name, known in SIZES.items()
        if all(getattr(known, part) == recipe[part] for part in shape)
    )


def ship(kind: str, run: Path) -> None:
    told = json.loads((run / "training.json").read_text(encoding="utf-8"))
    target = FOLDER / kind
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(run / "model", target)
    write_json(target / "training.json", told)
    facts = {**told["recipe"], **told, "hours": told["seconds"] / 3600}
    facts |= {"millions": told["tokens"] / 1e6, "size": size_of(told["recipe"])}
    card = CARD.format(name=f"zoo:{kind}", architecture=ARCHITECTURES[kind], **facts)
    write_bytes(target / "README.md", card.encode())
    size = sum(path.stat().st_size for path in target.rglob("*"))
    if size > LARGEST:
        sys.exit(f"{target} has {size:,} bytes, more than {LARGEST:,.0f}")
    (LOGS / kind).mkdir(parents=True, exist_ok=True)
    shutil.copy(run / "log.jsonl", LOGS / kind / "log.jsonl")


if __name__ == "__main__":
    sys.exit(main())
