"""Put trained models of the zoo where the package ships them, each with its card and log.

    python scripts/ship_zoo.py runs/zoo                      # whichever of the three are finished
    python scripts/ship_zoo.py runs/zoo --kinds transformer

A model that is shipped already is replaced. Writes the cards, the table of docs/zoo.md, the ends of
the logs and the training curves of all shipped models.
"""

import argparse
import hashlib
import json
import shutil
import sys
from pathlib import Path
from typing import Any

from train_zoo import draw
from zoo_recipe import KINDS, SIZES

from quantdiff.files import write_bytes, write_json
from quantdiff.models.zoo import FOLDER, PREFIX, shipped

LOGS = Path(__file__).parent / "zoo_logs"
DOCS = Path(__file__).parents[1] / "docs"
FIGURE = DOCS / "figures" / "zoo_curves.png"
PAGE = DOCS / "zoo.md"
BEGIN, END = "<!-- written by scripts/ship_zoo.py -->", "<!-- end of what is written -->"
LARGEST = 15e6  # bytes of a model's folder

ARCHITECTURES = {
    "transformer": "a Llama-style decoder with standard attention",
    "diff-v1": "DiffLlama: with differential attention (arXiv 2410.05258) in place of standard",
    "diff-v2": "DIFF V2: the same with the second version of differential attention, whose wider "
    "queries a narrower feed-forward part pays for",
}

CARD = """\
---
license: apache-2.0
language: en
library_name: transformers
pipeline_tag: text-generation
---

# {name}

Of three models (a Transformer, DIFF V1, DIFF V2) that differ in their attention: same tokenizer,
text, token order, steps, schedule and seed, parameter counts within 1 %. They exist so that
activation outliers and quantization can be compared; this one is shipped with quantdiff and opens
as `quantdiff.load("zoo:{kind}")`.

| | |
|---|---|
| architecture | {architecture} |
| parameters | {parameters:,} (embeddings tied) |
| size | {layers} layers of width {hidden}, feed-forward parts of {intermediate_size} |
| norms | RMS norms, ε = {rms_norm_eps:g}{others} |
| trained on | {tokens:,} tokens in windows of {length}, {batch} windows per step |
| held-out loss | {held_out_loss:.4f} ± {held_out_stderr:.4f} nats per token |
| held-out tokens | {held_out_tokens:,} |
| a bigram model, same tokens | {bigram_loss:.4f} nats per token |
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

Made by quantdiff's script, as this command does today:

```
torchrun --nproc-per-node 2 scripts/train_zoo.py --size {size} --kinds {kind} \\
    --dtype {dtype} --eps {rms_norm_eps:g} --out runs/zoo
```
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
        check_alike(kind, options.runs / kind)
        ship(kind, options.runs / kind)
        print(f"zoo:{kind} is in {FOLDER / kind}")
    for name, told in shipped().items():
        folder = FOLDER / name.removeprefix(PREFIX)
        write_bytes(folder / "README.md", card(folder, told).encode())
        end_log(LOGS / told["kind"] / "log.jsonl", told)
    draw(LOGS, [kind for kind in KINDS if (LOGS / kind / "log.jsonl").exists()])
    (LOGS / "curves.png").replace(FIGURE)
    before, rest = PAGE.read_text(encoding="utf-8").split(BEGIN)
    after = rest.split(END)[1]
    write_bytes(PAGE, f"{before}{BEGIN}\n\n{table()}\n\n{END}{after}".encode())
    return 0


def size_of(recipe: dict[str, Any]) -> str:
    """The `--size` of a recipe, whatever options replaced."""
    shape = ("hidden", "layers", "ffn")
    return next(
        name
        for name, known in SIZES.items()
        if all(getattr(known, part) == recipe[part] for part in shape)
    )


def check_alike(kind: str, run: Path) -> None:
    """Refuse a model that was not trained like the other shipped ones; exits with a reason."""
    mine = _trained(run, run / "model")
    for name, told in shipped().items():
        if told["kind"] == kind:
            continue
        other = _trained(FOLDER / told["kind"], FOLDER / told["kind"])
        for what in mine:
            alike = mine[what] == other[what]
            if what == "parameters":
                alike = abs(mine[what] / other[what] - 1) < 0.01
            if not alike:
                sys.exit(f"{kind} was not trained as {name}: {what} {mine[what]}, {other[what]}")


def _trained(folder: Path, model: Path) -> dict[str, Any]:
    """What must agree. The norms' ε is not part of it: the cards state each model's own."""
    told = json.loads((folder / "training.json").read_text(encoding="utf-8"))
    tokenizer = hashlib.sha256((model / "tokenizer.json").read_bytes()).hexdigest()
    facts = {name: told[name] for name in ("text", "tokens", "parameters")}
    facts |= {name: value for name, value in told["recipe"].items() if name != "eps"}
    return facts | {"tokenizer": tokenizer}


def ship(kind: str, run: Path) -> None:
    told = json.loads((run / "training.json").read_text(encoding="utf-8"))
    target = FOLDER / kind
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(run / "model", target)
    write_json(target / "training.json", told)
    # quantdiff itself has the classes: a copy of their code could only become outdated.
    for code in target.glob("*.py"):
        code.unlink()
    config = json.loads((target / "config.json").read_text(encoding="utf-8"))
    config.pop("auto_map", None)
    write_json(target / "config.json", config)
    size = sum(path.stat().st_size for path in target.rglob("*"))
    if size > LARGEST:
        sys.exit(f"{target} has {size:,} bytes, more than {LARGEST:,.0f}")
    (LOGS / kind).mkdir(parents=True, exist_ok=True)
    shutil.copy(run / "log.jsonl", LOGS / kind / "log.jsonl")


def end_log(log: Path, told: dict[str, Any]) -> None:
    """End a log with the loss on all held-out tokens, and the bigram model's on the same ones.

    During training, only some of them are evaluated.
    """
    names = ("tokens", "held_out_loss", "held_out_stderr", "held_out_tokens", "bigram_loss")
    end = json.dumps({name: told[name] for name in names})
    lines = log.read_text(encoding="utf-8").splitlines()
    if "held_out_loss" in json.loads(lines[-1]):
        lines.pop()
    write_bytes(log, "".join(f"{line}\n" for line in [*lines, end]).encode())


def card(folder: Path, told: dict[str, Any]) -> str:
    """The card of a shipped model."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    facts = {**told["recipe"], **told, "hours": told["seconds"] / 3600}
    facts |= {name: config[name] for name in ("intermediate_size", "rms_norm_eps")}
    facts |= {"millions": told["tokens"] / 1e6, "size": size_of(told["recipe"])}
    usual = SIZES[facts["size"]].eps
    facts["others"] = "" if facts["rms_norm_eps"] == usual else f" (the others have {usual:g})"
    kind = told["kind"]
    return CARD.format(name=f"{PREFIX}{kind}", architecture=ARCHITECTURES[kind], **facts)


def table() -> str:
    """The shipped models, as a table in Markdown."""
    lines = [
        "| model | parameters | tokens | held-out loss, nats | a bigram model |",
        "|---|---:|---:|---:|---:|",
    ]
    for name, told in shipped().items():
        loss = f"{told['held_out_loss']:.4f} ± {told['held_out_stderr']:.4f}"
        lines.append(
            f"| `{name}` | {told['parameters']:,} | {told['tokens']:,} | {loss} | "
            f"{told['bigram_loss']:.4f} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
