"""What an exported checkpoint costs: the numbers for its card, and a table of them."""

import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table

from quantdiff.analysis.evaluation.base import Text, quiet
from quantdiff.analysis.evaluation.divergence import build as build_divergence
from quantdiff.analysis.evaluation.forward import Forward
from quantdiff.analysis.evaluation.perplexity import build as build_perplexity
from quantdiff.analysis.sweep.ranges import check_text
from quantdiff.analysis.text import UNKNOWN, four_digits
from quantdiff.export.card import percent
from quantdiff.export.result import Exported

__all__ = ["export_table", "measuring"]

# Passes over the text: the source's perplexity and reference, the checkpoint's perplexity and KL.
PASSES = 4


def measuring(
    model: Any,
    tokenizer: Any,
    text: Text,
    *,
    calibrated_on: Mapping[str, dict[str, Any]] | None = None,
    batch_size: int = 1,
    progress: Callable[[int], None] = quiet,
) -> tuple[Callable[[Any], dict[str, Any]], int]:
    """Build a measurement for `quantdiff.export` that compares the checkpoint with its source.

    Args:
        model: the source.
        tokenizer: for both.
        text: the text to evaluate on.
        calibrated_on: what was calibrated, such as `the static ranges` -> the data of its
            calibration, as in `CalibrationTable.data`.
        batch_size: windows per pass; does not change the numbers.
        progress: called with the number of tokens done since the last call.

    Returns:
        A function that takes the quantized copy and returns `perplexity`, `kl` (from the source, in
        nats per token), `agreement` (share of equal top-1 tokens), `source` (its perplexity),
        `data`, its `fingerprint`, `tokens` and `sequence_length`; and the total number of tokens it
        will report to `progress`.

    Raises:
        UsageError: the text does not fit the model, or something was calibrated on it.
    """
    perplexity = build_perplexity("perplexity", "", model, tokenizer, text)
    divergence = build_divergence("divergence", "", model, tokenizer, text)
    for what, data in (calibrated_on or {}).items():
        check_text(perplexity, text, tokenizer, data, what)
    windows = perplexity.windows

    def measure(copy: Any) -> dict[str, Any]:
        with tempfile.TemporaryDirectory(prefix="quantdiff-measure-") as folder:
            before = perplexity.run(batch_size=batch_size, progress=progress)
            divergence.prepare(Path(folder), batch_size=batch_size, progress=progress)
            perplexity.forward = divergence.forward = Forward(copy, tokenizer)
            after = perplexity.run(batch_size=batch_size, progress=progress)
            moved = divergence.run(batch_size=batch_size, progress=progress)
        found = {metric.name: metric.value for metric in (*after.metrics, *moved.metrics)}
        return {
            "data": f"{windows.tokens:,} tokens of {windows.source} in windows of "
            f"{windows.seq_len:,}",
            "fingerprint": windows.fingerprint,
            "tokens": windows.tokens,
            "sequence_length": windows.seq_len,
            "source": {"perplexity": before.metrics[0].value},
            "perplexity": found["perplexity"],
            "kl": found["kl"],
            "agreement": found["agreement"],
        }

    return measure, PASSES * windows.tokens


def export_table(exported: Exported) -> Table:
    """Compare the checkpoint with its source in a table."""
    measured = exported.measured or {}
    before = measured.get("source", {})
    bits = 8 * exported.source_bytes / exported.parameters
    shown = Table(
        box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True, caption_justify="left",
        caption=f"the source's size is that of the model as loaded ({exported.source_dtype})",
    )  # fmt: skip
    for word in ("", "size", "bits per weight", "perplexity", "KL, nats", "agreement"):
        shown.add_column(word, justify="left" if not word else "right", no_wrap=True)
    shown.add_row(
        "source", _size(exported.source_bytes), f"{bits:.2f}",
        _number(before.get("perplexity"), "{:,.3f}".format), "", "",
    )  # fmt: skip
    shown.add_row(
        exported.format, _size(exported.bytes), f"{exported.bits_per_weight:.2f}",
        _number(measured.get("perplexity"), "{:,.3f}".format),
        _number(measured.get("kl"), four_digits), _number(measured.get("agreement"), percent),
    )  # fmt: skip
    return shown


def _size(size: int) -> str:
    return f"{size / 1e6:,.1f} MB"


def _number(value: float | None, told: Callable[[float], str]) -> str:
    return UNKNOWN if value is None else told(value)
