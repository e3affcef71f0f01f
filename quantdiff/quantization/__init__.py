"""Fake quantization: grids, schemes, and the sites where they apply."""

from quantdiff.quantization.grid import Grid
from quantdiff.quantization.scheme import Scheme

__all__ = ["Grid", "Scheme"]
