"""Where quantized attention differs from a model's own by more than its grid."""

from collections.abc import Iterable

__all__ = ["MOVED", "computed_otherwise", "of_attention"]

MOVED = ("kl", "agreement")  # metrics that compare with the model's own attention

_SITES = {"keys", "values", "attention_logits", "attention_maps"}
_COARSE = {"bfloat16", "float16"}


def of_attention(sites: Iterable[str]) -> bool:
    """Whether any of the sites lies in an attention call, which quantdiff then computes itself."""
    return bool(_SITES & set(sites))


def computed_otherwise(dtypes: Iterable[str | None]) -> str | None:
    """A sentence for comparisons with the unquantized model in bf16 or fp16.

    There, attention with some sites quantized is computed in blocks, in fp32, or by flex attention,
    and that of the unquantized model by its own backend, in its dtype. In fp32 both agree to 1e-6.

    Args:
        dtypes: those of the models whose attention is quantized, such as `bfloat16`.

    Returns:
        The sentence, or None if there is nothing to report.
    """
    coarse = sorted(_COARSE.intersection(dtypes))
    if not coarse:
        return None
    return (
        f"in {' and '.join(coarse)}, KL and agreement of keys, values, attention logits and maps "
        "contain what computing attention in blocks in fp32 changes, beside the grid; in float32 "
        "they do not"
    )
