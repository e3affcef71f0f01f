"""`config.json` before and after a conversion, checked against the weights."""

from collections.abc import Collection, Mapping
from typing import Any

from torch import Tensor

from quantdiff.attention.modules import NORM_EPS
from quantdiff.errors import UsageError
from quantdiff.models.conversion import CONVERSIONS, Heads

__all__ = [
    "KINDS",
    "OWNERS",
    "attention_prefix",
    "find_kind",
    "official_counts",
    "official_settings",
    "transformers_settings",
]

KINDS = tuple(dict.fromkeys(source for source, _ in CONVERSIONS))

# Entries of an official folder that no transformers config has: the modules' head counts, and
# other settings that change the mathematics.
NUM_HEADS, NUM_KV_HEADS = "num_heads", "num_kv_heads"
SUBLN_EPS, DEPTH_OFFSET = "subln_eps", "lambda_init_depth_offset"

# Entries that depend on whose code opens the folder.
OWNERS = ("model_type", "architectures", "auto_map", "transformers_version", "_name_or_path")

# Entries written to an official folder even where the source model left them to a default.
SAID = (
    "hidden_size", "intermediate_size", "num_hidden_layers", "vocab_size", "hidden_act",
    "max_position_embeddings", "rms_norm_eps", "tie_word_embeddings", "bos_token_id",
    "eos_token_id", "pad_token_id",
)  # fmt: skip


def attention_prefix(layer: int) -> str:
    """Prefix of the names of a layer's attention parameters, in Llama's naming."""
    return f"model.layers.{layer}.self_attn."


def find_kind(names: Collection[str], settings: Mapping[str, Any], told: str | None) -> str:
    """Which kind of weights a folder holds.

    V1's two kinds have different parameter names. V2's two have the same, so that only the user or
    `config.json` can tell them apart.

    Args:
        names: of the parameters.
        settings: `config.json`.
        told: the kind given by the user, or None.

    Raises:
        UsageError: an unknown kind, no differential attention, a kind that cannot be determined,
            or one that the names or `config.json` contradict.
    """
    if told is not None and told not in KINDS:
        raise UsageError(f"the kind {told!r} is unknown; known: {', '.join(KINDS)}")
    written = settings.get("model_type")
    if written in KINDS and told not in (None, written):
        raise UsageError(
            f"config.json says that these weights are {written}, not {told}: converting weights "
            "twice scrambles them; leave --from out, or correct model_type"
        )
    told = written if written in KINDS else told
    kinds: tuple[str, ...]
    if any(name.endswith("subln.weight") for name in names):
        kinds, sign = ("official-v1",), "subln.weight is among them"
    elif any(name.endswith("lambda_q1") for name in names):
        kinds, sign = ("diffllama",), "lambda_q1 is among them, subln.weight is not"
    elif any(name.endswith("lambda_proj.weight") for name in names):
        kinds, sign = ("official-v2", "diff_v2"), "lambda_proj.weight is among them"
    else:
        raise UsageError(
            "there is no differential attention among the weights: neither lambda_q1 (V1) nor "
            "lambda_proj.weight (V2)"
        )
    if told is None and len(kinds) > 1:
        raise UsageError(
            f"weights of {kinds[0]} and of {kinds[1]} have the same names and shapes, and "
            "config.json does not say which these are: say it with --from"
        )
    if told is not None and told not in kinds:
        raise UsageError(
            f"the weights are not of the kind {told}, but {' or '.join(kinds)}: {sign}"
        )
    return told or kinds[0]


def transformers_settings(
    settings: Mapping[str, Any],
    state: Mapping[str, Tensor],
    layers: int,
    heads: Heads,
    kind: str,
    depth_offset: int | None,
) -> dict[str, Any]:
    """The config of a transformers model for official weights.

    Args:
        settings: `config.json` beside the official weights.
        state: the weights.
        layers: how many.
        heads: of every layer.
        kind: `official-v1` or `official-v2`.
        depth_offset: what training added to a layer's index for λ_init, if the user gives it.

    Raises:
        UsageError: `config.json` contradicts the weights, lacks what they do not determine, or
            sets something that the target cannot represent.
    """
    measured = {"num_hidden_layers": layers, "head_dim": heads.width}
    for entry, name, axis in (
        ("hidden_size", f"{attention_prefix(0)}q_proj.weight", 1),
        ("vocab_size", "model.embed_tokens.weight", 0),
        ("intermediate_size", "model.layers.0.mlp.gate_proj.weight", 0),
    ):
        if name in state:
            measured[entry] = state[name].shape[axis]
    for entry, value in measured.items():
        if settings.get(entry) not in (None, value):
            raise UsageError(
                f"config.json says {entry} = {settings[entry]}, the weights say {value}: correct "
                "config.json"
            )
    _check_counts(settings, heads, kind)
    _check_rotary(settings)
    if settings.get("rms_norm_eps") is None:
        raise UsageError("config.json lacks rms_norm_eps, which cannot be read from the weights")
    offset = _depth_offset(settings, depth_offset, kind)
    if kind == "official-v1":
        eps, sub = settings["rms_norm_eps"], settings.get(SUBLN_EPS, NORM_EPS)
        if eps != sub:
            raise UsageError(
                f"the sub-layer norm's eps is {sub} ({SUBLN_EPS} in config.json; {NORM_EPS} in the "
                f"official code) and rms_norm_eps is {eps}: DiffLlama has one eps for all norms, "
                "so it cannot represent this model"
            )
        if offset:
            raise UsageError(
                f"these weights were trained with λ_init of depth {offset:+d}, and DiffLlama "
                "computes it from the layer's index, counted from 0: it cannot represent this "
                "convention, which is to be kept and not corrected"
            )
    given = {
        entry: value
        for entry, value in settings.items()
        if entry not in (*OWNERS, NUM_HEADS, NUM_KV_HEADS, SUBLN_EPS, DEPTH_OFFSET)
    }
    if given.get("tie_word_embeddings") is None:
        given["tie_word_embeddings"] = "lm_head.weight" not in state
    counts = {"num_attention_heads": heads.query, "num_key_value_heads": heads.kv}
    return given | measured | counts


def official_settings(
    settings: Mapping[str, Any], config: Any, heads: Heads, kind: str, depth_offset: int | None
) -> dict[str, Any]:
    """The entries of `config.json` next to official weights: enough to convert back.

    Args:
        settings: `config.json` of the transformers model.
        config: the same, with transformers' defaults.
        heads: of every layer.
        kind: `official-v1` or `official-v2`.
        depth_offset: as given by the user; transformers models have none.

    Raises:
        UsageError: the official modules cannot represent the model.
    """
    if _depth_offset({}, depth_offset, kind):
        raise UsageError("DiffLlama computes λ_init from the layer's index: its depth offset is 0")
    if kind == "official-v1" and heads.query * heads.width != config.hidden_size:
        raise UsageError(
            f"{heads.query} query heads of width {heads.width} are not hidden_size = "
            f"{config.hidden_size} wide, as official V1 modules are"
        )
    _check_rotary({"rope_parameters": config.rope_parameters})
    counts = ("num_attention_heads", "num_key_value_heads")
    given = {entry: v for entry, v in settings.items() if entry not in (*OWNERS, *counts)}
    for entry in SAID:
        given.setdefault(entry, getattr(config, entry))
    if "rope_theta" not in given:
        given.setdefault("rope_parameters", config.rope_parameters)
    query, kv = official_counts(heads, kind)
    given |= {NUM_HEADS: query, NUM_KV_HEADS: kv, "head_dim": heads.width}
    if kind == "official-v1":
        given |= {SUBLN_EPS: config.rms_norm_eps, DEPTH_OFFSET: 0}
    return {"model_type": kind} | given


def official_counts(heads: Heads, kind: str) -> tuple[int, int]:
    """`num_heads` and `num_kv_heads` as the official modules count them."""
    return heads.query // 2, heads.kv // 2 if kind == "official-v1" else heads.kv


def _check_counts(settings: Mapping[str, Any], heads: Heads, kind: str) -> None:
    """Check head counts; Llama's entries may count as the official code or transformers does."""
    official = official_counts(heads, kind)
    for entries, allowed in (
        ((NUM_HEADS, NUM_KV_HEADS), [official]),
        (("num_attention_heads", "num_key_value_heads"), [official, (heads.query, heads.kv)]),
    ):
        given = [settings.get(entry) for entry in entries]
        if not any(
            all(g in (None, count) for g, count in zip(given, counts, strict=True))
            for counts in allowed
        ):
            told = " and ".join(
                f"{entry} = {g}" for entry, g in zip(entries, given, strict=True) if g is not None
            )
            raise UsageError(
                f"config.json says {told}; the weights hold {official[0]} differential heads "
                f"({heads.query} query heads) and {heads.kv} key-value heads of width "
                f"{heads.width}: correct config.json"
            )


def _check_rotary(settings: Mapping[str, Any]) -> None:
    ropes = [settings.get(entry) for entry in ("rope_parameters", "rope_scaling")]
    entries = [settings, *(rope for rope in ropes if isinstance(rope, Mapping))]
    for given in entries:
        if given.get("partial_rotary_factor", 1.0) not in (None, 1, 1.0):
            raise UsageError(
                "config.json says partial_rotary_factor = "
                f"{given['partial_rotary_factor']}: heads that are rotated in part are not known"
            )
    if not any(given.get("rope_theta") for given in entries):
        raise UsageError(
            "config.json says neither rope_theta nor rope_parameters, which cannot be read from "
            "the weights (10000 in the official code)"
        )


def _depth_offset(settings: Mapping[str, Any], told: int | None, kind: str) -> int:
    written = settings.get(DEPTH_OFFSET)
    if told is not None and written not in (None, told):
        raise UsageError(f"config.json says {DEPTH_OFFSET} = {written}, not {told}")
    offset = written or told or 0
    if not isinstance(offset, int):
        raise UsageError(f"config.json says {DEPTH_OFFSET} = {offset!r}; it is a whole number")
    if offset and kind == "official-v2":
        raise UsageError("a depth offset is one of V1's λ_init; V2 has none")
    return offset
