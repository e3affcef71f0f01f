"""Static ranges as the sites use them: read from a table, in the order of a call's heads."""

import torch
from torch import Tensor

from quantdiff.errors import QuantizationError
from quantdiff.hooks.found import Found
from quantdiff.hooks.layers import is_cross, layer_of
from quantdiff.hooks.passes import Pass
from quantdiff.hooks.shown import show
from quantdiff.quantization.chosen import Schemes
from quantdiff.quantization.scheme import Scheme
from quantdiff.quantization.table import Table

__all__ = ["check_table", "ends_of", "ends_of_heads"]

_CACHED = ("keys", "values")


def check_table(table: Table, schemes: Schemes, found: Found) -> None:
    """Refuse a table that was not made for a model, or lacks what the schemes need.

    Raises:
        UsageError: names the first difference, or the site that is missing.
    """
    static = [scheme for scheme in schemes.all if scheme.static]
    sites = _attention_sites(found)
    if static and sites:
        table.check_model(sites, found.modules)
    for name, (layer, _) in sites.items():
        for site in _CACHED:
            scheme = schemes.of(site, layer)
            if scheme is not None and scheme.static:
                table.range(scheme, name)


def _attention_sites(found: Found) -> dict[str, tuple[int, int]]:
    """Layer and number of query heads of every site that the model is sure to have, where known.

    A module's own number takes precedence: its config may have one number for layers that differ.
    """
    sites = {}
    for name, module in [*found.attention, *found.heads]:
        if is_cross(name):
            continue
        own = found.modules[name]
        heads = getattr(own, "query_heads", getattr(own, "num_heads", None))
        if heads is None:
            heads = getattr(getattr(module, "config", None), "num_attention_heads", None)
        layer = layer_of(name, found.layers)
        if layer is not None and isinstance(heads, int):
            sites[name] = layer, heads
    return sites


def ends_of(table: Table | None, scheme: Scheme, name: str) -> tuple[Tensor, Tensor]:
    """The result of `Table.range`, as tensors."""
    assert table is not None
    least, most = table.range(scheme, name)
    return torch.from_numpy(least), torch.from_numpy(most)


def ends_of_heads(
    table: Table | None, scheme: Scheme | None, now: Pass, name: str, x: Tensor, *, cross: bool
) -> tuple[Tensor, Tensor] | None:
    """The static ranges of the keys or values of an attention call.

    Args:
        table: holds them.
        scheme: for `keys` or `values`, or None.
        now: the pass.
        name: of the site: a module path, perhaps followed by a remark.
        x: the keys or values, (B, G, M, D).
        cross: whether they belong to another sequence.

    Returns:
        Least and largest value, (G, 1, 1) each, or (G, 1, D) for the granularity `channel`; None
        where the ranges are dynamic.

    Raises:
        QuantizationError: other heads or channels than the table's, or cross-attention.
        UsageError: the table has nothing for the module.
    """
    if scheme is None or not scheme.static:
        return None
    if cross:
        raise QuantizationError(
            f"{name} attends to another sequence, whose {scheme.site} are not calibrated; use the "
            "range dynamic for its layer"
        )
    module = name.partition(" ")[0]
    ends = ends_of(table, scheme, module)
    numbers = show(now, module, scheme.site, x).numbers
    known, width = len(ends[0]), ends[0].shape[1:]
    if max(numbers) >= known or tuple(width) not in ((), (x.shape[-1],)):
        raise QuantizationError(
            f"the table holds ranges of {known} heads of {scheme.site} for {module}"
            + (f", of {width[0]} channels," if width else "")
            + f" and the model shows a head {max(numbers)} of {x.shape[-1]} channels"
        )
    least, most = (end[numbers].view(len(numbers), 1, -1) for end in ends)
    return least, most
