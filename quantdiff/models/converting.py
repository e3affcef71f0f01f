"""Conversion of a folder of official DIFF weights to a transformers model and back."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

import quantdiff.models.diff_v2  # noqa: F401  (registers itself)
from quantdiff.errors import UsageError
from quantdiff.files import staged_folder, write_bytes, write_json
from quantdiff.models.checks import check_keys, library_errors
from quantdiff.models.conversion import (
    Conversion,
    Heads,
    attention_heads,
    convert_state,
    find_conversion,
)
from quantdiff.models.converting_card import Converted, card
from quantdiff.models.converting_check import (
    attention_as_stored,
    check_attention,
    reloaded,
)
from quantdiff.models.converting_config import (
    KINDS,
    OWNERS,
    attention_prefix,
    find_kind,
    official_settings,
    transformers_settings,
)
from quantdiff.models.converting_files import (
    CARD,
    KEPT_CARD,
    OWNED,
    copy_companions,
    dtype_name,
    read_settings,
    readable,
    same_bits,
    tensors,
    write_weights,
)

__all__ = ["convert_folder"]

State = dict[str, Tensor]


def convert_folder(
    source: str | Path,
    out: str | Path,
    to: str,
    *,
    from_: str | None = None,
    depth_offset: int | None = None,
    overwrite: bool = False,
    command: str = "",
    report: Callable[[str], None] | None = None,
) -> Converted:
    """Convert a folder of weights, and compare the result with the source before it is kept.

    Official weights are those of a decoder with Llama's names and the official attention modules
    (`model.layers.0.self_attn.q_proj.weight`, …), next to a `config.json` with Llama's entries.
    Head counts are read from the weights. Tokenizer, generation config, chat template and licence
    are copied; a model card is written.

    Args:
        source: a folder with `config.json` and safetensors.
        out: the folder to write; new or empty.
        to: `diffllama` or `official-v1`, `diff_v2` or `official-v2`.
        from_: the kind of the source. It may be left out where the weights' names (V1) or
            `model_type` in `config.json` determine it.
        depth_offset: what training added to a layer's index for V1's λ_init; by default
            `lambda_init_depth_offset` in `config.json`, or 0.
        overwrite: replace the model that is in `out`.
        command: the command line, for the card.
        report: called with the name of each step.

    Returns:
        A summary.

    Raises:
        UsageError: a file cannot be read or written, the kinds do not fit, the target cannot
            represent the model, or the result is not the source; nothing is left behind.
    """
    source, out = Path(source).expanduser(), Path(out).expanduser()
    step = report or _silent
    if not source.is_dir():
        raise UsageError(f"{source} is no folder: give one with config.json and safetensors")
    for kind in (to, from_):
        if kind is not None and kind not in KINDS:
            raise UsageError(f"the kind {kind!r} is unknown; known: {', '.join(KINDS)}")
    _check_out(source, out, overwrite)
    with staged_folder(out, marker="config.json", owned=OWNED, overwrite=overwrite) as stage:
        settings = read_settings(source)
        step(f"reading {source}")
        state = dict(tensors(source))
        conversion = find_conversion(find_kind(state, settings, from_), to)
        layers, heads = _uniform(attention_heads(state, conversion))
        step(f"converting {layers} layers from {conversion.source} to {conversion.target}")
        state, converted, settings, model = _both_sides(
            source, state, settings, conversion, (layers, heads), depth_offset
        )
        step("writing")
        # safetensors' own errors too: it raises one of them on a full disk.
        with library_errors(f"{out} cannot be written"):
            if _official(conversion.target):
                write_weights(converted, stage)
                write_json(stage / "config.json", settings)
            else:
                model.load_state_dict(converted, strict=False, assign=True)
                model.tie_weights()
                model.save_pretrained(stage)
            copy_companions(source, stage)
            readable(stage)
        step("checking")
        stored = attention_as_stored(stage, converted)
        if not _official(conversion.target):
            model = reloaded(stage, converted)
        kinds = (conversion.source, conversion.target)
        result = Converted(
            source=str(source),
            out=str(out),
            kinds=kinds,
            layers=layers,
            query_heads=heads.query,
            kv_heads=heads.kv,
            head_dim=heads.width,
            parameters=sum(value.numel() for value in converted.values()),
            dtypes=tuple(sorted({dtype_name(value) for value in converted.values()})),
            check=check_attention(state, stored, kinds, heads, model),
            lossy=conversion.lossy if _folds(state) else "",
            source_card=(stage / KEPT_CARD).is_file(),
        )
        write_bytes(stage / CARD, card(result, command).encode())
    return result


def _official(kind: str) -> bool:
    return kind.startswith("official")


def _both_sides(
    source: Path,
    state: State,
    settings: dict[str, Any],
    conversion: Conversion,
    found: tuple[int, Heads],
    depth_offset: int | None,
) -> tuple[State, State, dict[str, Any], Any]:
    """Weights of the source and of the target, the target's config, the transformers model."""
    layers, heads = found
    kinds = (conversion.source, conversion.target)
    if _official(conversion.target):
        model = _model(source, settings, conversion.source)
        state = _untied(state, model)
        _check_fit(source, model, state)
        settings = official_settings(settings, model.config, heads, kinds[1], depth_offset)
        return state, convert_state(state, *kinds), settings, model
    settings = transformers_settings(settings, state, layers, heads, kinds[0], depth_offset)
    model = _model(source, settings, conversion.target)
    state = _untied(state, model)
    converted = convert_state(state, *kinds)
    _check_fit(source, model, converted)
    return state, converted, settings, model


def _folds(state: State) -> bool:
    """Whether a sub-layer norm has a weight that is not 1."""
    return any(bool((v != 1).any()) for name, v in state.items() if name.endswith("subln.weight"))


def _silent(step: str) -> None:
    """Report nothing."""


def _check_out(source: Path, out: Path, overwrite: bool) -> None:
    """Refuse a folder whose files a conversion must not replace."""
    if out.resolve() == source.resolve():
        raise UsageError(f"{out} is the source itself; choose another --out")
    if not out.is_dir() or all(path.name.startswith(".staged-") for path in out.iterdir()):
        return  # new, or what a killed run left behind
    if not overwrite:
        raise UsageError(f"{out} exists and is not empty; choose another --out or pass --overwrite")
    # A run killed while its files were moved one by one has it here or still in the stage.
    if not any((folder / "config.json").is_file() for folder in (out, *out.glob(".staged-*"))):
        raise UsageError(
            f"{out} holds files but no model that could be replaced (no config.json); choose "
            "another --out"
        )


def _uniform(modules: Mapping[str, Heads]) -> tuple[int, Heads]:
    """Number of layers and the head counts, which must be the same in every layer."""
    for layer in range(len(modules)):
        if attention_prefix(layer) not in modules:
            raise UsageError(
                f"the {len(modules)} attention modules are at {min(modules)}… and so on; by "
                f"Llama's names, which are expected, one of them is at {attention_prefix(layer)}…"
            )
    first = modules[attention_prefix(0)]
    for prefix, heads in modules.items():
        if heads != first:
            raise UsageError(
                f"{prefix.rstrip('.')} has other heads ({heads}) than layer 0 ({first}), which no "
                "config can say"
            )
    return len(modules), first


def _model(source: Path, settings: Mapping[str, Any], kind: str) -> Any:
    """The transformers model of the config, without weights."""
    given = {entry: value for entry, value in settings.items() if entry not in OWNERS}
    with library_errors(f"config.json of {source} makes no {kind} model"), torch.device("meta"):
        config = AutoConfig.for_model(kind, **given)
        # In fp64, eager attention would take its softmax in fp32.
        return AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")


def _untied(state: State, model: Any) -> State:
    """The state without the copy of the embedding that some checkpoints with tied weights hold."""
    head, embedding = "lm_head.weight", "model.embed_tokens.weight"
    if not model.config.tie_word_embeddings or head not in state or embedding not in state:
        return state
    if not same_bits(state[head], state[embedding]):
        raise UsageError(
            f"config.json says tie_word_embeddings, but {head} is not {embedding}: set it to false"
        )
    return {name: value for name, value in state.items() if name != head}


def _check_fit(source: Path, model: Any, state: State) -> None:
    """Refuse weights that are not exactly the model's parameters."""
    wanted = {name: tuple(value.shape) for name, value in model.state_dict().items()}
    if model.config.tie_word_embeddings:
        del wanted["lm_head.weight"]
    given = {name: tuple(value.shape) for name, value in state.items()}
    check_keys(
        str(source),
        {
            "missing_keys": wanted.keys() - given.keys(),
            "unexpected_keys": given.keys() - wanted.keys(),
            "mismatched_keys": [
                (name, given[name], wanted[name])
                for name in given.keys() & wanted.keys()
                if given[name] != wanted[name]
            ],
        },
    )
