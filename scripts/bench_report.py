"""How long the report of four models of 24 layers and 32 heads takes, and how large its page is.

    python scripts/bench_report.py

Exits with 1 if the page takes a minute or more, or 15 MB or more. The profiles are of narrow
models with random weights, two standard and two differential: what a report costs depends on
layers, heads and models, not on widths.
"""

import argparse
import sys
import tempfile
import time
from pathlib import Path

import torch
from transformers import DiffLlamaConfig, DiffLlamaForCausalLM, LlamaConfig, LlamaForCausalLM

import quantdiff

SECONDS, MEGABYTES = 60, 15  # a report must stay below both
SIZE = {
    "num_hidden_layers": 24, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 8,
    "hidden_size": 256, "intermediate_size": 256, "vocab_size": 128,
}  # fmt: skip
KINDS = {
    "standard": (LlamaForCausalLM, LlamaConfig),
    "differential": (DiffLlamaForCausalLM, DiffLlamaConfig),
}


def profiled(kind: str, seed: int) -> quantdiff.Profile:
    """Logits, hidden states and maps of a model on random tokens."""
    torch.manual_seed(seed)
    build, config = KINDS[kind]
    model = build(config(**SIZE)).eval()
    ids = torch.randint(SIZE["vocab_size"], (2, 48))  # (B, N)
    with torch.no_grad(), quantdiff.record(model, maps=True) as recorder:
        model(input_ids=ids)
    profile = recorder.profile(source="random ids")
    profile.model["name"] = f"{kind}-{seed}"
    profile.data["fingerprint"] = "0" * 64  # so that all four are in one table
    return profile


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="keep the report there")
    options = parser.parse_args()
    profiles = [profiled(kind, seed) for seed in (0, 1) for kind in KINDS]
    with tempfile.TemporaryDirectory(prefix="quantdiff-report-") as folder:
        begin = time.perf_counter()
        page, *files = quantdiff.compare(*profiles).save(options.out or folder)
        seconds = time.perf_counter() - begin
        megabytes = page.stat().st_size / 1e6
    print(f"{page.name}: {megabytes:.1f} MB in {seconds:.1f} s, with {len(files)} files beside it")
    return int(seconds >= SECONDS or megabytes >= MEGABYTES)


if __name__ == "__main__":
    sys.exit(main())
