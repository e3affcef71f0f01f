"""The site `weights`: those of linear modules in the decoder's layers, rounded to nearest."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from quantdiff.errors import QuantizationError
from quantdiff.hooks.found import Found
from quantdiff.hooks.passes import Pass
from quantdiff.hooks.runs import Runs
from quantdiff.quantization.chosen import Schemes
from quantdiff.quantization.linear_inputs import chosen_linears
from quantdiff.quantization.rounding import in_groups, rounded
from quantdiff.quantization.scheme import Scheme
from quantdiff.quantization.table import Table

__all__ = ["Weights", "by_output", "weight_modules"]


class Weights:
    """Rounds the weights once, when it begins, and restores the originals at the end.

    A range spans a matrix (`tensor`), an output channel (`channel`) or some neighbouring inputs of
    an output channel (`group:128`). Gradients of parameters within are straight-through, but an
    optimizer's step there is lost. Weights need no `table`.
    """

    def __init__(self, found: Found, runs: Runs, schemes: Schemes, table: Table | None) -> None:
        self._modules = weight_modules(found, schemes)
        self._kept: dict[nn.Parameter, Tensor] = {}

    @torch.no_grad()
    def begin(self) -> None:
        """Quantize from now on, until `end`."""
        try:
            for name, (module, scheme) in self._modules.items():
                weight: Any = module.weight
                if weight not in self._kept:  # modules may share one
                    found = _rounded(name, by_output(module, weight.data), scheme)
                    self._kept[weight] = weight.data
                    weight.data = by_output(module, found).contiguous()
        except BaseException:
            self.end()
            raise

    def end(self) -> None:
        """Restore the modules."""
        for weight, data in self._kept.items():
            weight.data = data
        self._kept.clear()

    def check(self, now: Pass) -> None:
        """Accept every pass: weights are rounded whatever runs."""


def weight_modules(found: Found, schemes: Schemes) -> dict[str, tuple[nn.Module, Scheme]]:
    """The linear modules whose weights are rounded, by name, with their scheme.

    Raises:
        QuantizationError: weights that are quantized already, a group that does not divide them, or
            layers that share weights but differ in their schemes.
    """
    modules = chosen_linears(found, schemes, "weights")
    for name, (module, scheme) in modules.items():
        weight: Any = module.weight
        if not weight.is_floating_point() or weight.dim() != 2:
            raise QuantizationError(f"the weights of {name} are quantized already")
        if scheme.group is not None:
            in_groups(by_output(module, weight), scheme.group, name, scheme.site)
    _check_shared(found, schemes, modules)
    return modules


def _check_shared(
    found: Found, schemes: Schemes, modules: dict[str, tuple[nn.Module, Scheme]]
) -> None:
    """Refuse weights shared by several layers of which only some have the same scheme."""
    sharers: dict[nn.Parameter, list[int]] = {}
    for number, (_, layer) in enumerate(found.layers):
        for parameter in layer.parameters():
            sharers.setdefault(parameter, []).append(number)
    for name, (module, scheme) in modules.items():
        weight: Any = module.weight
        for number in sharers.get(weight, ()):
            other = schemes.of("weights", number)
            if other is None or replace(other, layers=scheme.layers) != scheme:
                raise QuantizationError(
                    f"{name} shares its weights with layer {number}, for which there is another "
                    "scheme for weights or none; give these layers the same"
                )


def _rounded(name: str, weight: Tensor, scheme: Scheme) -> Tensor:
    """weight: (out, in)."""
    if scheme.group is not None:
        parts = in_groups(weight, scheme.group, name, scheme.site)
        return rounded(parts, (2,), scheme, name).flatten(1)
    over = (0, 1) if scheme.granularity == "tensor" else (1,)
    return rounded(weight, over, scheme, name)


def by_output(module: nn.Module, weight: Tensor) -> Tensor:
    """A weight as (out, in), or back: transformers' Conv1D holds (in, out)."""
    return weight if isinstance(module, nn.Linear) else weight.T
