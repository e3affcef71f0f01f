"""Rounding of tensors to grids over some of their dimensions, with straight-through gradients."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from quantdiff.errors import QuantizationError
from quantdiff.hooks.passes import Pass
from quantdiff.quantization.grid import Grid, NoGridError
from quantdiff.quantization.scheme import Scheme

__all__ = ["in_groups", "never_seen", "real_tokens", "rounded"]


class _StraightThrough(torch.autograd.Function):
    """The rounded values, with the gradient of the plain ones.

    x + (rounded − x) would not be the rounded value where x is much larger, as when it is clipped.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, found: Tensor) -> Tensor:
        return found.clone()  # a returned input could not be changed in place

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0], None


def rounded(
    x: Tensor,
    over: Sequence[int],
    scheme: Scheme,
    name: str,
    kept: Tensor | None = None,
    ends: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """Round the values of a tensor to their grids.

    Args:
        x: any shape, floating.
        over: the dimensions that a dynamic range spans; any for static ranges.
        scheme: its bits and symmetry are used.
        name: of the site, for messages.
        kept: bool, broadcastable to x: what may set a dynamic range; the rest is rounded and
            clipped too.
        ends: least and largest value of static ranges, broadcastable to x; None for dynamic ones.

    Returns:
        As x, in its dtype. Its gradient goes to x unchanged.

    Raises:
        QuantizationError: NaN or infinity among the values that are kept, or nonzero ones where a
            static range contains only zero.
    """
    values = x.detach()
    if values.dtype not in (torch.float32, torch.float64):
        values = values.float()
    # A range includes zero, so what does not count may be set to it.
    inside = values if kept is None else torch.where(kept, values, 0.0)
    least, most = inside.amin(tuple(over), keepdim=True), inside.amax(tuple(over), keepdim=True)
    try:
        grid = Grid.of(least, most, scheme.bits, scheme.symmetric)
    except NoGridError:
        raise QuantizationError(f"NaN or infinity among the {scheme.site} of {name}") from None
    if ends is not None:
        least, most = (end.to(x.device) for end in ends)
        _check_seen(inside, least, most, scheme, name)
        grid = Grid.of(least, most, scheme.bits, scheme.symmetric)
    found = grid.quantize(values).to(x.dtype)
    if not x.requires_grad:
        return found
    passed: Tensor = _StraightThrough.apply(x, found)  # type: ignore[no-untyped-call]
    return passed


def _check_seen(x: Tensor, least: Tensor, most: Tensor, scheme: Scheme, name: str) -> None:
    """Refuse nonzero values where the calibration saw none or only zeros.

    Raises:
        QuantizationError: names the module.
    """
    empty = (least == 0) & (most == 0)
    if bool(empty.any()) and bool((empty & (x != 0)).any()):
        raise never_seen(scheme, name if empty.numel() == 1 else f"a head or a channel of {name}")


def never_seen(scheme: Scheme, where: str) -> QuantizationError:
    """The error for nonzero values where a static range contains only zero."""
    if scheme.percentile is not None and scheme.percentile < 100:
        return QuantizationError(
            f"more than {scheme.percentile:g} % of the {scheme.site} of {where} were zeros in the "
            "calibration, or it saw none, so that this percentile leaves no range: use a higher "
            "percentile, or more text where the range absmax has none either"
        )
    return QuantizationError(
        f"the calibration saw no {scheme.site} of {where} but zeros, so that there is no range for "
        "them: calibrate on more text"
    )


def real_tokens(now: Pass, site: str) -> Tensor:
    """Which tokens of a pass are not padding, (B, N) bool.

    Raises:
        QuantizationError: only a ready mask was given, which does not reveal padding yet.
    """
    if now.ready_mask and not now.batch.told:
        raise QuantizationError(
            f"a range of each sequence over its {site} needs the 2-D mask of the padding, and only "
            "a ready attention mask was given; give that, or use the granularity token"
        )
    return now.batch.real


def in_groups(x: Tensor, size: int, name: str, site: str) -> Tensor:
    """Split the last dimension into groups, (…, groups, size).

    Raises:
        QuantizationError: the size does not divide it.
    """
    if x.shape[-1] % size:
        raise QuantizationError(
            f"groups of {size} do not divide the {x.shape[-1]} channels of the {site} of {name}; "
            "choose a size that does"
        )
    return x.unflatten(-1, (-1, size))
