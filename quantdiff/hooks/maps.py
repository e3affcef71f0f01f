"""Attention maps and λ: measured when an attention module is done, since its λ is known then."""

import threading
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from quantdiff.attention.layouts import layout
from quantdiff.errors import RecordingError, UnknownLayoutWarning, UsageError
from quantdiff.hooks.complete import check_once
from quantdiff.hooks.entrance import in_backward
from quantdiff.hooks.found import Found
from quantdiff.hooks.layers import layer_of
from quantdiff.hooks.logits import HeadsOf, Logits, as_multiplied
from quantdiff.hooks.passes import Pass
from quantdiff.hooks.sequences import Batch
from quantdiff.models.families import lambda_projection
from quantdiff.statistics import NonFiniteError, SiteStatistics
from quantdiff.statistics.maps import MapStatistics, measure_maps
from quantdiff.statistics.site import of_groups

__all__ = ["Lambdas", "Maps", "Paired", "Span", "WhenDone"]

Span = tuple[int, int]
Paired = tuple[list[int], list[int], float | Tensor]  # heads of map 1 and of map 2, λ


class Lambdas:
    """V2's λ, one per token and pair, as the projection in an attention module computes it."""

    def __init__(self, found: Found) -> None:
        self.lock = threading.Lock()
        self._sites: dict[str, SiteStatistics] = {}
        self._found = found
        self.modules: list[tuple[str, nn.Module]] = []
        for name, module in found.modules.items():
            projection = lambda_projection(module)
            if projection is not None and layer_of(name, found.layers) is not None:
                self.modules.append((name, projection))

    def hook(self, name: str, current: Callable[[str], Pass]) -> Callable[..., None]:
        """A forward hook for the projection in the attention module `name`."""

        def hook(module: nn.Module, args: Any, output: Any) -> None:
            if in_backward() or self._found.family(name).layout != "adjacent_shared":
                return
            now = current(name)
            check_once(name, now.entered[name])
            if not isinstance(output, Tensor) or tuple(output.shape[:2]) != now.batch.shape:
                raise RecordingError(f"{name}.lambda_proj gives no (sequences, tokens, pairs) of λ")
            lam = torch.sigmoid(output.detach())  # (B, N, h), in the dtype that the model uses
            now.lambdas[name] = lam.transpose(1, 2)[..., None]  # (B, h, N, 1)
            values = lam[now.batch.real.to(lam.device)].float().T.contiguous().cpu().numpy()
            if not np.isfinite(values).all():
                raise RecordingError(f"NaN or infinity among the λ of {name}")
            layer = layer_of(name, self._found.layers)
            assert layer is not None
            with self.lock:
                fresh = of_groups(name, layer, values)
                if name in self._sites:
                    self._sites[name].merge(fresh)
                else:
                    self._sites[name] = fresh

        return hook

    def sites(self) -> list[SiteStatistics]:
        """What was seen, in the order of the layers."""
        return sorted(self._sites.values(), key=lambda site: site.layer)


class WhenDone(ABC):
    """Measures the attention calls of a module when it is done, since its λ is known then.

    Args:
        found: the modules of the model.
    """

    def __init__(self, found: Found) -> None:
        self.lock = threading.Lock()
        self._found = found

    @abstractmethod
    def measure(self, name: str, layer: int, call: Logits, pairs: Paired | None, now: Pass) -> None:
        """Measure one attention over all heads of a module.

        Args:
            name: of the site.
            layer: of the site.
            call: its logits, heads in the order of the projection.
            pairs: heads of map 1 and of map 2, and λ; None for standard heads.
            now: the pass.
        """

    def finish(self, module: str, now: Pass) -> None:
        """Measure the calls that an attention module made, now that it is done.

        Raises:
            RecordingError: NaN or infinity among the logits or λ.
        """
        calls = now.pending.pop(module, [])
        parts = [(part, call) for _, part, call in calls if part is not None]
        for name, part, call in calls:
            if part is None:
                self._add(name, module, call, now)
        if len(parts) == 2:  # a single one is refused when the pass ends
            name = next(name for name, part, _ in calls if part is not None)
            self._add(name, module, _joined(parts), now)

    def _add(self, name: str, module: str, call: Logits, now: Pass) -> None:
        layer = layer_of(module, self._found.layers)
        assert layer is not None, name
        pairs = self._pairs(module, call.query.shape[1], now)
        with self.lock:
            self.measure(name, layer, call, pairs, now)

    def _pairs(self, module: str, heads: int, now: Pass) -> Paired | None:
        """Heads of map 1 and map 2 and λ; None for standard heads, or where λ is not known."""
        kind = layout(str(self._found.family(module).layout))
        if not kind.differential:
            return None
        lam = self._found.lam(module) if kind.own_keys else now.lambdas.get(module)
        if lam is None:
            warnings.warn(
                f"the λ of {module} is not known: its maps are measured head by head, their "
                "difference is not",
                UnknownLayoutWarning,
                stacklevel=2,
            )
            return None
        return *kind.pairs(heads), lam


class Maps(WhenDone):
    """Measures of the attention maps of all sites.

    Args:
        found: the modules of the model.
        spans: for each sequence, by its number, the answer's (first token, last token + 1) among
            its real tokens; None if it has no answer.
    """

    def __init__(self, found: Found, spans: Sequence[Span | None]) -> None:
        super().__init__(found)
        for span in spans:
            if span is not None and not 0 <= span[0] < span[1]:
                raise UsageError(f"a span is (first token, last token + 1), not {span}")
        self._spans = list(spans)
        self._sites: dict[str, dict[str, MapStatistics]] = {}

    def sites(self) -> list[MapStatistics]:
        """What was seen, in the order of the layers."""
        order = sorted(self._sites.values(), key=lambda kinds: next(iter(kinds.values())).layer)
        return [site for kinds in order for site in kinds.values()]

    def measure(self, name: str, layer: int, call: Logits, pairs: Paired | None, now: Pass) -> None:
        """See `WhenDone.measure`."""
        kinds = {"softmax": list(range(call.query.shape[1]))}
        options: dict[str, Any] = {}
        if pairs is not None:
            first, second, lam = pairs
            options = {"lam": lam, "first": first, "second": second}
            kinds = {
                "branch 1": sorted(set(first)),
                "branch 2": sorted(set(second)),
                "difference": first,
            }
        batch, keys = now.batch, call.key.shape[2]
        if not call.cross:
            options |= self._places(batch, keys)
        else:
            options["key_zero"] = torch.full((batch.shape[0],), -1)
        sites = self._sites.setdefault(
            name,
            {kind: MapStatistics.empty(name, layer, kind, own) for kind, own in kinds.items()},
        )
        try:
            measure_maps(
                *as_multiplied(call.query, call.key), call.scale, call.visible, sites,
                softcap=call.softcap, bias=call.bias, sink=call.sinks, **options,
            )  # fmt: skip
        except NonFiniteError as error:
            raise RecordingError(
                f"NaN or infinity among the attention logits or λ of layer {layer}, "
                f"head {error.group} ({name})"
            ) from None
        if call.cross:  # the keys do not contain the sequence's first token
            for site in sites.values():
                site.counts["sink_rows"][:] = 0
                site.sums["sink"][:] = site.sums["sink_share"][:] = 0

    def _places(self, batch: Batch, keys: int) -> dict[str, Any]:
        """Where sequences begin among the keys, and their spans."""
        offset = batch.key_offset(keys)
        zeros = batch.kept.int().argmax(1).cpu() - offset  # (B,); below 0 once a window drops it
        places: dict[str, Any] = {"key_zero": zeros}
        spans: list[Span | None] = []
        for b, zero in enumerate(zeros.tolist()):
            number = batch.first + b
            span = self._spans[number] if number < len(self._spans) else None
            known = int(batch.kept[b].sum())
            inside = span is not None and span[1] <= known and zero + span[0] >= 0
            spans.append((zero + span[0], zero + span[1]) if span and inside else None)
        if any(span is not None for span in spans):
            rows = batch.shape[1]
            last = rows - 1 - batch.real.int().flip(1).argmax(1).cpu()
            places |= {"spans": spans, "span_rows": last}
        return places


def _joined(parts: list[tuple[HeadsOf, Logits]]) -> Logits:
    """The calls of map 1 and map 2 as one over all heads, in the order of the projection.

    Raises:
        RecordingError: their scale, cap, mask or bias differs, a mask or bias is per head, or they
            have sinks.
    """
    (_, one), (_, two) = parts
    rows = one.visible.mask_rows(0, 1), None if one.bias is None else one.bias(0, 1)
    alike = (
        (one.scale, one.softcap) == (two.scale, two.softcap)
        and one.visible is two.visible
        and one.bias is two.bias
        and one.sinks is two.sinks is None
    )
    if not alike or any(row is not None and row.shape[1] > 1 for row in rows):
        raise RecordingError(
            "the maps of a differential pair are measured where both have the same scale and mask "
            "for all heads; record without maps"
        )
    total = parts[0][0].total
    queries: list[Tensor] = [torch.empty(0)] * total
    keys: list[Tensor] = [torch.empty(0)] * total
    for part, call in parts:
        query, key = call.distinct(part.step)
        for i, head in enumerate(part.heads):
            queries[head] = query[:, i]
            keys[head] = key[:, i * key.shape[1] // query.shape[1]]
    first = parts[0][1]
    return Logits(
        torch.stack(queries, 1), torch.stack(keys, 1), first.scale, first.visible, first.softcap,
        first.bias, first.cross, first.sinks,
    )  # fmt: skip
