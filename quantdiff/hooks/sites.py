"""Sites that are recorded on request: inputs of linear modules, keys, values."""

from collections.abc import Callable, Sequence
from threading import Lock
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from quantdiff.errors import RecordingError
from quantdiff.hooks.complete import check_once
from quantdiff.hooks.entrance import in_backward
from quantdiff.hooks.found import Found
from quantdiff.hooks.layers import layer_of
from quantdiff.hooks.linears import hooked, input_rows, input_width, linear_modules
from quantdiff.hooks.passes import Pass
from quantdiff.hooks.sequences import Batch
from quantdiff.hooks.shown import show
from quantdiff.hooks.unseen import is_unseen
from quantdiff.statistics import NonFiniteError, SiteStatistics, measure_values
from quantdiff.statistics.activations import SITES, Values

__all__ = ["Sites"]


class Sites:
    """The statistics of some of the sites `linear_inputs`, `keys` and `values`.

    Args:
        found: the modules of the model.
        wanted: which of them.
        lock: held while adding to a site.
        full, rank, compiled: as in `Kept`.

    Raises:
        RecordingError: the layers hold no linear module whose inputs could be recorded.
    """

    def __init__(
        self,
        found: Found,
        wanted: Sequence[str],
        lock: Lock,
        *,
        full: bool,
        rank: int,
        compiled: bool,
    ) -> None:
        self._found, self._lock, self._compiled = found, lock, compiled
        self._full, self._rank = full, rank
        self._wanted = [site for site in SITES if site in wanted]
        self._linears: dict[str, tuple[int, nn.Module, SiteStatistics]] = {}
        # By kind, module and the number of the first head that a call shows.
        self._shown: dict[tuple[str, str, int], SiteStatistics] = {}
        if "linear_inputs" in self._wanted:
            seen = hooked(found, linear_modules(found), "recorded")
            for number, (name, module) in enumerate(seen.items()):
                site = self._site(name, 1, input_width(module))
                self._linears[name] = number, module, site
            if not self._linears:
                raise RecordingError(
                    "there is no linear module in the layers of this model; leave linear_inputs out"
                )

    @property
    def cached(self) -> bool:
        """Whether keys or values are recorded."""
        return "keys" in self._wanted or "values" in self._wanted

    def watch(self, current: Callable[[str], Pass]) -> list[RemovableHandle]:
        """Hook the linear modules, ahead of hooks that change their inputs."""
        handles = []
        for name, (_, module, _) in self._linears.items():
            hook = self._hook(name, current)
            handles.append(module.register_forward_pre_hook(hook, prepend=True, with_kwargs=True))
        return handles

    def attention(self, now: Pass, module: str, key: Tensor, value: Tensor, *, cross: bool) -> None:
        """Add what one attention call shows that no earlier call of the module has shown.

        Args:
            now: the pass.
            module: name of the attention module.
            key: (B, G, M, D); value: (B, G', M, w).
            cross: whether it is cross-attention.

        Raises:
            RecordingError: cross-attention, or NaN or infinity.
        """
        for kind, x in (("keys", key), ("values", value)):
            if kind not in self._wanted:
                continue
            if cross:
                raise RecordingError(
                    f"{module} attends to the keys of something else, whose tokens are not those "
                    f"of the pass; leave {kind} out"
                )
            shown = show(now, module, kind, x)
            if shown.fresh is not None:
                self._add_heads(kind, module, shown.first, shown.fresh, now.batch)

    def recorded(self) -> dict[str, Values]:
        """What was seen, by kind; one site per module, in the order of the layers."""
        found: dict[str, Values] = {}
        for kind in self._wanted:
            if kind == "linear_inputs":
                sites = [site for _, _, site in self._linears.values()]
            else:
                sites = self._joined(kind)
            found[kind] = SITES[kind](sites)
        return found

    def _joined(self, kind: str) -> list[SiteStatistics]:
        """The heads of each module, whichever call has shown them, as one site."""
        modules: dict[str, list[tuple[int, SiteStatistics]]] = {}
        for (of, module, first), part in sorted(self._shown.items(), key=lambda item: item[0][2]):
            if of == kind:
                modules.setdefault(module, []).append((first, part))
        sites = []
        for parts in modules.values():
            total = sum(part.groups for _, part in parts)
            whole = [part.spread(range(at, at + part.groups), total) for at, part in parts]
            for more in whole[1:]:
                whole[0].merge(more)
            sites.append(whole[0])
        return sorted(sites, key=lambda site: site.layer)

    def _site(self, name: str, groups: int, width: int) -> SiteStatistics:
        layer = layer_of(name, self._found.layers)
        assert layer is not None, name
        return SiteStatistics.empty(
            name, layer, groups, full=self._full, rank=self._rank, coordinates=5, width=width
        )

    def _hook(self, name: str, current: Callable[[str], Pass]) -> Callable[..., None]:
        number, _, site = self._linears[name]
        layer, _ = self._found.layers[site.layer]

        def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
            if in_backward() or is_unseen():
                return
            now = current(name)
            # All inputs until the layer ends are its own; later ones belong to another layer.
            check_once(name, 1 + now.fired[layer])
            given = args[0] if args else next(iter(kwargs.values()))  # input, or x
            rows = input_rows(name, given, now, self._found)
            now.counted |= not now.batch.told
            with self._lock:
                self._add("linear inputs", rows[None], now.batch, site, number)

        return hook

    def _add_heads(self, kind: str, module: str, first: int, x: Tensor, batch: Batch) -> None:
        """x: (B, g, N, D)."""
        rows = x.transpose(0, 1).flatten(1, 2)  # (g, B·N, D)
        with self._lock:
            place = kind, module, first
            site = self._shown.get(place)
            if site is None:
                site = self._shown[place] = self._site(module, len(rows), rows.shape[-1])
            if (site.groups, site.width) != (len(rows), rows.shape[-1]):
                raise RecordingError(f"{module} changes its {kind} heads between forward passes")
            self._add(kind, rows, batch, site, first)

    def _add(self, kind: str, x: Tensor, batch: Batch, site: SiteStatistics, first: int) -> None:
        """Add x (G, B·N, C), whose groups are numbered from `first`."""
        width = batch.shape[1]
        positions = batch.positions[:, batch.past :]

        def locate(place: NDArray[np.int64]) -> NDArray[np.int64]:
            b, n = place[:, 2] // width, place[:, 2] % width
            layer = np.full_like(b, site.layer)
            sequence, token = batch.first + b, positions[b, n]
            return np.stack([layer, first + place[:, 0], sequence, token, place[:, 3]], 1)

        real = batch.real.to(x.device).flatten()
        try:
            measure_values(x.detach(), real, site, locate, compiled=self._compiled)
        except NonFiniteError:
            raise RecordingError(
                f"NaN or infinity among the {kind} of layer {site.layer} ({site.name})"
            ) from None
