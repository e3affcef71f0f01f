"""What each cell of a sweep computes with: schemes, a remedy, a single layer or head."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import product
from typing import Any, NamedTuple

from torch import nn

from quantdiff.analysis.sweep.grid import Together, cells_of, short_name
from quantdiff.errors import UsageError
from quantdiff.hooks.dispatch import attends_itself
from quantdiff.hooks.found import Found
from quantdiff.hooks.layers import layer_of
from quantdiff.hooks.linears import linear_modules
from quantdiff.quantization.remedy import NONE, Remedy
from quantdiff.quantization.scheme import Scheme

__all__ = ["EACH", "Entry", "check_each", "each_one", "entries_of"]

EACH = ("layer", "head")

# Site -> the config attribute that holds its number of heads.
_HEADS = {
    "attention_logits": "num_attention_heads",
    "attention_maps": "num_attention_heads",
    "keys": "num_key_value_heads",
    "values": "num_key_value_heads",
}
_LINEAR = ("linear_inputs", "weights")


class Entry(NamedTuple):
    """What a cell computes with.

    Attributes:
        schemes: empty for the unquantized model.
        remedy: what is done to the model beforehand.
    """

    schemes: Together
    remedy: Remedy = NONE


def entries_of(
    wanted: Iterable[Scheme | Iterable[Scheme]], remedies: Sequence[Remedy]
) -> tuple[tuple[Entry, ...], tuple[str, ...]]:
    """All schemes with all compatible remedies; the unquantized model once, without a remedy.

    Args:
        wanted: single schemes, and schemes used together.
        remedies: at least one.

    Returns:
        The entries, each once, and a sentence for each combination that was left out.
    """
    entries: dict[Entry, None] = {}
    notes: dict[str, None] = {}
    for chosen, schemes in product(remedies, cells_of(wanted)):
        if not schemes:
            entries[Entry(schemes)] = None
            continue
        try:
            if chosen != NONE and any(scheme.static for scheme in schemes):
                raise UsageError("a static range is calibrated on the model without a remedy")
            chosen.check(schemes)
        except UsageError as error:
            notes[f"left out: {chosen.name} with {short_name(schemes)}: {error}"] = None
        else:
            entries[Entry(schemes, chosen)] = None
    return tuple(entries), tuple(notes)


def check_each(entries: Sequence[Entry], each: str) -> None:
    """Refuse what cannot be done layer by layer, or head by head.

    Args:
        entries: those of a sweep.
        each: one of `EACH`.

    Raises:
        UsageError: an unknown word, a scheme for some layers or heads already or for a site
            without heads, query heads with key-value heads, or a remedy.
    """
    if each not in EACH:
        raise UsageError(f"a sweep goes by each {' or '.join(EACH)}, not by each {each!r}")
    if all(not entry.schemes for entry in entries):
        raise UsageError(f"there is no scheme that could be tried {each} by {each}")
    for entry in entries:
        if entry.remedy != NONE:
            raise UsageError(f"{each} by {each} goes without remedies: leave them out")
        for scheme in entry.schemes:
            if scheme.layers is not None or scheme.heads is not None:
                raise UsageError(
                    f"{each} by {each} takes schemes for all layers and heads, and one for "
                    f"{scheme.site} is for some"
                )
            if each == "head" and scheme.site not in _HEADS:
                raise UsageError(f"{scheme.site} have no heads; those are of {', '.join(_HEADS)}")
        if each == "head" and len({_HEADS[scheme.site] for scheme in entry.schemes}) > 1:
            raise UsageError(
                f"{short_name(entry.schemes)} is for query heads and for key-value heads, which "
                "are counted apart: name one kind at a time"
            )


def each_one(entries: Sequence[Entry], model: nn.Module, each: str) -> tuple[Entry, ...]:
    """The unquantized model, and every entry for one layer, or one head of a layer, at a time.

    Layers that hold none of an entry's sites (for keys, those without attention) are left out: they
    would cost nothing at any width.

    Args:
        entries: those that `check_each` accepts.
        model: the model with these layers and heads.
        each: one of `EACH`.

    Raises:
        UsageError: the model does not state how many heads it has.
    """
    modules = Found(model, None)
    found = [Entry(())]
    for entry in entries:
        for layer in _layers(entry.schemes, modules) if entry.schemes else []:
            for heads in _heads(entry.schemes, model, layer) if each == "head" else [None]:
                own = tuple(replace(s, layers=(layer,), heads=heads) for s in entry.schemes)
                found.append(entry._replace(schemes=own))
    return tuple(found)


def _layers(schemes: Together, found: Found) -> Sequence[int]:
    """The layers that hold a site of some schemes; all layers if none is known to."""
    every = range(len(found.layers))
    sites = {scheme.site for scheme in schemes}
    if not sites <= {*_HEADS, *_LINEAR}:
        return every
    names: list[str] = []
    if sites & set(_HEADS):
        known = [name for name, _ in [*found.attention, *found.heads]] + found.bare
        names += known or [n for n, module in found.modules.items() if attends_itself(type(module))]
    if sites & set(_LINEAR):
        names += linear_modules(found)
    holding = {layer_of(name, found.layers) for name in names}
    # Where a model attends may be known only once it runs.
    return [layer for layer in every if layer in holding] or every


def _heads(schemes: Together, model: nn.Module, layer: int) -> Iterator[tuple[int, ...]]:
    name = _HEADS[schemes[0].site]
    config: Any = getattr(model, "config", None)
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    if getattr(config, "is_heterogeneous", False):  # raises for attributes that differ by layer
        config = config.per_layer_config[layer]
    count = getattr(config, name, None) or getattr(config, "num_attention_heads", None)
    if not isinstance(count, int):
        raise UsageError(
            f"{type(model).__name__} does not tell how many heads it has: its config lacks {name}"
        )
    return ((head,) for head in range(count))
