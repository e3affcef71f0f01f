"""The site `attention_logits`: from a scheme to the grids of one attention call."""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quantdiff.errors import QuantizationError
from quantdiff.hooks.logits import Logits, as_multiplied
from quantdiff.quantization.grid import Grid, NoGridError, RowGrids
from quantdiff.quantization.newest import Newest
from quantdiff.quantization.rounding import never_seen
from quantdiff.quantization.scheme import Scheme
from quantdiff.quantization.softmax import Softmax
from quantdiff.quantization.table import Table
from quantdiff.statistics import NonFiniteError, Visible
from quantdiff.statistics.streaming import logit_extremes

__all__ = ["extremes", "softmax_of"]


def softmax_of(
    logits: Logits,
    scheme: Scheme | None,
    table: Table | None,
    name: str,
    heads: NDArray[Any] | None = None,
    clipped: NDArray[np.int64] | None = None,
    ends: tuple[Tensor, Tensor] | None = None,
    maps: Scheme | None = None,
    newest: Newest | None = None,
) -> Softmax:
    """What happens between the queries and the values of one call.

    Args:
        logits: of the call.
        scheme: for the site `attention_logits`, or None.
        table: for static ranges.
        name: of the site.
        heads: which of the site's heads the call has, or None for all.
        ends: least and largest logits, (B, any number) each, where a dynamic range spans more than
            this call; None for those of this call.
        clipped: (H of the call,), to which the number of clipped logits of each head is added.
        maps: for the site `attention_maps`, or None.
        newest: keys that queries meet in place of those of `logits`, or None.

    Raises:
        QuantizationError: NaN or infinity among the logits that count, or nonzero logits where a
            static range is zero.
    """
    given = (logits.scale, logits.visible, logits.softcap, logits.bias)
    if scheme is None:
        return Softmax(*given, maps=maps)
    if scheme.granularity == "row":
        grids = RowGrids(scheme.bits, scheme.symmetric)
        return Softmax(*given, grids, False, maps, clipped)
    if scheme.static:
        assert table is not None
        stored = table.range(scheme, name)
        if heads is not None and int(heads.max()) < len(stored[0]):
            stored = tuple(end[heads] for end in stored)
        least, most = (torch.from_numpy(end).to(logits.query.device)[None] for end in stored)
        if least.shape[1] != logits.query.shape[1]:
            raise QuantizationError(
                f"the table holds ranges of {least.shape[1]} heads for {name}, which has "
                f"{logits.query.shape[1]}"
            )
        _check_seen(logits, least, most, scheme, name, heads, newest)
    else:
        least, most = extremes(logits, name, newest) if ends is None else ends  # (B, H)
        if scheme.granularity == "tensor":
            count = logits.query.shape[1]
            least = least.amin(1, keepdim=True).expand(-1, count)
            most = most.amax(1, keepdim=True).expand(-1, count)
    try:
        grid = Grid.of(least[..., None, None], most[..., None, None], scheme.bits, scheme.symmetric)
    except NoGridError:
        raise QuantizationError(f"NaN or infinity among the attention logits of {name}") from None
    return Softmax(*given, grid, scheme.static, maps, clipped)


def _check_seen(
    logits: Logits,
    least: Tensor,
    most: Tensor,
    scheme: Scheme,
    name: str,
    heads: NDArray[Any] | None,
    newest: Newest | None,
) -> None:
    """Refuse nonzero logits where the calibration saw none or only zeros; least, most: (1, H)."""
    empty = (least == 0) & (most == 0)
    if scheme.heads is not None:
        numbers = range(empty.shape[1]) if heads is None else heads.tolist()
        empty &= torch.tensor([n in scheme.heads for n in numbers], device=empty.device)
    if not bool(empty.any()):
        return
    low, high = extremes(logits, name, newest)  # (B, H)
    if bool((empty & ((low < 0) | (high > 0))).any()):
        raise never_seen(scheme, f"a head of {name}")


def extremes(logits: Logits, name: str, newest: Newest | None = None) -> tuple[Tensor, Tensor]:
    """Least and largest logit that counts, of each sequence and head, (B, H) fp32 each.

    +inf and −inf where nothing counts. `newest`: as in `softmax_of`.

    Raises:
        QuantizationError: NaN or infinity among them.
    """
    if newest is None:
        return _extremes(logits, logits.key, logits.visible, name)
    older, new = newest.apart(logits.visible)
    least, most = _extremes(logits, logits.key, older, name)
    other_least, other_most = _extremes(logits, newest.exact, new, name)
    return torch.minimum(least, other_least), torch.maximum(most, other_most)


def _extremes(logits: Logits, key: Tensor, visible: Visible, name: str) -> tuple[Tensor, Tensor]:
    try:
        return logit_extremes(
            *as_multiplied(logits.query.detach(), key.detach()),
            logits.scale,
            visible,
            softcap=logits.softcap,
            bias=logits.bias,
        )
    except NonFiniteError as error:
        raise QuantizationError(
            f"NaN or infinity among the attention logits of {name}, head {error.group}"
        ) from None
