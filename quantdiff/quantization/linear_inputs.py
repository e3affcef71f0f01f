"""The site `linear_inputs`: inputs of the linear modules in the decoder's layers."""

import threading
import warnings
from typing import Any

from torch import Tensor, nn

from quantdiff.errors import LeftAloneWarning, QuantizationError
from quantdiff.hooks.found import Found
from quantdiff.hooks.layers import is_cross, layer_of
from quantdiff.hooks.linears import hooked, in_order, linear_modules
from quantdiff.hooks.passes import Pass
from quantdiff.hooks.runs import Runs
from quantdiff.quantization.chosen import Schemes
from quantdiff.quantization.rounding import real_tokens, rounded
from quantdiff.quantization.scheme import Scheme
from quantdiff.quantization.static import ends_of
from quantdiff.quantization.table import Table

__all__ = ["LinearInputs", "chosen_linears", "linears"]


def linears(found: Found) -> dict[str, nn.Module]:
    """The linear modules in the layers, by name; neither embeddings nor the output head.

    Raises:
        QuantizationError: there are none.
    """
    modules = linear_modules(found)
    if not modules:
        raise QuantizationError(
            "there is no linear module in the layers of this model; it has no such site"
        )
    return modules


def chosen_linears(
    found: Found, schemes: Schemes, site: str
) -> dict[str, tuple[nn.Module, Scheme]]:
    """The linear modules whose layer has a scheme for a site, by name, with that scheme.

    Warns of weights in these layers that belong to no linear module, such as packed experts.
    """
    modules = {}
    every = linears(found)
    _warn_of_others(found, schemes, site, set(every))
    for name, module in every.items():
        scheme = schemes.of(site, layer_of(name, found.layers))
        if scheme is not None:
            modules[name] = module, scheme
    return modules


def _warn_of_others(found: Found, schemes: Schemes, site: str, taken: set[str]) -> None:
    """Warn of weights in layers with a scheme that no taken module has, naming the largest."""
    others: dict[str, nn.Parameter] = {}
    for name, module in found.modules.items():
        layer = layer_of(name, found.layers)
        if layer is None or schemes.of(site, layer) is None or name in taken:
            continue
        if isinstance(module, nn.Embedding) or "norm" in type(module).__name__.lower():
            continue
        for own, weight in module.named_parameters(recurse=False):
            if weight.is_floating_point() and weight.dim() > 1:
                others[f"{name}.{own}"] = weight
    if others:
        name = max(others, key=lambda name: others[name].numel())  # the first if several are equal
        warnings.warn(
            f"{name}, {tuple(others[name].shape)}, belongs to no linear module: {site} of it, and "
            "of others like it, are not quantized",
            LeftAloneWarning,
            stacklevel=2,
        )


class LinearInputs:
    """Rounds the inputs of linear modules in hooks.

    A range spans one token (`token`) or all real tokens of a sequence (`tensor`), or comes from a
    calibration.
    """

    def __init__(self, found: Found, runs: Runs, schemes: Schemes, table: Table | None) -> None:
        modules = chosen_linears(found, schemes, "linear_inputs")
        self._modules = hooked(found, modules, "quantized")
        self._found, self._runs = found, runs
        self._local = threading.local()  # fired: whether a module was seen in this thread's pass
        self._ends = {
            name: ends_of(table, scheme, name)
            for name, (_, scheme) in self._modules.items()
            if scheme.static
        }
        self._handles: list[Any] = []

    def begin(self) -> None:
        """Quantize from now on, until `end`."""
        for name, (module, scheme) in self._modules.items():
            hook = self._hook(name, scheme)
            self._handles.append(module.register_forward_pre_hook(hook, with_kwargs=True))

    def end(self) -> None:
        """Restore the modules."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def check(self, now: Pass) -> None:
        """Refuse a pass in which none ran; single ones need not, such as an expert without tokens.

        Raises:
            QuantizationError: states how many there are.
        """
        fired, self._local.fired = getattr(self._local, "fired", False), False
        if not fired:
            raise QuantizationError(
                f"none of the {len(self._modules)} linear modules whose inputs are to be quantized "
                "ran in a forward pass; leave linear_inputs out"
            )

    def _hook(self, name: str, scheme: Scheme) -> Any:
        def hook(module: nn.Module, args: Any, kwargs: Any) -> Any:
            self._local.fired = True
            if args:
                return (self._rounded(name, args[0], scheme), *args[1:]), kwargs
            (given,) = kwargs  # torch calls it input, others x
            return args, {given: self._rounded(name, kwargs[given], scheme)}

        return hook

    def _rounded(self, name: str, x: Tensor, scheme: Scheme) -> Tensor:
        if scheme.granularity == "token":
            return rounded(x, (-1,), scheme, name)
        if scheme.static:
            return rounded(x, (-1,), scheme, name, self._kept(x, name), self._ends[name])
        if is_cross(name):  # an encoder may have just as many tokens
            raise QuantizationError(
                f"the inputs of {name} may be those of another sequence, whose padding is not "
                "known, so that a range of each sequence cannot be told; use the granularity token"
            )
        real = real_tokens(self._runs.current(name), "linear_inputs").to(x.device)  # (B, N)
        if x.shape[:-1] == real.shape:
            return rounded(x, (1, 2), scheme, name, real[..., None])
        if x.shape[:-1] == (real.numel(),) and in_order(self._found, name):
            whole = x.view(*real.shape, -1)
            return rounded(whole, (1, 2), scheme, name, real[..., None]).view_as(x)
        raise QuantizationError(
            f"the inputs of {name}, {tuple(x.shape)}, are not known to be the tokens of the pass "
            "in their order, so that a range of each sequence cannot be told; use the granularity "
            "token"
        )

    def _kept(self, x: Tensor, name: str) -> Tensor | None:
        """Which tokens of x are real, if they are those of the pass; else None, for all."""
        real = self._runs.current(name).batch.real.to(x.device)
        return real[..., None] if x.shape[:-1] == real.shape else None
