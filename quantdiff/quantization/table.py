"""Where static ranges come from."""

from collections.abc import Collection
from typing import Any, Protocol

from numpy.typing import NDArray

from quantdiff.quantization.scheme import Scheme

__all__ = ["Table"]


class Table(Protocol):
    """Static ranges, from a calibration; `quantdiff.CalibrationTable` is one."""

    def range(self, scheme: Scheme, name: str) -> tuple[NDArray[Any], NDArray[Any]]:
        """Least and largest value of a site, fp32.

        For attention logits, keys and values (H,) each, one per head, or (H, C) for the granularity
        `channel`; for linear inputs and hidden states (1,) each.
        """

    def check_model(self, sites: dict[str, tuple[int, int]], modules: Collection[str]) -> None:
        """Refuse a model whose sites, by name with layer and heads, differ.

        `modules`: paths of all its modules; some that are not among its sites may attend.
        """
