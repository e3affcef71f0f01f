"""Differential attention: head layouts, reference mathematics, modules, backends.

The names are imported on first use, so that importing this package does not import torch.
"""

from typing import TYPE_CHECKING

from quantdiff.lazy import lazy_names

if TYPE_CHECKING:
    from quantdiff.attention.heads import Heads
    from quantdiff.attention.layouts import LAYOUTS, Layout, layout
    from quantdiff.attention.modules import (
        DifferentialAttentionV1,
        DifferentialAttentionV2,
        GroupedDifferentialAttention,
        MultiheadAttention,
    )
    from quantdiff.attention.rotary import rotary_table

__all__ = [
    "LAYOUTS",
    "DifferentialAttentionV1",
    "DifferentialAttentionV2",
    "GroupedDifferentialAttention",
    "Heads",
    "Layout",
    "MultiheadAttention",
    "layout",
    "rotary_table",
]

# Public name -> module of this package that defines it.
_HOMES = {
    "LAYOUTS": "layouts",
    "DifferentialAttentionV1": "modules",
    "DifferentialAttentionV2": "modules",
    "GroupedDifferentialAttention": "modules",
    "Heads": "heads",
    "Layout": "layouts",
    "MultiheadAttention": "modules",
    "layout": "layouts",
    "rotary_table": "rotary",
}

__getattr__, __dir__ = lazy_names("quantdiff.attention", _HOMES)
