"""Which scheme applies where: by site, layer and head."""

from collections.abc import Collection, Iterable, Sequence

import torch
from torch import Tensor

from quantdiff.errors import QuantizationError, UsageError
from quantdiff.quantization.scheme import Scheme

__all__ = ["Schemes", "chosen_heads"]


class Schemes:
    """The schemes of one context.

    Attributes:
        all: the schemes that change anything.

    Raises:
        UsageError: two schemes for one site of a layer.
    """

    def __init__(self, schemes: Iterable[Scheme]) -> None:
        given = list(schemes)
        for number, scheme in enumerate(given):
            for other in given[:number]:
                if scheme.site == other.site and _meet(scheme.layers, other.layers):
                    raise UsageError(
                        f"two schemes for {scheme.site}: a site is quantized in one way at a time"
                    )
        self.all = tuple(scheme for scheme in given if scheme.quantizes)

    def of(self, site: str, layer: int | None = None) -> Scheme | None:
        """The scheme for a site of a layer; without a layer, the first scheme for the site."""
        for scheme in self.all:
            if scheme.site == site and (
                layer is None or scheme.layers is None or layer in scheme.layers
            ):
                return scheme
        return None

    def some(self, sites: Iterable[str]) -> "Schemes":
        """The schemes for some sites."""
        wanted = set(sites)
        return Schemes(scheme for scheme in self.all if scheme.site in wanted)

    def check_layers(self, count: int) -> None:
        """Refuse layers that a model with `count` layers lacks.

        Raises:
            UsageError: names the first.
        """
        for scheme in self.all:
            for layer in scheme.layers or ():
                if layer >= count:
                    raise UsageError(
                        f"layer {layer} of a scheme for {scheme.site}: the model has the layers 0 "
                        f"to {count - 1}"
                    )

    def check_held(self, held: Collection[int | None], model: str) -> None:
        """Refuse layers that a scheme names but that hold no attention.

        Args:
            held: numbers of the layers that hold attention.
            model: name of the model's class.

        Raises:
            QuantizationError: names the first.
        """
        for scheme in self.all:
            for layer in scheme.layers or ():
                if layer not in held:
                    raise QuantizationError(
                        f"layer {layer} of a scheme for {scheme.site} holds no attention in "
                        f"{model}: leave it out"
                    )

    def __bool__(self) -> bool:
        return bool(self.all)


def chosen_heads(
    scheme: Scheme | None, numbers: Sequence[int], total: int, name: str, device: torch.device
) -> Tensor | None:
    """Which heads of an attention call a scheme applies to.

    Args:
        scheme: a scheme, or None.
        numbers: of the call's heads, in the order of the projection.
        total: heads of the projection.
        name: of the attention module.
        device: of the result.

    Returns:
        (H,) bool; None for all.

    Raises:
        UsageError: the scheme names a head that does not exist.
    """
    if scheme is None or scheme.heads is None:
        return None
    if scheme.heads[-1] >= total:
        raise UsageError(
            f"head {scheme.heads[-1]} of a scheme for {scheme.site}: {name} has the heads 0 to "
            f"{total - 1}"
        )
    return torch.tensor([number in scheme.heads for number in numbers], device=device)


def _meet(one: tuple[int, ...] | None, other: tuple[int, ...] | None) -> bool:
    return one is None or other is None or bool(set(one) & set(other))
