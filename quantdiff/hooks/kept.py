"""What a recording keeps: every site's statistics, with places given by sequence and token."""

import threading
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn

from quantdiff.attention.layouts import branches
from quantdiff.errors import RecordingError
from quantdiff.hooks.layers import layer_of
from quantdiff.hooks.logits import HeadsOf, Logits, as_multiplied
from quantdiff.hooks.sequences import Batch
from quantdiff.statistics import (
    NonFiniteError,
    SiteStatistics,
    measure_logits,
    measure_values,
)
from quantdiff.statistics.activations import AttentionLogits
from quantdiff.statistics.channels import Channels

__all__ = ["Detail", "Kept"]

Detail = Literal["extremes", "full"]


class Kept:
    """The sites of a recording.

    Attributes:
        lock: held while adding to a site.
        hidden_sites: by module path.
    """

    def __init__(
        self,
        layers: Sequence[tuple[str, nn.Module]],
        *,
        top_k: int,
        detail: Detail,
        compiled: bool,
        channels: bool,
    ) -> None:
        self.lock = threading.Lock()
        self._layers = list(layers)
        self._full = detail == "full"
        self._rank = top_k
        self._compiled = compiled
        self._channels = channels
        self._calls: dict[tuple[str, int], SiteStatistics] = {}  # by site and branch
        self._parts: dict[tuple[str, int], HeadsOf] = {}
        self.hidden_sites = {
            name: self._site(name, i, groups=1, coordinates=4)
            for i, (name, _) in enumerate(self._layers)
        }

    def _site(self, name: str, layer: int, *, groups: int, coordinates: int) -> SiteStatistics:
        return SiteStatistics.empty(
            name, layer, groups, full=self._full, rank=self._rank, coordinates=coordinates
        )

    def attention_logits(self, layouts: Sequence[str]) -> AttentionLogits:
        """The logit sites in the order of the layers; `layouts` are the layers' head layouts."""
        sites: dict[str, SiteStatistics] = {}
        for (name, branch), site in sorted(self._calls.items(), key=lambda item: item[1].layer):
            part = self._parts.get((name, branch))
            whole = site if part is None else site.spread(part.heads, part.total)
            if name in sites:
                sites[name].merge(whole)
            else:
                sites[name] = whole
        # All attentions of a layer have its layout, but their numbers of heads may differ.
        return AttentionLogits(
            list(sites.values()),
            {name: branches(layouts[site.layer], site.groups) for name, site in sites.items()},
        )

    @property
    def logit_sites(self) -> list[str]:
        """Names of the sites where attention was seen."""
        return list(dict.fromkeys(name for name, _ in self._calls))

    def logits(self, name: str, part: HeadsOf | None, call: Logits, batch: Batch) -> None:
        """Add one attention call of the site `name`, a module path that a remark may follow.

        Args:
            name: of the site.
            part: which heads of the site the call computes, or None for all.
            call: its logits.
            batch: the sequences.

        Raises:
            RecordingError: NaN or infinity among the logits.
        """
        layer = layer_of(name.partition(" ")[0], self._layers)
        assert layer is not None, name
        query, key = as_multiplied(*call.distinct(1 if part is None else part.step))
        heads = np.arange(query.shape[1]) if part is None else np.array(part.heads)
        offset = None if call.cross else batch.key_offset(key.shape[2])
        place = name, 0 if part is None else part.branch
        with self.lock:
            site = self._calls.get(place)
            if site is None:
                site = self._site(name, layer, groups=len(heads), coordinates=5)
                self._calls[place] = site
            if part is not None and self._parts.setdefault(place, part) != part:
                raise RecordingError(f"{name} changes its number of heads between forward passes")
            try:
                measure_logits(
                    query, key, call.scale, call.visible, site,
                    lambda place: _locate_logits(place, heads, layer, batch, offset),
                    softcap=call.softcap, bias=call.bias, compiled=self._compiled,
                )  # fmt: skip
            except NonFiniteError as error:
                raise RecordingError(
                    f"NaN or infinity among the attention logits of layer {layer}, "
                    f"head {heads[error.group]} ({name})"
                ) from None

    def hidden(self, name: str, output: Any, batch: Batch) -> None:
        """Add the output of the layer `name`.

        Raises:
            RecordingError: the output is not (sequences, tokens, channels), or holds NaN or
                infinity.
        """
        site = self.hidden_sites[name]
        hidden = _first(output)
        fits = isinstance(hidden, Tensor) and hidden.dim() == 3
        if not fits or tuple(hidden.shape[:2]) != batch.shape:
            shape = tuple(hidden.shape) if isinstance(hidden, Tensor) else type(hidden).__name__
            raise RecordingError(
                f"{name} gives {shape}, not a tensor of (sequences, tokens, channels); name the "
                "layers whose outputs are the hidden states: record(model, layers=['…', …])"
            )
        positions = batch.positions[:, batch.past :]
        width = hidden.shape[1]

        def locate(place: NDArray[np.int64]) -> NDArray[np.int64]:
            b, n = place[:, 2] // width, place[:, 2] % width
            return np.stack(
                [np.full_like(b, site.layer), batch.first + b, positions[b, n], place[:, 3]], 1
            )

        real = batch.real.to(hidden.device).flatten()
        with self.lock:
            if self._channels and site.channels is None:
                site.channels = Channels.empty(1, hidden.shape[2], full=self._full)
            try:
                measure_values(hidden.flatten(0, 1), real, site, locate, compiled=self._compiled)
            except NonFiniteError:
                raise RecordingError(
                    f"NaN or infinity among the hidden states of layer {site.layer} ({name})"
                ) from None


def _first(output: Any) -> Any:
    """The hidden states in a layer's output: a tensor, a tuple that begins with it, a dataclass."""
    if isinstance(output, Tensor):
        return output
    for name in ("hidden_states", "last_hidden_state"):
        if hasattr(output, name):
            return getattr(output, name)
    return output[0] if isinstance(output, tuple | list) and output else output


def _locate_logits(
    place: NDArray[np.int64],
    heads: NDArray[np.int64],
    layer: int,
    batch: Batch,
    offset: int | None,
) -> NDArray[np.int64]:
    """From (head, batch row, query row, key) to (layer, head, sequence, query, key)."""
    head, b, n, m = place.T
    keys = m if offset is None else batch.positions[b, offset + m]
    return np.stack(
        [
            np.full_like(head, layer),
            heads[head],
            batch.first + b,
            batch.positions[b, batch.past + n],
            keys,
        ],
        1,
    )
