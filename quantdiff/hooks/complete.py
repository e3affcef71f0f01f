"""Checks that a forward pass was seen completely, and that its calls can be told apart."""

from collections.abc import Sequence

from torch import nn

from quantdiff.errors import RecordingError
from quantdiff.hooks.found import Found
from quantdiff.hooks.layers import is_cross
from quantdiff.hooks.passes import Pass

__all__ = ["check_complete", "check_once", "site_key"]


def site_key(name: str, branch: int | None) -> str:
    """Key under which a site's calls are counted in a pass; a layer may have the site's name."""
    return f"{name} (logits)" if branch is None else f"{name} (branch {branch})"


def check_once(name: str, calls: int) -> None:
    """Refuse a module that is called again in a pass, before its calls are pooled.

    Raises:
        RecordingError: names the module.
    """
    if calls > 1:
        raise RecordingError(
            f"{name} is called several times in a forward pass, so that the numbers of its calls "
            "could not be told apart; give each call a module of its own, which may share the "
            "parameters"
        )


def check_complete(now: Pass, model: nn.Module, found: Found, sites: Sequence[str]) -> None:
    """Refuse a pass in which a hook stayed silent, or a layer that holds several head layouts.

    Args:
        now: the pass at its end.
        model, found: what is recorded.
        sites: names of the logit sites seen so far.

    Raises:
        RecordingError: names the first module that is missing, or the layer.
    """
    # A decoder may run without its encoder, so its cross-attention may stay silent.
    attention = [name for name, _ in found.attention if not is_cross(name)]
    ran = [(name, now.fired[f"{name} (attention)"]) for name in attention]
    ran += [(name, now.fired[f"{name} (heads)"]) for name, _ in found.heads]
    ran += [(name, now.fired[name]) for name, _ in found.layers]
    left = next(iter(now.pending), None)
    if left is not None:
        raise RecordingError(f"the maps of {left} were not measured: it was never left")
    silent = [name for name, calls in ran if not calls]
    if silent:
        raise RecordingError(
            f"{len(silent)} hooks never fired in a forward pass, the first at {silent[0]}; "
            "the recording would lack these layers"
        )
    seen = [[now.fired[site_key(name, branch)] for branch in (None, 1, 2)] for name in sites]
    for name, (_, first, second) in zip(sites, seen, strict=True):
        if first != second:
            raise RecordingError(
                f"{name} made {first} attention calls for map 1 and {second} for map 2, which "
                f"its head layout {found.family(name).layout} has apart; "
                "record(model, layout='none') records it as plain heads"
            )
    if not (found.attention or found.heads) and not any(any(counts) for counts in seen):
        raise RecordingError(
            f"no attention was seen in {type(model).__name__}: it calls neither "
            "transformers' attention dispatch nor scaled_dot_product_attention nor flash-attn "
            "2; a transformers model may do so when it is loaded with attention='sdpa'"
        )
    found.layouts(name.partition(" ")[0] for name in sites)
