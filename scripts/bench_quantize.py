"""What fake quantization of the attention logits costs, and whether it is correct on a real model.

Times are medians of interleaved runs in one process, as ratios to the plain sdpa forward pass; peak
memory is the resident set of one forward pass in a process of its own. `materialised` does without
blocks: eager attention, the n×n logits rounded before softmax.

    python scripts/bench_quantize.py --out runs/bench_quantize
    python scripts/bench_quantize.py --agreement --out runs/bench_quantize
"""

import argparse
import contextlib
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from bench_profile import text_ids, timings
from rich.console import Console
from rich.progress import track
from rich.table import Column, Table

import quantdiff
from quantdiff.calibration import text_windows
from quantdiff.files import write_json
from quantdiff.quantization import Grid
from quantdiff.versions import versions

SITE = "attention_logits"
LENGTH = 1024
VARIANTS: dict[str, tuple[str, str]] = {
    "tensor, dynamic": ("dynamic", "tensor"),
    "head, dynamic": ("dynamic", "head"),
    "row": ("dynamic", "row"),
    "tensor, static": ("absmax", "tensor"),
    "head, static": ("absmax", "head"),
}


@contextlib.contextmanager
def materialised(scheme: quantdiff.Scheme) -> Iterator[None]:
    """Llama's eager attention with its logits rounded, all of them at once."""
    from transformers.models.llama import modeling_llama

    def attend(module, query, key, value, attention_mask, scaling, **kwargs):
        groups = module.num_key_value_groups
        key, value = (modeling_llama.repeat_kv(x, groups) for x in (key, value))
        s = query @ key.transpose(2, 3) * scaling  # (B, H, N, M)
        seen = attention_mask > torch.finfo(attention_mask.dtype).min / 2
        over = {"tensor": (1, 2, 3), "head": (2, 3), "row": (3,)}[scheme.granularity]
        least = s.masked_fill(~seen, torch.inf).amin(over, keepdim=True)
        most = s.masked_fill(~seen, -torch.inf).amax(over, keepdim=True)
        s = Grid.of(least, most, scheme.bits, scheme.symmetric).quantize(s)
        weights = s.masked_fill(~seen, -torch.inf).softmax(-1)
        return (weights @ value).transpose(1, 2).contiguous(), weights

    real = modeling_llama.eager_attention_forward
    modeling_llama.eager_attention_forward = attend
    try:
        yield
    finally:
        modeling_llama.eager_attention_forward = real


def runner(
    model: torch.nn.Module, variant: str, bits: int, table: Any
) -> Callable[[torch.Tensor], None]:
    """A function that runs one forward pass under a variant."""

    def run(ids: torch.Tensor) -> None:
        eager = variant in ("eager", "materialised")
        model.set_attn_implementation("eager" if eager else "sdpa")
        context: Any = contextlib.nullcontext()
        if variant == "materialised":
            context = materialised(quantdiff.Scheme(SITE, bits))
        elif variant in VARIANTS:
            range_, granularity = VARIANTS[variant]
            scheme = quantdiff.Scheme(SITE, bits, range_, granularity)
            context = quantizers.setdefault(
                variant, quantdiff.fake_quantize(model, scheme, table=table)
            )
        with torch.inference_mode(), context:
            model(input_ids=ids, use_cache=False)

    # Kept across runs: a module is compared with the model's own attention only the first time.
    quantizers: dict[str, Any] = {}
    return run


def peak(folder: str, table: str, variant: str, bits: int, processes: int = 3) -> int:
    """Peak resident bytes of one pass: the median over fresh processes."""
    told = [folder, table, variant, str(bits), str(torch.get_num_threads())]
    command = [sys.executable, __file__, "--peak", *told]
    runs = [
        subprocess.run(command, check=True, capture_output=True, text=True)
        for _ in range(processes)
    ]
    return int(statistics.median(int(run.stdout.split()[-1]) for run in runs))


def measure_peak(folder: str, table: str, variant: str, bits: int, threads: int) -> None:
    """Print the peak of this process over one pass."""
    torch.set_num_threads(threads)
    model, _ = quantdiff.load(folder, device="cpu")
    ids = torch.randint(0, model.config.vocab_size, (1, LENGTH))
    run = runner(model, variant, bits, quantdiff.CalibrationTable.load(table))
    run(ids[:, :64])  # what is imported or built only once is done by now
    Path("/proc/self/clear_refs").write_text("5")
    run(ids)
    status = Path("/proc/self/status").read_text()
    print(int(status.split("VmHWM:")[1].split()[0]) * 1024)


def costs(
    model: torch.nn.Module, tokenizer: Any, folder: str, rounds: int
) -> tuple[Table, dict[str, Any]]:
    """Compare every variant with the plain forward pass."""
    windows = text_windows("corpus:train", tokenizer, tokens=4096, seq_len=LENGTH)
    table = quantdiff.calibrate(model, windows)
    place = f"{folder}/table"
    table.save(place)
    ids = text_ids(tokenizer, LENGTH)
    names = ("plain", *VARIANTS)
    rows: dict[str, Any] = {}
    for group, count in ((names, rounds), (("plain", "eager", "materialised"), 3)):
        runs = {name: runner(model, name, 4, table) for name in group}
        seconds = timings(runs, ids, count)
        base = statistics.median(seconds["plain"])
        for name, taken in seconds.items():
            rows.setdefault(name, {"seconds": taken, "ratio": statistics.median(taken) / base})
    for name, row in rows.items():
        row["peak"] = peak(folder, place, name, 4)
    shown = Table(
        "variant",
        *(Column(c, justify="right") for c in ("seconds", "time ×", "peak memory ×", "peak MiB")),
        title=f"logits at 4 bits, n = {LENGTH}, batch 1, fp32, {torch.get_num_threads()} threads",
    )
    for name, row in rows.items():
        shown.add_row(
            name, f"{statistics.median(row['seconds']):.2f}", f"{row['ratio']:.3f}",
            f"{row['peak'] / rows['plain']['peak']:.3f}", f"{row['peak'] / 2**20:,.0f}",
        )  # fmt: skip
    return shown, rows


def divergence(model: torch.nn.Module, windows: list[torch.Tensor], plain: list[torch.Tensor],
               context: Callable[[], Any]) -> tuple[float, float]:  # fmt: skip
    """Mean KL divergence in nats from the unquantized model, and top-1 agreement, over tokens."""
    divergences, agreements = [], []
    with torch.inference_mode(), context():
        for ids, expected in zip(windows, plain, strict=True):
            found = model(input_ids=ids, use_cache=False).logits[0].log_softmax(-1)
            divergences.append((expected.exp() * (expected - found)).sum(-1))
            agreements.append((expected.argmax(-1) == found.argmax(-1)).float())
    return float(torch.cat(divergences).mean()), float(torch.cat(agreements).mean())


def agreement(model: torch.nn.Module, tokenizer: Any) -> tuple[Table, dict[str, Any]]:
    """KL against the unquantized model, in blocks and materialised, over four windows of 512."""
    windows = [
        window[None]
        for window in text_windows("corpus", tokenizer, tokens=2048, seq_len=512).windows
    ]
    model.set_attn_implementation("sdpa")
    with torch.inference_mode():
        plain = [model(input_ids=ids, use_cache=False).logits[0].log_softmax(-1) for ids in windows]
    shown = Table(
        "granularity", *(Column(c, justify="right") for c in
        ("bits", "KL", "KL materialised", "ratio", "top-1", "top-1 materialised")),
        title="KL against the unquantized model, four windows of 512 tokens",
    )  # fmt: skip
    rows: dict[str, Any] = {}
    cells = [(g, bits) for g in ("tensor", "head", "row") for bits in (8, 6, 4)]
    for granularity, bits in track(cells, "quantizing", console=Console(stderr=True)):
        scheme = quantdiff.Scheme(SITE, bits, granularity=granularity)
        model.set_attn_implementation("sdpa")
        ours = divergence(model, windows, plain, lambda s=scheme: quantdiff.fake_quantize(model, s))
        model.set_attn_implementation("eager")
        theirs = divergence(model, windows, plain, lambda s=scheme: materialised(s))
        rows[f"{granularity} {bits}"] = {"blocks": ours, "materialised": theirs}
        shown.add_row(
            granularity, str(bits), f"{ours[0]:.5f}", f"{theirs[0]:.5f}",
            f"{ours[0] / theirs[0]:.4f}", f"{ours[1]:.3f}", f"{theirs[1]:.3f}",
        )  # fmt: skip
    return shown, rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default="smollm2-135m", help="a Llama")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--agreement", action="store_true", help="KL and not costs")
    parser.add_argument("--out", type=Path, help="folder for the JSON file")
    parser.add_argument("--peak", nargs=5, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.peak:
        folder, table, variant, bits, threads = options.peak
        measure_peak(folder, table, variant, int(bits), int(threads))
        return
    torch.set_num_threads(options.threads)
    model, tokenizer = quantdiff.load(options.model, device="cpu")
    if options.agreement:
        shown, rows = agreement(model, tokenizer)
    else:
        with tempfile.TemporaryDirectory() as folder:
            model.save_pretrained(folder)
            tokenizer.save_pretrained(folder)
            shown, rows = costs(model, tokenizer, folder, options.rounds)
    Console(width=110).print(shown)
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
        name = "agreement" if options.agreement else "costs"
        told = {"versions": versions(), "cpu": torch.backends.cpu.get_cpu_capability()}
        write_json(options.out / f"{name}.json", told | {"threads": options.threads, "rows": rows})


if __name__ == "__main__":
    main()
