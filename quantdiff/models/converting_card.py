"""What was converted into what: a summary, and the model card made from it."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from quantdiff.models.converting_check import Check
from quantdiff.models.converting_files import KEPT_CARD
from quantdiff.versions import versions

__all__ = ["Converted", "card"]

TITLES = {
    "diffllama": "a DiffLlama model of transformers",
    "diff_v2": "a DIFF V2 model for transformers",
    "official-v1": "weights for the official DIFF V1 modules",
    "official-v2": "weights for the official DIFF V2 modules",
}

USE = {
    "diffllama": "It loads with transformers' `AutoModelForCausalLM.from_pretrained`.",
    "diff_v2": "It loads with transformers' `AutoModelForCausalLM.from_pretrained` and "
    "`trust_remote_code=True`; the modelling code is in this folder. With quantdiff no code of the "
    "folder is run.",
    "official-v1": "`num_heads` and `num_kv_heads` in `config.json` are the arguments of the "
    "official module, which count differential heads; a layer's `depth` is its index, from 0. The "
    "rest of the decoder has Llama's names. The sub-layer norm's eps is `subln_eps`; the official "
    "code has 1e-05.",
    "official-v2": "`num_heads`, `num_kv_heads` and `head_dim` in `config.json` are the arguments "
    "of the official module; `num_heads` counts the heads that the subtraction leaves. The rest of "
    "the decoder has Llama's names.",
}

# What a conversion assumes and cannot check.
ASSUMED = {
    ("official-v1", "diffllama"): "λ_init was taken to be 0.8 − 0.6·exp(−0.3·layer), layers "
    "counted from 0, as in the official code and in DiffLlama.",
    ("official-v2", "diff_v2"): "Weights of the two kinds have the same names and shapes: that the "
    "source was official-v2 is what the user or its `config.json` said.",
    ("diff_v2", "official-v2"): "Weights of the two kinds have the same names and shapes: that the "
    "source was diff_v2 is what the user or its `config.json` said.",
}


@dataclass(frozen=True)
class Converted:
    """What was converted into what.

    Attributes:
        source, out: the folders.
        kinds: of the source and of the target.
        layers, query_heads, kv_heads, head_dim: of the attention, counting all query heads.
        parameters: their number, tied ones counted once.
        dtypes: of the parameters, for example `("bfloat16",)`; each keeps its own.
        check: how the two were compared.
        lossy: what cannot be undone, or empty.
        source_card: whether the source has a model card, which is kept beside the new one.
    """

    source: str
    out: str
    kinds: tuple[str, str]
    layers: int
    query_heads: int
    kv_heads: int
    head_dim: int
    parameters: int
    dtypes: tuple[str, ...]
    check: Check
    lossy: str
    source_card: bool

    @property
    def name(self) -> str:
        """Name of the folder, for titles."""
        return Path(self.out).resolve().name

    def to_json(self) -> dict[str, Any]:
        """The summary as JSON, with the kinds as `from` and `to`, and the versions."""
        found = asdict(self)
        source, target = found.pop("kinds")
        return {"from": source, "to": target} | found | {"versions": versions()}


def card(converted: Converted, command: str) -> str:
    """The model card in Markdown: what was converted, what is exact and what is not.

    Args:
        converted: the summary.
        command: the command line, or empty.
    """
    source, target = converted.kinds
    dtypes = " and ".join(converted.dtypes)
    exact = (
        "Heads and rotary channels were reordered" if "v1" in source or "v1" in target else
        "Rotary channels were reordered"
    )  # fmt: skip
    parts = [
        "---\nlibrary_name: "
        + ("safetensors" if target.startswith("official") else "transformers")
        + "\ntags:\n- differential-transformer\n- quantdiff\n---",
        f"# {converted.name}: {TITLES[target]}",
        f"Converted by quantdiff from `{converted.source}` ({source}) to {target}: "
        f"{converted.layers} layers of {converted.query_heads} query heads (both maps counted) and "
        f"{converted.kv_heads} key-value heads of width {converted.head_dim}, "
        f"{converted.parameters:,} parameters in {dtypes}. {USE[target]}",
        "## What is exact",
        f"{exact}, which is exact: to the bit, and undone by converting back. Everything outside "
        "of attention is as it was. Every parameter keeps its dtype.",
    ]
    if converted.lossy:
        parts.append(
            f"One thing is lost: {converted.lossy}, since {target} has no such weight. The product "
            f"was rounded once, to the weights' dtype ({dtypes}). It cannot be unfolded: converted "
            "back, the sub-layer norm's weight is 1 and the output projection stays as it is here."
        )
    if (source, target) in ASSUMED:
        parts.append(ASSUMED[source, target])
    check = converted.check
    layers = ", ".join(map(str, check.layers))
    parts += [
        "## What was checked",
        "The files were read back and compared to the bit with what was converted. Attention of "
        f"layers {layers} was computed on random hidden states, once with the official arrangement "
        "of heads and channels and once by transformers. Relative to the root mean square of a "
        f"layer's outputs, they differ by at most {check.difference:.1e} in fp64"
        + (
            f", and by {check.stored:.1e} with the folded projection as it is stored."
            if converted.lossy
            else "."
        ),
        "## How it was made",
        *([f"```\n{command}\n```"] if command else []),
        ", ".join(f"{name} {version}" for name, version in versions().items()) + ".",
    ]
    if converted.source_card:
        parts.append(f"The source's own card is [{KEPT_CARD}]({KEPT_CARD}).")
    return "\n\n".join(parts) + "\n"
