"""Distinguishing the attention modules of a layer, as in decoders with cross-attention."""

import pandas as pd

from quantdiff.statistics.profile import Profile

__all__ = ["MARKERS", "by_module", "own_names"]

MARKERS = ("", "o", "s", "^")  # for the lines of a layer's modules, in order


def own_names(profile: Profile) -> dict[str, str]:
    """The name of each attention site within its layer, by its full name."""
    layers = {site.layer: site.name for site in profile.hidden_states.sites}
    sites = [(site.name, site.layer) for site in profile.attention_logits.sites]
    sites += [(site.name, site.layer) for site in profile.maps or []]
    return {
        # A layer may itself be the attention module.
        name: name.removeprefix(layers.get(layer, "")).strip(" .") or "attention"
        for name, layer in sites
    }


def by_module(data: pd.DataFrame) -> list[tuple[str | None, pd.DataFrame]]:
    """Split rows by kind of attention module, if any layer of the model holds several.

    Args:
        data: rows of one model, with `layer`, and `module` as from `own_names`.

    Returns:
        Name and rows of each kind, in order of appearance; otherwise None and all rows.
    """
    if not data.groupby("layer")["module"].nunique().gt(1).any():
        return [(None, data)]
    return [(str(module), part) for module, part in data.groupby("module", sort=False)]
