"""What an exported checkpoint costs: the numbers of its card, and the table that shows them."""

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

# Passes over the text: the source's perplexity and reference, and both for the checkpoint.
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
    """A measurement for `quantdiff.export`: the checkpoint beside its source.

    Args:
        model: the source.
        tokenizer: of both.
        text: what is read.
        calibrated_on: the data of each calibration, as in `CalibrationTable.data`, by what was
            calibrated, such as `the static ranges`.
        batch_size: windows in one pass; changes no number.
        progress: told the tokens done since the last call.

    Returns:
        A function of the quantized copy, which gives `perplexity`, `kl` (from the source, nats a
        token), `agreement` (share of top-1 tokens), `source` (its perplexity), `data`, their
        `fingerprint`, `tokens` and `sequence_length`; and the tokens it will tell `progress` of.

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
    """The checkpoint beside its source."""
    measured = exported.measured or {}
    before = measured.get("source", {})
    bits = 8 * exported.source_bytes / exported.parameters
    shown = Table(
        box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True, caption_justify="left",
        caption=f"the source's size is that of the model as loaded ({exported.source_dtype})",
    )  # fmt: skip
    for word in ("", "size", "bits a weight", "perplexity", "KL, nats", "agreement"):
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
