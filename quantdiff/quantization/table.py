"""Where static ranges come from."""

from typing import Any, Protocol

from numpy.typing import NDArray

from quantdiff.quantization.scheme import Scheme

__all__ = ["Table"]


class Table(Protocol):
    """Static ranges, from a calibration; `quantdiff.CalibrationTable` is one."""

    def range(self, scheme: Scheme, name: str) -> tuple[NDArray[Any], NDArray[Any]]:
        """Least and largest value of each head of a site, (H,) fp32 each."""

    def check_model(self, sites: dict[str, tuple[int, int]]) -> None:
        """Refuse a model whose sites, by name with layer and heads, are others."""
