"""Fake quantization: grids, schemes, and the sites where they apply."""

from quantdiff.quantization.clipping import Clipping
from quantdiff.quantization.grid import Grid
from quantdiff.quantization.quantizer import FakeQuantizer, fake_quantize
from quantdiff.quantization.scheme import Scheme
from quantdiff.quantization.short import name_of, schemes

__all__ = ["Clipping", "FakeQuantizer", "Grid", "Scheme", "fake_quantize", "name_of", "schemes"]
