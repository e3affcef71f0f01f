"""What recording costs: time and memory relative to the same forward pass without it.

All times are medians of interleaved runs in one process and are given as ratios to the plain sdpa
forward pass of the same round; peak memory is the resident set of one forward pass in a process of
its own. `materialised` does without a streaming recorder: eager attention, the n×n logits kept for
a moment, the same statistics computed from them.

    python scripts/bench_profile.py --out runs/bench_profile
"""

import argparse
import importlib.util
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Column, Table

import quantdiff
from quantdiff.files import write_json
from quantdiff.statistics import native
from quantdiff.versions import versions

COLUMNS = ("seconds", "time ×", "peak memory ×", "peak MiB")
LENGTHS = (512, 1024, 2048, 4096, 8192)
FAST = ("plain", "extremes", "full")
SLOW = ("full in plain torch", "eager", "materialised")


class Materialising:
    """Statistics from materialised logits, layer by layer, in the eager attention function."""

    def __init__(self, model: torch.nn.Module) -> None:
        from transformers.models.llama import modeling_llama

        self.model, self.family, self.eager = model, modeling_llama, None
        self.largest = torch.zeros(0)

    def __enter__(self) -> "Materialising":
        self.eager = self.family.eager_attention_forward
        self.family.eager_attention_forward = self.attend
        return self

    def __exit__(self, *exception: object) -> None:
        self.family.eager_attention_forward = self.eager

    def attend(self, module, query, key, value, attention_mask, scaling, **kwargs):
        key_states = self.family.repeat_kv(key, module.num_key_value_groups)
        # The memory of the usual way, not of carelessness.
        scores = query.float() @ key_states.float().transpose(2, 3) * scaling  # (B, H, N, M)
        seen = (attention_mask > torch.finfo(attention_mask.dtype).min / 2).expand_as(scores)
        heads = scores.shape[1]
        counted = scores[seen].view(scores.shape[0], heads, -1).transpose(0, 1).flatten(1)  # (H, n)
        counted.amin(1), counted.amax(1)
        centred = counted - counted.mean(1, keepdim=True)
        square = centred * centred
        square.mean(1).sqrt(), (square * square).mean(1)
        bits = (counted.view(torch.int32) >> 16) & 0xFFFF
        for head in bits:
            torch.bincount(head, minlength=65536)
        self.largest = torch.cat([self.largest, counted.abs().flatten().topk(100).values])
        self.largest = self.largest.topk(100).values
        return self.eager(module, query, key, value, attention_mask, scaling=scaling, **kwargs)


def runner(model: torch.nn.Module, variant: str, head: bool) -> Callable[[torch.Tensor], None]:
    """A function that runs one forward pass under a variant."""
    options = {} if head else {"logits_to_keep": 1}
    implementation = "eager" if variant in ("eager", "materialised") else "sdpa"

    def run(ids: torch.Tensor) -> None:
        model.set_attn_implementation(implementation)
        if variant == "materialised":
            context = Materialising(model)
        elif variant in ("plain", "eager"):
            context = torch.inference_mode()
        else:
            detail = "extremes" if variant == "extremes" else "full"
            context = quantdiff.record(model, detail=detail, compiled="torch" not in variant)
        with torch.inference_mode(), context:
            model(input_ids=ids, use_cache=False, **options)

    return run


def lens(model: torch.nn.Module) -> Callable[[torch.Tensor], None]:
    """TransformerLens at the same sizes, its attention scores read by a hook."""
    from transformer_lens import HookedTransformer, HookedTransformerConfig

    config = model.config
    hooked = HookedTransformer(
        HookedTransformerConfig(
            n_layers=config.num_hidden_layers,
            d_model=config.hidden_size,
            n_ctx=max(LENGTHS),
            d_head=config.hidden_size // config.num_attention_heads,
            n_heads=config.num_attention_heads,
            n_key_value_heads=config.num_key_value_heads,
            d_mlp=config.intermediate_size,
            d_vocab=config.vocab_size,
            act_fn="silu",
            gated_mlp=True,
            normalization_type="RMS",
            positional_embedding_type="rotary",
            rotary_dim=config.hidden_size // config.num_attention_heads,
            final_rms=True,
        )
    )

    def look(scores, hook):
        seen = scores[torch.isfinite(scores)]
        seen.amin(), seen.amax(), seen.mean(), seen.std(), seen.abs().topk(100)

    def run(ids: torch.Tensor) -> None:
        with torch.inference_mode():
            hooked.run_with_hooks(
                ids, fwd_hooks=[(lambda name: name.endswith("hook_attn_scores"), look)]
            )

    return run


def timings(runs: dict[str, Callable], ids: torch.Tensor, rounds: int) -> dict[str, list[float]]:
    """Seconds of each variant, interleaved, after a short warm-up pass of each."""
    kept: dict[str, list[float]] = {name: [] for name in runs}
    for run in runs.values():
        run(ids[:, :256])
    for _ in range(rounds):
        for name, run in runs.items():
            begin = time.perf_counter()
            run(ids)
            kept[name].append(time.perf_counter() - begin)
    return kept


def peak(folder: str, variant: str, length: int, head: bool, processes: int = 3) -> int:
    """Peak resident bytes of one pass, model included: the median over fresh processes."""
    told = [folder, variant, str(length), str(int(head)), str(torch.get_num_threads())]
    command = [sys.executable, __file__, "--peak", *told]
    runs = [
        subprocess.run(command, check=True, capture_output=True, text=True)
        for _ in range(processes)
    ]
    return int(statistics.median(int(run.stdout) for run in runs))


def measure_peak(folder: str, variant: str, length: int, head: bool, threads: int) -> None:
    """Print the peak of this process over one pass."""
    torch.set_num_threads(threads)
    model, _ = quantdiff.load(folder, device="cpu")
    ids = torch.randint(0, model.config.vocab_size, (1, length))
    run = runner(model, variant, head)
    run(ids[:, :64])  # what is imported or built only once is done by now
    Path("/proc/self/clear_refs").write_text("5")
    run(ids)
    status = Path("/proc/self/status").read_text()
    print(int(status.split("VmHWM:")[1].split()[0]) * 1024)


def text_ids(tokenizer, length: int) -> torch.Tensor:
    from quantdiff.calibration.text import text_windows

    return text_windows("corpus", tokenizer, tokens=length, seq_len=length).windows[0][None]


def compare(
    model: torch.nn.Module, ids: torch.Tensor, folder: str, head: bool, rounds: int
) -> tuple[Table, dict[str, Any]]:
    """Compare every variant with the plain forward pass, the slow ones in rounds of their own."""
    rows: dict[str, Any] = {}
    groups = [FAST, ("plain", *SLOW)] if head else [FAST]
    for i, names in enumerate(groups):
        runs = {name: runner(model, name, head) for name in names}
        if i and head and importlib.util.find_spec("transformer_lens"):
            runs["TransformerLens"] = lens(model)
        seconds = timings(runs, ids, 2 if i else rounds)
        base = statistics.median(seconds["plain"])
        for name, taken in seconds.items():
            rows.setdefault(name, {"seconds": taken, "ratio": statistics.median(taken) / base})
    for name in set(rows) & {*FAST, *SLOW}:
        rows[name]["peak"] = peak(folder, name, ids.shape[1], head, 1 if name in SLOW else 3)
    table = Table("variant", *(Column(c, justify="right") for c in COLUMNS))
    for name, row in rows.items():
        memory = ["–", "–"]
        if "peak" in row:
            memory = [f"{row['peak'] / rows['plain']['peak']:.3f}", f"{row['peak'] / 2**20:,.0f}"]
        table.add_row(
            name, f"{statistics.median(row['seconds']):.2f}", f"{row['ratio']:.3f}", *memory
        )
    return table, rows


def growth(
    model: torch.nn.Module, tokenizer: Any, folder: str, lengths: list[int]
) -> tuple[Table, dict[int, Any]]:
    """Time and memory by length; `materialised` only up to 2,048 tokens."""
    names = ("plain", "extremes", "full", "materialised")
    columns = [f"{name} {unit}" for unit in ("s", "MiB") for name in names]
    table = Table("n", *(Column(c, justify="right") for c in columns))
    table.title = "growth with length, without the vocabulary head"
    found = {}
    for length in lengths:
        shown = [name for name in names if name != "materialised" or length <= 2048]
        runs = {name: runner(model, name, False) for name in shown}
        seconds = timings(runs, text_ids(tokenizer, length), 1 if length >= 4096 else 3)
        medians = {name: statistics.median(taken) for name, taken in seconds.items()}
        peaks = {name: peak(folder, name, length, False, 1) for name in shown}
        table.add_row(
            str(length),
            *(f"{medians[name]:.2f}" if name in medians else "–" for name in names),
            *(f"{peaks[name] / 2**20:,.0f}" if name in peaks else "–" for name in names),
        )
        found[length] = {"seconds": medians, "peak": peaks}
    return table, found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument(
        "--lengths", type=int, nargs="*", default=LENGTHS, help="of the growth table"
    )
    parser.add_argument("--out", type=Path, help="folder for bench_profile.json")
    parser.add_argument("--peak", nargs=5, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.peak:
        folder, variant, length, head, threads = options.peak
        measure_peak(folder, variant, int(length), bool(int(head)), int(threads))
        return
    console = Console(width=120)
    torch.set_num_threads(options.threads)
    model, tokenizer = quantdiff.load(options.model, device="cpu")
    result: dict[str, Any] = {
        "versions": versions(),
        "threads": options.threads,
        "rounds": options.rounds,
        "compiled": native.available(),
        "cpu": torch.backends.cpu.get_cpu_capability(),
    }
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        for head, title in ((True, "whole model"), (False, "without the vocabulary head")):
            ids = text_ids(tokenizer, 2048)
            table, result[title] = compare(model, ids, folder, head, options.rounds)
            table.title = f"n = 2048, batch 1, fp32, {options.threads} threads, {title}"
            console.print(table)
        if options.lengths:
            table, result["growth"] = growth(model, tokenizer, folder, options.lengths)
            console.print(table)
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
        write_json(options.out / "bench_profile.json", result)
        console.print(f"written to {options.out}")
    else:
        console.print(json.dumps(result["versions"]))


if __name__ == "__main__":
    main()
