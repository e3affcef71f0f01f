"""What recording costs: time and memory relative to the same forward pass without it."""

import contextlib
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import quantdiff
from gpu_checks.common import Check, Found, NotReachedError, Place
from quantdiff.statistics import blocks, streaming

__all__ = ["timing_checks"]

ROUNDS = 5
VARIANTS = ("forward", "extremes", "extremes streamed", "full")


class _Bench:
    """A Llama with random weights, and how long its passes took."""

    def __init__(self, place: Place) -> None:
        self.place = place
        self.lengths = (64, 128, 256) if place.small else (2048, 8192, 32768)
        self.seconds: dict[str, tuple[int, float]] = {}  # variant → length and time of the last
        self._model: Any = None

    @property
    def model(self) -> Any:
        if self._model is None:
            width, heads = (32, 4) if self.place.small else (128, 16)
            config = LlamaConfig(
                vocab_size=1000,
                hidden_size=heads * width,
                intermediate_size=heads * width * 11 // 4,
                num_hidden_layers=2 if self.place.small else 4,
                num_attention_heads=heads,
                num_key_value_heads=heads // 4,
                max_position_embeddings=self.lengths[-1],
                attn_implementation="sdpa",
            )
            torch.manual_seed(0)
            with self.place.device:
                self._model = LlamaForCausalLM(config).to(torch.bfloat16).eval()
        return self._model

    def run(self, variant: str, length: int) -> tuple[float, float]:
        """Seconds of one pass, and peak memory in MiB, 0 on a CPU."""
        ids = torch.arange(length, device=self.place.device)[None] % 1000
        detail: Any = "full" if variant == "full" else "extremes"
        context: Any = contextlib.nullcontext()
        if variant != "forward":
            context = quantdiff.record(self.model, detail=detail)
        cuda = self.place.device.type == "cuda"
        with torch.inference_mode(), context, _streamed(variant == "extremes streamed"):
            if not cuda:
                begin = time.perf_counter()
                self.model(input_ids=ids, use_cache=False, logits_to_keep=1)
                return time.perf_counter() - begin, 0.0
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            self.model(input_ids=ids, use_cache=False, logits_to_keep=1)
            end.record()
            torch.cuda.synchronize()
        return begin.elapsed_time(end) / 1e3, torch.cuda.max_memory_allocated() / 2**20

    def expected(self, variant: str, length: int) -> float:
        """Seconds to expect, from a shorter pass; logits grow with the square of the length."""
        if variant not in self.seconds:
            return 0.0
        known, seconds = self.seconds[variant]
        return seconds * (length / known) ** 2


@contextlib.contextmanager
def _streamed(wanted: bool) -> Iterator[None]:
    """Leave out the log-sum-exp if wanted, for comparison."""
    real = streaming.lse_logits
    if wanted:
        streaming.lse_logits = lambda *given: None  # type: ignore[assignment]
    try:
        yield
    finally:
        streaming.lse_logits = real


@contextlib.contextmanager
def _block_size(elements: int, device: torch.device) -> Iterator[None]:
    real = blocks.BLOCK_ELEMENTS
    blocks.BLOCK_ELEMENTS = elements * real // blocks.block_elements(device)
    try:
        yield
    finally:
        blocks.BLOCK_ELEMENTS = real


def timing_checks(place: Place) -> list[Check]:
    """One check per length, and one over the size of the blocks in which logits are streamed."""
    bench = _Bench(place)
    checks: list[Check] = [
        (f"n = {length:,}", partial(_lengths, bench, length)) for length in bench.lengths[:2]
    ]
    checks.append(("blocks of other sizes", partial(_blocks, bench)))
    checks.append((f"n = {bench.lengths[2]:,}", partial(_lengths, bench, bench.lengths[2])))
    return checks


def _lengths(bench: _Bench, length: int) -> Found:
    found = Found()
    names = []
    for variant in VARIANTS:
        expected = bench.expected(variant, length)
        if expected * 2 > bench.place.left:
            found.told[variant] = f"not reached: about {expected:.0f} s a pass"
        else:
            names.append(variant)
    if not names:
        raise NotReachedError("one pass would take longer than what is left")
    times, peaks = _interleave(
        {name: partial(bench.run, name, length) for name in names}, bench.place
    )
    base = statistics.median(times["forward"])
    for name in names:
        middle = statistics.median(times[name])
        bench.seconds[name] = length, middle
        told = f"{middle * 1e3:.1f} ms, × {middle / base:.2f}"
        if peaks[name]:
            told += f", {peaks[name]:,.0f} MiB"
        found.told[name] = told
    found.told["rounds"] = min(len(taken) for taken in times.values())
    return found


def _interleave(
    runs: dict[str, Callable[[], tuple[float, float]]], place: Place
) -> tuple[dict[str, list[float]], dict[str, float]]:
    """Times of up to `ROUNDS` rounds after a warm-up, and the largest peak of each run.

    Where there is no time for another round, those of the warm-up are returned.
    """
    times: dict[str, list[float]] = {name: [] for name in runs}
    peaks = dict.fromkeys(runs, 0.0)
    for count in range(ROUNDS + 1):
        begin = time.monotonic()
        for name, run in runs.items():
            seconds, peak = run()
            times[name].append(seconds)
            peaks[name] = max(peaks[name], peak)
        # Twice as much, so that the remaining lengths get a share.
        if (time.monotonic() - begin) * (2 if count else 1.2) > place.left:
            break
    return {name: taken[1:] or taken for name, taken in times.items()}, peaks


def _blocks(bench: _Bench) -> Found:
    found = Found()
    length = bench.lengths[0]
    for power in (18, 20) if bench.place.small else (20, 22, 24, 26):
        with _block_size(1 << power, bench.place.device):
            bench.run("full", length)
            seconds, peak = bench.run("full", length)
        found.told[f"2^{power} logits"] = f"{seconds * 1e3:.1f} ms, {peak:,.0f} MiB"
    found.told["full at n"] = length
    return found
