"""Static ranges as stored in a sidecar: a table that knows only the ranges of its schemes."""

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quantdiff.errors import UsageError
from quantdiff.quantization import Scheme
from quantdiff.quantization.table import Table

__all__ = ["AskedTable", "RangeTable", "calibration_of"]

Range = tuple[NDArray[Any], NDArray[Any]]
Sites = dict[str, tuple[int, int]]


@dataclass
class RangeTable:
    """The stored ranges of a calibration, as `FakeQuantizer` needs them.

    Attributes:
        model: name of the model that was exported, for messages.
        sites: its attention sites, name -> (layer, query heads).
        ranges: (scheme, site) -> least and most, fp32, shaped as from `Table.range`.
        calibration: where they come from, as in `quantdiff.json`; None if unknown.
    """

    model: str
    sites: Sites
    ranges: dict[tuple[Scheme, str], Range]
    calibration: dict[str, Any] | None = None

    def range(self, scheme: Scheme, name: str) -> Range:
        """The range of a scheme at a site.

        Raises:
            UsageError: it is not among those exported.
        """
        if (scheme, name) not in self.ranges:
            raise UsageError(
                f"the exported ranges of {self.model} have nothing for {name} with {scheme}"
            )
        least, most = self.ranges[scheme, name]
        return least.copy(), most.copy()

    def check_model(self, sites: Sites, modules: Collection[str] = ()) -> None:
        """Refuse a model with other attention sites.

        Raises:
            UsageError: names the first difference.
        """
        for name in [*sites, *self.sites]:
            if sites.get(name) != self.sites.get(name):
                raise UsageError(
                    f"the exported ranges are of another model ({self.model}): {name} is "
                    f"{_told(self.sites.get(name))} there, {_told(sites.get(name))} here"
                )


@dataclass
class AskedTable:
    """Passes on the ranges of another table, and keeps them.

    Attributes:
        table: the other.
        sites, ranges: what it was asked for, as in `RangeTable`.
    """

    table: Table
    sites: Sites = field(default_factory=dict)
    ranges: dict[tuple[Scheme, str], Range] = field(default_factory=dict)

    def range(self, scheme: Scheme, name: str) -> Range:
        """See `Table.range`."""
        least, most = self.table.range(scheme, name)
        found = np.asarray(least, np.float32), np.asarray(most, np.float32)
        self.ranges[scheme, name] = found
        return found[0].copy(), found[1].copy()

    def check_model(self, sites: Sites, modules: Collection[str]) -> None:
        """See `Table.check_model`."""
        self.table.check_model(sites, modules)
        self.sites = dict(sites)


def calibration_of(table: Table | None) -> dict[str, Any] | None:
    """Where the ranges of a table come from, as in `quantdiff.json`; None if not recorded."""
    if isinstance(table, RangeTable):
        found = table.calibration or {}
    else:
        entries = ("model", "data", "definition", "partial", "versions")
        found = {entry: getattr(table, entry, None) for entry in entries}
    return found if all(isinstance(found.get(part), dict) for part in ("model", "data")) else None


def _told(site: tuple[int, int] | None) -> str:
    return "absent" if site is None else f"layer {site[0]} with {site[1]} query heads"
