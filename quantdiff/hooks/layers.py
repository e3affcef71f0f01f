"""Finding the layers whose outputs form the residual stream."""

from collections.abc import Sequence

from torch import nn

from quantdiff.errors import RecordingError, UsageError
from quantdiff.hooks.dispatch import attends_itself

__all__ = ["block_list", "is_cross", "layer_of", "named_layers", "owning_list"]

Layers = list[tuple[str, nn.Module]]


def owning_list(model: nn.Module, attention: Sequence[str]) -> tuple[Layers, list[str]]:
    """The list of layers that holds a decoder's attention modules.

    Args:
        model: a transformers model.
        attention: names of its attention modules.

    Returns:
        Names and modules of the layers in order, and the names of the attention modules in them:
        in a model with towers, those of the text decoder.

    Raises:
        RecordingError: no list, or more than one, holds the decoder's attention modules.
    """
    modules = list(model.named_modules())
    lists: dict[str, nn.Module] = {n: m for n, m in modules if isinstance(m, nn.ModuleList)}
    owners = {site: _outermost(site, lists) for site in attention}
    if set(owners.values()) == {None}:  # blocks may also be in a Sequential
        lists = {n: m for n, m in modules if _alike(m)}
        owners = {site: _outermost(site, lists) for site in attention}
    if None in owners.values():
        site = next(site for site, owner in owners.items() if owner is None)
        raise RecordingError(
            f"the attention module {site} stands in no list of layers; name the layers: "
            "record(model, layers=['…', …])"
        )
    found = sorted({owner for owner in owners.values() if owner is not None})
    if len(found) > 1:
        decoder = _decoder_name(model)
        inside = [name for name in found if decoder and name.startswith(f"{decoder}.")]
        found = inside or found
    if len(found) != 1:
        raise RecordingError(
            f"attention modules stand in more than one list of layers ({', '.join(found)}); "
            "quantdiff records decoder-only models"
        )
    layers = _distinct([(f"{found[0]}.{i}", layer) for i, layer in enumerate(lists[found[0]])])
    return layers, [site for site in attention if owners[site] == found[0]]


def block_list(model: nn.Module) -> Layers:
    """The largest list of blocks of one type, for a model that gives no other clue.

    Lists inside blocks that are known to attend, such as lists of experts, are left out.

    Raises:
        RecordingError: there is none; the remedy is to name the layers.
    """
    lists = {name: module for name, module in model.named_modules() if _alike(module)}
    attending = {module for module in lists.values() if _attends(module)}
    within = {inner for module in attending for block in module for inner in block.modules()}
    lists = {
        n: module for n, module in lists.items() if module in attending or module not in within
    }
    several = {module for module in lists.values() if len(module) > 1}
    best, size = None, (False, 0)
    for name, module in lists.items():
        # A list of towers is not a list of blocks: the blocks are inside.
        if any(inner in several for block in module for inner in block.modules()):
            continue
        # A list of one block is chosen only if no other list has several.
        weight = (len(module) > 1, sum(p.numel() for p in module.parameters()))
        if weight > size:
            best, size = (name, module), weight
    if best is None:
        raise RecordingError(
            f"{type(model).__name__} has no list of like blocks; name its layers: "
            "record(model, layers=['…', …])"
        )
    name, module = best
    prefix = f"{name}." if name else ""
    return _distinct([(f"{prefix}{i}", layer) for i, layer in enumerate(module)])


def named_layers(model: nn.Module, names: Sequence[str]) -> Layers:
    """The modules with these names.

    Raises:
        UsageError: a name that the model does not have.
    """
    modules = dict(model.named_modules())
    for name in names:
        if name not in modules:
            raise UsageError(f"{type(model).__name__} has no module {name!r}")
    return _distinct([(name, modules[name]) for name in names])


def layer_of(site: str, layers: Layers) -> int | None:
    """Index of the layer that contains a module, or None."""
    for i, (name, _) in enumerate(layers):
        if site == name or site.startswith(f"{name}."):
            return i
    return None


def is_cross(site: str) -> bool:
    """Whether an attention module is, by its name, the cross-attention of a layer."""
    parts = site.lower().split(".")
    return any("cross" in part or part.startswith(("encoder_attn", "encdec")) for part in parts)


def _alike(module: nn.Module) -> bool:
    """Whether a module is a list of modules of one type."""
    return (
        isinstance(module, nn.ModuleList | nn.Sequential)
        and len({type(child) for child in module}) == 1
    )


def _attends(module: nn.Module) -> bool:
    return any(map(attends_itself, {type(inner) for inner in module.modules()}))


def _distinct(layers: Layers) -> Layers:
    """Refuse a module that is listed twice: each of its outputs would count for both places."""
    if len({id(module) for _, module in layers}) < len(layers):
        raise RecordingError(
            "one module stands more than once in the list of layers; which of them an output "
            "belongs to cannot be told"
        )
    return layers


def _outermost(site: str, lists: dict[str, nn.Module]) -> str | None:
    parts = site.split(".")
    prefixes = (".".join(parts[:i]) for i in range(1, len(parts)))
    return next((prefix for prefix in prefixes if prefix in lists), None)


def _decoder_name(model: nn.Module) -> str | None:
    get = getattr(model, "get_decoder", None)
    decoder = get() if callable(get) else None
    return next((name for name, module in model.named_modules() if module is decoder), None)
