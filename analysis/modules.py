"""Attention modules of one layer told apart, as those of decoders with cross-attention are."""

import pandas as pd

from quantdiff.statistics.profile import Profile

__all__ = ["MARKERS", "by_module", "own_names"]

MARKERS = ("", "o", "s", "^")  # of the lines of a layer's modules, one after the other


def own_names(profile: Profile) -> dict[str, str]:
    """What each attention site is called in its layer, by its whole name."""
    layers = {site.layer: site.name for site in profile.hidden_states.sites}
    sites = [(site.name, site.layer) for site in profile.attention_logits.sites]
    sites += [(site.name, site.layer) for site in profile.maps or []]
    return {
        # A layer may attend by itself.
        name: name.removeprefix(layers.get(layer, "")).strip(" .") or "attention"
        for name, layer in sites
    }


def by_module(data: pd.DataFrame) -> list[tuple[str | None, pd.DataFrame]]:
    """The rows of each kind of attention module, where a layer of the model holds several.

    Args:
        data: of one model, with `layer`, and `module` as `own_names` gives it.

    Returns:
        Name and rows of each kind, in their order; else None and all rows.
    """
    if not data.groupby("layer")["module"].nunique().gt(1).any():
        return [(None, data)]
    return [(str(module), part) for module, part in data.groupby("module", sort=False)]
