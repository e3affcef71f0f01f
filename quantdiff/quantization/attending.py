"""The attention calls of a model, computed with quantized keys, logits, maps and values.

This covers every family and backend that can be recorded: modules of transformers' dispatch,
quantdiff's own `Heads`, and a model's own calls of scaled_dot_product_attention or flash-attn.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Collection, Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from quantdiff.attention.heads import Heads
from quantdiff.errors import QuantizationError
from quantdiff.hooks import dispatch
from quantdiff.hooks.bare import BareCalls
from quantdiff.hooks.dispatch import attends_itself
from quantdiff.hooks.entrance import in_backward
from quantdiff.hooks.flash import FlashCall
from quantdiff.hooks.found import Found
from quantdiff.hooks.layers import is_cross, layer_of
from quantdiff.hooks.logits import HeadsOf, Logits, as_multiplied
from quantdiff.hooks.masks import read_heads
from quantdiff.hooks.own import HeadsCall
from quantdiff.hooks.passes import Pass
from quantdiff.hooks.reading import read_call
from quantdiff.hooks.runs import Runs
from quantdiff.hooks.sdpa import SdpaCall
from quantdiff.quantization import flex
from quantdiff.quantization.apart import MeasuredFirst, add_ends
from quantdiff.quantization.attention import attend
from quantdiff.quantization.chosen import Schemes, chosen_heads
from quantdiff.quantization.clipping import Clipping
from quantdiff.quantization.familiar import check_familiar
from quantdiff.quantization.grid import NoGridError
from quantdiff.quantization.keys_values import (
    Cached,
    kept_keys,
    newest_of,
    rounded_heads,
    unknown_cache,
)
from quantdiff.quantization.logits import extremes, softmax_of
from quantdiff.quantization.scheme import Scheme
from quantdiff.quantization.static import ends_of_heads
from quantdiff.quantization.table import Table

__all__ = ["AttentionSites"]

_ATTENDED = " (attention)"  # suffix in the counts of a pass: a layer may have the same name


class AttentionSites:
    """Quantizes what a model's attention calls compute with.

    Args:
        found, runs: the modules of the model, and the tracker of its passes.
        model: the model.
        schemes: for the sites `keys`, `attention_logits`, `attention_maps`, `values`.
        table: static ranges, or None.
        clipping: where clipped logits are counted, by site, or None.
        beside: layers that schemes for other sites name; these need not hold attention, as the
            schemes together apply to whatever such a layer has.

    Raises:
        QuantizationError: a scheme names another layer without attention.
    """

    def __init__(
        self,
        model: nn.Module,
        found: Found,
        runs: Runs,
        schemes: Schemes,
        table: Table | None,
        clipping: dict[str, Clipping] | None,
        beside: Collection[int] = (),
    ) -> None:
        self._model, self._found, self._runs, self._table = model, found, runs, table
        self._schemes = schemes
        self._clipping, self._beside = clipping, beside
        self._handles: list[Any] = []
        self._checked: set[str] = set()
        self._alone: set[str] = set()  # checked with one key, where logits do not matter
        self._forwards: list[Heads] = []
        self._differentiable = False
        # Whether attention may be computed outside of transformers' dispatch.
        self._mixed = bool(found.bare or found.heads or not found.attention)
        self._bare = BareCalls(model, found, runs, self._bare_call, again=True)
        self._first = MeasuredFirst(self._apart(), runs, self._bare.watching)
        if not self._mixed:
            self._check_layers()

    def within(self) -> contextlib.AbstractContextManager[None]:
        """A context for each forward pass."""
        if not self._mixed:
            return contextlib.nullcontext()
        self._differentiable = torch.is_grad_enabled()
        return self._bare.watching()

    def begin(self) -> None:
        """Quantize from now on, until `end`."""
        found = self._found
        dispatch.replace([module for _, module in found.attention], self._call)
        for name, module in found.modules.items():
            layer = layer_of(name, found.layers)
            inside = layer is not None and attends_itself(type(module))
            if inside or (layer is not None and name == found.layers[layer][0]):
                hook = functools.partial(_refuse_checkpointing, name)
                self._handles.append(module.register_forward_pre_hook(hook))
        if self._mixed:
            self._handles += self._runs.watch(list(self._model.named_modules())[1:])
        elif any(scheme.static for scheme in self._schemes.some(("keys", "values")).all):
            self._handles += self._runs.watch(found.attention)
        self._first.begin()
        for name, heads in found.heads:
            self._forwards.append(heads)
            heads.forward = self._heads(name, heads)  # type: ignore[method-assign]

    def end(self) -> None:
        """Restore the model."""
        dispatch.restore([module for _, module in self._found.attention])
        self._first.end()
        for heads in self._forwards:
            heads.__dict__.pop("forward", None)
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._forwards.clear()

    def _apart(self) -> dict[str, nn.Module]:
        """Modules that compute their maps in separate attention calls, with one range over both."""
        owners = dict.fromkeys(
            self._found.owner(name)
            for name, module in self._found.modules.items()
            if layer_of(name, self._found.layers) is not None and attends_itself(type(module))
        )
        return {
            name: self._found.modules[name]
            for name in owners
            if self._over_both(name) and self._found.family(name).apart
        }

    def _of(self, site: str, name: str) -> Scheme | None:
        """The scheme for a site of the layer that contains an attention module."""
        layer = layer_of(name.partition(" ")[0], self._found.layers)
        return None if layer is None else self._schemes.of(site, layer)

    def _over_both(self, name: str) -> bool:
        logits = self._of("attention_logits", name)
        return logits is not None and logits.over_both

    def _plain(self, name: str) -> bool:
        """Whether no scheme applies to the layer of this module."""
        return all(self._of(scheme.site, name) is None for scheme in self._schemes.all)

    def check(self, now: Pass) -> None:
        """Refuse a pass in which an attention module did not run.

        Raises:
            QuantizationError: names the first, or reports that there is no attention at all, or
                none in a layer that a scheme names.
        """
        names = [name for name, _ in [*self._found.attention, *self._found.heads]]
        silent = [name for name in names if not now.fired[name] and not is_cross(name)]
        if silent:
            raise QuantizationError(
                f"{len(silent)} attention modules did not run in a forward pass, the first is "
                f"{silent[0]}; they would not be quantized"
            )
        if not names and not now.fired["scaled_dot_product_attention"]:
            raise QuantizationError(
                f"no attention was seen in {type(self._model).__name__}: it calls neither "
                "transformers' attention dispatch nor scaled_dot_product_attention"
            )
        if self._mixed:
            self._check_layers(name for name in now.fired if name.endswith(_ATTENDED))

    def _check_layers(self, ran: Iterable[str] = ()) -> None:
        """Refuse layers that a scheme names but that hold no attention.

        `ran`: names of modules that attended, where this is not known before they run.
        """
        known = [*self._found.attention, *self._found.heads]
        names = [*(name for name, _ in known), *(name.partition(" ")[0] for name in ran)]
        held = {layer_of(name, self._found.layers) for name in names}
        self._schemes.check_held(held.union(self._beside), type(self._model).__name__)

    def _call(self, call: dispatch.AttentionCall, value: Tensor, real: Callable[[], Any]) -> Any:
        """Compute a call that goes through transformers' dispatch."""
        name = self._found.names[call.module]
        _refuse_checkpointing(name)  # transformers checkpoints a layer's forward, past its hooks
        cross = is_cross(name)
        if call.options.get("dropout"):
            raise QuantizationError(
                f"{name} drops attention weights out; quantized attention does not: set its "
                "attention dropout to 0"
            )
        now = self._runs.current(name)
        now.fired[name] += 1
        if self._plain(name):
            now.dispatching = True
            output = real()
            now.dispatching = False
            return output
        now.dispatching = True
        logits = read_call(call, now, cross=cross)
        if not self._is_known(name, logits):
            self._check_known(name, real(), logits, value)
        now.dispatching = False
        again = now.turn(name, call.query, call.key) is None
        place = f"{name} (cross-attention)" if cross else name
        out = self._attend(place, logits, value, now, again=again)
        return out.transpose(1, 2).contiguous(), None  # (B, N, H, w)

    def _bare_call(
        self, now: Pass, name: str, part: HeadsOf | None, logits: Logits, call: SdpaCall | FlashCall
    ) -> Tensor | None:
        """Compute a model's own call of scaled_dot_product_attention or flash-attn."""
        if self._plain(name):
            now.fired["scaled_dot_product_attention"] += 1
            return None
        if call.dropout:
            raise QuantizationError(
                f"{name} drops attention weights out; quantized attention does not: set its "
                "attention dropout to 0"
            )
        if isinstance(call, FlashCall) and self._differentiable:
            raise QuantizationError(
                f"{name} calls flash-attn by itself, whose backward pass knows nothing of "
                "quantization; run the model under torch.no_grad()"
            )
        if part is not None and any(self._some_heads(site, name) for site in ("keys", "values")):
            raise QuantizationError(
                f"{name} computes its two maps in calls of their own, which do not tell which "
                "key-value heads they have; choose heads of attention_logits or attention_maps"
            )
        if name in now.measuring:
            cached = self._cached(name, logits, call.value, now)
            add_ends(now, name, *extremes(cached.logits, name, cached.newest_keys))
            return None
        if part is not None and self._over_both(name) and name not in now.ends:
            raise QuantizationError(
                f"{name} computes its two maps in calls of their own, so that a dynamic range over "
                "both is not known at the first; use granularity head or row, or a static range"
            )
        maps = self._of("attention_maps", name)
        if part is not None and maps is not None and maps.granularity == "tensor":
            raise QuantizationError(
                f"{name} computes its two maps in calls of their own, so that a range over the "
                "weights of both is not known at the first; use granularity head or row"
            )
        now.fired["scaled_dot_product_attention"] += 1
        now.fired[name + _ATTENDED] += 1
        place = name if part is None else f"{name} (branch {part.branch})"
        if isinstance(call, FlashCall):
            if not self._is_known(place, logits):
                theirs = call.unshaped(call.compute()[0])
                self._check_known(place, theirs.transpose(1, 2), logits, call.value)
            return call.shaped(self._attend(name, logits, call.value, now, part, again=call.again))
        value = call.value if call.value.dim() == 4 else call.value[:, None]
        if not self._is_known(place, logits):
            output = call.compute()
            output = output if output.dim() == 4 else output[:, None]
            self._check_known(place, output.transpose(1, 2), logits, value)
        out = self._attend(name, logits, value, now, part, again=call.again)
        return out if call.value.dim() == 4 else out[:, 0]

    def _heads(self, name: str, heads: Heads) -> Callable[..., Tensor]:
        """The forward of one of quantdiff's own modules."""

        def forward(query: Tensor, key: Tensor, value: Tensor, kept: Tensor | None) -> Tensor:
            _refuse_checkpointing(name)
            now = self._runs.current(name)
            now.fired[name] += 1
            if self._plain(name):
                plain: Tensor = type(heads).forward(heads, query, key, value, kept)
                return plain
            call = HeadsCall(heads, (query, key, value, kept), {})
            keys, known = key.shape[2], now.batch.past + query.shape[2]
            if keys != known:
                raise unknown_cache(name, keys, known)
            visible, _ = now.visible(call, lambda: read_heads(call))
            sources = heads.layout.key_heads(query.shape[1], key.shape[1])
            values = heads.layout.value_heads(query.shape[1], value.shape[1])

            def wide(x: Tensor) -> Tensor:
                """The values of every query head, concatenated where it reads several."""
                return torch.cat([x[:, list(part)] for part in zip(*values, strict=True)], -1)

            logits = Logits(query, key, heads.scale, visible)
            cached = self._cached(name, logits, value, now)
            cached = cached.arranged(lambda x: x[:, sources], wide)
            return self._attended(name, cached, now)

        return forward

    def _is_known(self, name: str, logits: Logits) -> bool:
        """Whether a module needs no check in this call."""
        alone = logits.key.shape[2] == 1
        return name in self._checked or (alone and name in self._alone)

    def _check_known(self, name: str, output: Any, logits: Logits, value: Tensor) -> None:
        """Check, once per module, that nothing unknown happens between its queries and values."""
        if check_familiar(name, output, logits, value):
            self._checked.add(name)
        elif logits.key.shape[2] == 1:
            self._alone.add(name)

    def _attend(
        self,
        name: str,
        logits: Logits,
        value: Tensor,
        now: Pass,
        part: HeadsOf | None = None,
        *,
        again: bool = False,
    ) -> Tensor:
        """Compute a call; `again`: the same logits were computed before, for other values."""
        numbers = self._value_heads(name, value.shape[1], again=again)
        cached = self._cached(name, logits, value, now, numbers)
        return self._attended(name, cached, now, part, again=again)

    def _cached(
        self,
        name: str,
        logits: Logits,
        value: Tensor,
        now: Pass,
        numbers: list[int] | None = None,
    ) -> Cached:
        """A call with its keys and values as a quantized cache holds them.

        `numbers`: of the value heads in the order of the projection; None for all in that order.
        """
        kept, key = kept_keys(logits, now.batch, name), logits.key
        keys, values = self._of("keys", name), self._of("values", name)
        key_ends, value_ends = (
            ends_of_heads(self._table, scheme, now, name, x, cross=logits.cross)
            for scheme, x in ((keys, key), (values, value))
        )
        return Cached(
            dataclasses.replace(logits, key=rounded_heads(key, keys, kept, name, ends=key_ends)),
            rounded_heads(value, values, kept, name, numbers, value_ends),
            newest_of(key, keys, logits, now.batch, name),
            newest_of(value, values, logits, now.batch, name),
        )

    def _value_heads(self, name: str, count: int, *, again: bool) -> list[int] | None:
        """Which value heads a call has, in the order of the projection; None if it has all.

        DiffLlama attends once with the first half of them and once with the second, each given
        twice.
        """
        if name not in self._found.modules or self._found.family(name).layout != "halves":
            return None
        half = count // 2
        return [half * again + head % half for head in range(count)]

    def _some_heads(self, site: str, name: str) -> bool:
        scheme = self._of(site, name)
        return scheme is not None and scheme.heads is not None

    def _attended(
        self,
        name: str,
        cached: Cached,
        now: Pass,
        part: HeadsOf | None = None,
        *,
        again: bool = False,
    ) -> Tensor:
        logits, value, newest_keys = cached.logits, cached.value, cached.newest_keys
        heads = None if part is None else np.repeat(part.heads, part.step)
        query, key = as_multiplied(logits.query, logits.key)
        scheme, maps = self._of("attention_logits", name), self._of("attention_maps", name)
        counts = self._clipping is not None and scheme is not None and not again
        clipped = np.zeros(query.shape[1], np.int64) if counts else None
        softmax = softmax_of(
            logits, scheme, self._table, name, heads, clipped, now.ends.get(name), maps, newest_keys
        )
        count = query.shape[1]
        numbers = range(count) if heads is None else heads.tolist()
        total = count if part is None else part.total
        of_logits, of_maps = (
            chosen_heads(one, numbers, total, name, query.device) for one in (scheme, maps)
        )
        softmax = dataclasses.replace(softmax, heads=of_logits, map_heads=of_maps)
        newest = newest_keys, cached.newest_values
        if newest_keys is not None:
            exact = as_multiplied(query, newest_keys.exact)[1]
            newest = dataclasses.replace(newest_keys, exact=exact), cached.newest_values
        try:
            if newest == (None, None) and flex.takes(query, key, value, softmax, logits.sinks):
                out = flex.attend(query, key, value, softmax, logits.sinks)
            else:
                out = attend(query, key, value, softmax, logits.sinks, *newest)
        except NoGridError:
            raise QuantizationError(
                f"NaN or infinity among the attention logits of {name}"
            ) from None
        if clipped is not None:
            assert self._clipping is not None
            known = self._clipping.setdefault(name, Clipping.none(0))
            known.add(clipped, logits.visible, softmax.heads, heads)
        if not bool(torch.isfinite(out).all()):
            raise QuantizationError(f"NaN or infinity in the quantized attention of {name}")
        return out


def _refuse_checkpointing(name: str, *_: Any) -> None:
    """Refuse recomputation in the backward pass: no padding is known, bare calls go unquantized."""
    if in_backward():
        raise QuantizationError(
            f"{name} is computed a second time in the backward pass; gradient checkpointing does "
            "not go with fake quantization: switch it off"
        )
