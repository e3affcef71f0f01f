"""Train the zoo: a Transformer, DIFF V1 and DIFF V2 that differ in their attention.

Same tokenizer, text, token order, steps, schedule and seed; parameter counts within 1 %. Writes a
checkpoint every few minutes and resumes from it; an interrupted run gives the weights of an
uninterrupted one, bit for bit with one or two processes on a CPU (with more, gradients may be
summed in another order).

    python scripts/train_zoo.py --size base --out runs/zoo
    python scripts/train_zoo.py --size tiny --kinds diff-v2 --out runs/tiny --dtype float32
    torchrun --nproc-per-node 8 scripts/train_zoo.py --size medium --out runs/zoo-medium
"""

import argparse
import contextlib
import json
import os
import platform
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from torch import distributed
from torch.nn.parallel import DistributedDataParallel
from zoo_recipe import KINDS, SIZES, Recipe, Stream, bigram_loss, build, train_tokenizer

from quantdiff.files import write_bytes, write_json
from quantdiff.versions import versions

DATA = Path(__file__).parent / "zoo_text" / "train.jsonl.xz"
HELD_OUT_TEXT = Path(__file__).parent.parent / "calibration" / "corpus" / "heldout.jsonl.xz"
# Options that replace a size's own.
OVERRIDES = ("tokens", "length", "rate", "seed", "dtype", "eps")
HELD_OUT = 64  # windows evaluated during training; all of them at the end


class Ranks:
    """The processes of a torchrun, or this one alone."""

    def __init__(self) -> None:
        self.count = int(os.environ.get("WORLD_SIZE", "1"))
        self.rank = int(os.environ.get("RANK", "0"))
        local = int(os.environ.get("LOCAL_RANK", "0"))
        cuda = torch.cuda.is_available()
        self.device = torch.device(f"cuda:{local}" if cuda else "cpu")
        if self.count > 1:
            distributed.init_process_group("nccl" if cuda else "gloo")

    @property
    def first(self) -> bool:
        return self.rank == 0

    def wait(self) -> None:
        if self.count > 1:
            distributed.barrier()

    def mean(self, value: torch.Tensor) -> torch.Tensor:
        """The mean of the values of all processes."""
        if self.count > 1:
            distributed.all_reduce(value)
        return value / self.count


def optimizer_of(model: torch.nn.Module, recipe: Recipe) -> torch.optim.AdamW:
    """AdamW, with no decay on vectors: norms and λ."""
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    groups = [
        {"params": matrices, "weight_decay": recipe.decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=recipe.rate, betas=(0.9, 0.95), fused=True)


def held_out_loss(model: Any, windows: torch.Tensor, autocast: Any) -> tuple[float, float]:
    """Nats per token over windows (W, N), and the standard error over windows."""
    model.eval()
    losses = []
    with torch.no_grad():
        for part in windows.split(32):
            ids = part.to(next(model.parameters()).device)
            with autocast():
                logits = model(input_ids=ids).logits
            loss = torch.nn.functional.cross_entropy(
                logits[:, :-1].float().flatten(0, 1), ids[:, 1:].flatten(), reduction="none"
            )
            losses.append(loss.view(len(ids), -1).mean(1).cpu())
    model.train()
    each = torch.cat(losses)
    return float(each.mean()), float(each.std() / len(each) ** 0.5)


class Run:
    """One kind's training: its state and its files.

    `state.pt` holds everything that the next step depends on; `log.jsonl` has one line per record.
    """

    def __init__(self, kind: str, recipe: Recipe, out: Path, stream: Stream, ranks: Ranks) -> None:
        self.kind, self.recipe, self.stream, self.ranks = kind, recipe, stream, ranks
        self.out = out / kind
        self.out.mkdir(parents=True, exist_ok=True)
        self.model = build(kind, recipe).to(ranks.device).train()
        self.optimizer = optimizer_of(self.model, recipe)
        self.fingerprint = recipe.fingerprint(kind, stream.fingerprint)
        self.step = self.resumed = 0
        self.records: list[dict[str, Any]] = []
        self.seconds = 0.0

    def resume(self) -> None:
        """Resume from the checkpoint, if there is one.

        Raises:
            SystemExit: it belongs to another recipe or other text.
        """
        path = self.out / "state.pt"
        if not path.exists():
            return
        state = torch.load(path, map_location=self.ranks.device, weights_only=True)
        if state["fingerprint"] != self.fingerprint:
            sys.exit(f"{path} is of another recipe or other text; choose another --out")
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.step, self.seconds = state["step"], state["seconds"]
        self.resumed = self.step
        self.records = state["records"]

    def save(self) -> None:
        """Write the checkpoint under a temporary name and rename it."""
        if not self.ranks.first:
            return
        state = {
            "fingerprint": self.fingerprint,
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "step": self.step,
            "seconds": self.seconds,
            "records": self.records,
        }
        path = self.out / "state.pt"
        torch.save(state, path.with_suffix(".new"))
        path.with_suffix(".new").replace(path)
        lines = "".join(json.dumps(record) + "\n" for record in self.records)
        write_bytes(self.out / "log.jsonl", lines.encode())

    def train(self, held_out: torch.Tensor, every: float, autocast: Any) -> Iterator[int]:
        """Train to the end; yields the number of steps done after each one.

        Args:
            held_out: windows for the loss that is logged, (W, N); nothing depends on it.
            every: seconds between checkpoints.
            autocast: context in which the model computes.
        """
        model: Any = self.model
        if self.ranks.count > 1:
            model = DistributedDataParallel(self.model)
        recipe, ranks = self.recipe, self.ranks
        saved = begun = time.monotonic()
        spent = self.seconds
        look = max(1, recipe.steps // 25)
        while self.step < recipe.steps:
            rate = recipe.learning_rate(self.step)
            for group in self.optimizer.param_groups:
                group["lr"] = rate
            batch = self.stream.batch(self.step, recipe.batch, recipe.seed)
            batch = batch[ranks.rank :: ranks.count].to(ranks.device)
            with autocast():
                loss = model(input_ids=batch, labels=batch).loss
            loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
            self.step += 1
            self.seconds = spent + time.monotonic() - begun
            if self.step % 10 == 0 or self.step == recipe.steps:
                loss = ranks.mean(loss.detach())
                self.records.append(
                    {
                        "step": self.step,
                        "tokens": self.step * recipe.batch * recipe.length,
                        "loss": float(loss),
                        "rate": rate,
                        "gradient_norm": float(norm),
                        "seconds": round(self.seconds, 1),
                    }
                )
            if self.step % look == 0 or self.step == recipe.steps:
                value, error = held_out_loss(self.model, held_out, autocast)
                self.records.append({"step": self.step, "held_out": value, "stderr": error})
            if time.monotonic() - saved > every:
                self.save()
                saved = time.monotonic()
            yield self.step
        self.save()

    def told(self) -> dict[str, Any] | None:
        """What was written about a training that had already ended, with its date."""
        path = self.out / "training.json"
        if not (self.resumed == self.recipe.steps and path.exists()):
            return None
        content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return content

    def finish(self, held_out: torch.Tensor, tokenizer: Any, bigram: float) -> dict[str, Any]:
        """Write the model as it is loaded later (bf16), and its measurements."""
        self.model.to(torch.bfloat16)
        if self.ranks.first:
            self.model.save_pretrained(self.out / "model")
            tokenizer.save_pretrained(self.out / "model")
        self.ranks.wait()
        # As loaded: casting this module back to fp32 would leave its rotary buffer rounded.
        saved = type(self.model).from_pretrained(self.out / "model", dtype=torch.float32)
        value, error = held_out_loss(saved.to(self.ranks.device), held_out, contextlib.nullcontext)
        told = {
            "kind": self.kind,
            "recipe": asdict(self.recipe),
            "parameters": self.model.num_parameters(),
            "tokens": self.step * self.recipe.batch * self.recipe.length,
            "held_out_loss": value,
            "held_out_stderr": error,
            "held_out_tokens": held_out.numel() - len(held_out),
            "bigram_loss": bigram,
            "text": self.stream.fingerprint,
            "seconds": round(self.seconds),
            "finished": time.strftime("%Y-%m-%d"),
            "hardware": f"{self.ranks.count} × {_hardware(self.ranks.device)}",
            "versions": versions(),
        }
        if self.ranks.first:
            write_json(self.out / "training.json", told)
        return told


def _hardware(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{torch.get_num_threads()} threads of a {platform.machine()} CPU"


def draw(out: Path, kinds: list[str]) -> None:
    """The curves of all kinds in one figure."""
    from quantdiff.analysis.style import DOUBLE, Page, model_colors, style

    colors = model_colors(KINDS)
    with style():
        page = Page(DOUBLE, 2.6)
        axes = page.subplots()
        for kind in kinds:
            lines = (out / kind / "log.jsonl").read_text().splitlines()
            records = [json.loads(line) for line in lines]
            train = [r for r in records if "loss" in r]
            tokens = {r["step"]: r["tokens"] / 1e6 for r in train}
            axes.plot(
                [r["tokens"] / 1e6 for r in train], [r["loss"] for r in train],
                color=colors[kind], alpha=0.25, linewidth=0.6,
            )  # fmt: skip
            held = [r for r in records if "held_out" in r]
            scale = train[-1]["tokens"] / 1e6 / train[-1]["step"]
            axes.plot(
                [tokens.get(r["step"], r["step"] * scale) for r in held],
                [r["held_out"] for r in held],
                color=colors[kind], label=kind,
            )  # fmt: skip
        axes.set(xlabel="training tokens (millions)", ylabel="loss (nats per token)")
        axes.legend(title="held out; pale: training", title_fontsize="medium")
    page.savefig(out / "curves.png")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", choices=SIZES, default="base")
    parser.add_argument("--kinds", nargs="*", choices=KINDS, default=list(KINDS))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--tokens", type=int, help="instead of the size's own")
    parser.add_argument("--length", type=int, help="tokens per window, instead of the size's own")
    parser.add_argument("--rate", type=float, help="peak learning rate")
    parser.add_argument("--seed", type=int)
    parser.add_argument("--dtype", choices=["bfloat16", "float32"])
    parser.add_argument("--eps", type=float, help="of all norms")
    parser.add_argument("--every", type=float, default=180, help="seconds between checkpoints")
    parser.add_argument("--data", type=Path, default=DATA, help="training text, .jsonl.xz")
    parser.add_argument("--held-out", type=Path, default=HELD_OUT_TEXT, help="text of the losses")
    options = parser.parse_args()
    given = {name: getattr(options, name) for name in OVERRIDES}
    recipe = replace(SIZES[options.size], **{n: v for n, v in given.items() if v is not None})
    ranks = Ranks()
    if recipe.batch % ranks.count:
        sys.exit(f"{ranks.count} processes do not divide a batch of {recipe.batch}")

    def autocast() -> Any:
        if recipe.dtype == "float32":
            return contextlib.nullcontext()
        return torch.autocast(ranks.device.type, torch.bfloat16)

    tokenizer = train_tokenizer(options.data)
    stream = Stream(options.data, tokenizer, recipe.length)
    test = Stream(options.held_out, tokenizer, recipe.length)
    held_out = _all(test)
    bigram = bigram_loss(stream.tokens, held_out.numpy())
    results = []
    bar = Progress(
        TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed}/{task.total}"),
        TextColumn("{task.fields[told]}"), TimeRemainingColumn(), disable=not ranks.first,
    )  # fmt: skip
    with bar:
        for kind in options.kinds:
            run = Run(kind, recipe, options.out, stream, ranks)
            run.resume()
            task = bar.add_task(kind, total=recipe.steps, completed=run.step, told="")
            looked = held_out[:HELD_OUT]
            for step in run.train(looked, options.every, autocast):
                losses = [r["loss"] for r in run.records if "loss" in r]
                speed = step * recipe.batch * recipe.length / max(run.seconds, 1e-9)
                told = f"{losses[-1]:.3f} nats, {speed:,.0f} tokens/s" if losses else ""
                bar.update(task, completed=step, told=told)
            told = run.told() or run.finish(held_out, tokenizer, bigram)
            results.append(told)
            ranks.wait()
    if ranks.first:
        draw(options.out, [r["kind"] for r in results])
        for r in results:
            print(
                f"{r['kind']:12} {r['parameters']:,} parameters, held-out loss "
                f"{r['held_out_loss']:.4f} ± {r['held_out_stderr']:.4f}, bigram {bigram:.4f}"
            )
    if ranks.count > 1:
        distributed.destroy_process_group()
    return 0


def _all(stream: Stream) -> torch.Tensor:
    """Every window of a text in its own order, (W, N)."""
    whole = stream.tokens[: stream.windows * stream.length].astype("int64")
    return torch.from_numpy(whole).view(stream.windows, stream.length)


if __name__ == "__main__":
    sys.exit(main())
