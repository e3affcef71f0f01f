"""Published numbers of the differential attention paper, to show beneath measured tables."""

from dataclasses import dataclass

import pandas as pd

__all__ = [
    "FIGURE_8",
    "FIGURE_8_SOURCE",
    "FIGURE_8_UNSAID",
    "MODELS",
    "SOURCE",
    "TABLE_5",
    "TOKENS",
    "UNSAID",
    "Published",
    "figure_8_frame",
    "table_5_frame",
]

MODELS = (
    "Transformer and DIFF Transformer of 3 billion parameters each (Appendix B): 28 layers, hidden "
    "size 3,072, head width 128, 24 heads of the one and 12 differential heads of the other, "
    "trained on 350B tokens"
)
TOKENS = 400_000  # in Table 5, printed as "0.4M"

SOURCE = (
    "Differential Transformer, arXiv 2410.05258 (ICLR 2025), Table 5: largest activation values "
    "over 0.4M tokens, 3B models of Appendix B"
)

UNSAID = (
    "The paper does not say on which data it measured, nor whether masked positions count, so a "
    "difference to a measured table is no error in either."
)


@dataclass(frozen=True)
class Published:
    """One row of Table 5; `ranks` maps N to the N-th largest magnitude."""

    model: str
    activation: str
    ranks: dict[int, float]
    median: float


def _row(model: str, activation: str, *values: float) -> Published:
    *ranks, median = values
    return Published(model, activation, dict(zip((1, 2, 3, 10, 100), ranks, strict=True)), median)


TABLE_5 = (
    _row("Transformer", "attention_logits", 318.0, 308.2, 304.9, 284.7, 251.5, 5.4),
    _row("DIFF", "attention_logits", 38.8, 38.8, 37.3, 32.0, 27.4, 3.3),
    _row("Transformer", "hidden_states", 3608.6, 3607.4, 3603.6, 3552.1, 2448.2, 0.6),
    _row("DIFF", "hidden_states", 1688.2, 1672.5, 1672.1, 1624.3, 740.9, 1.2),
)

FIGURE_8_SOURCE = (
    "Differential Transformer, arXiv 2410.05258 (ICLR 2025), Figure 8: zero-shot accuracy on "
    "HellaSwag with the attention logits quantized, 3B models; read off the figure to about 0.1 %"
)

FIGURE_8_UNSAID = (
    "Ranges are dynamic absmax; the paper does not say over what (layer, head or row), nor whether "
    "accuracy is normalised by length."
)

# Model -> bits -> accuracy, in 0 … 1.
FIGURE_8 = {
    "DIFF-3B": {16: 0.662, 8: 0.663, 6: 0.660, 4: 0.588},
    "Transformer-3B": {16: 0.634, 8: 0.627, 6: 0.589, 4: 0.339},
}


def table_5_frame() -> pd.DataFrame:
    """Table 5 with the columns of a measured table: model, activation, top1 … top100, median."""
    return pd.DataFrame([
        {"model": row.model, "activation": row.activation}
        | {f"top{n}": value for n, value in row.ranks.items()}
        | {"median": row.median}
        for row in TABLE_5
    ])  # fmt: skip


def figure_8_frame() -> pd.DataFrame:
    """Figure 8, one row per model, with its accuracies by bits: `bits_16`, `bits_8`, …."""
    return pd.DataFrame([
        {"model": model} | {f"bits_{bits}": value for bits, value in values.items()}
        for model, values in FIGURE_8.items()
    ])  # fmt: skip
