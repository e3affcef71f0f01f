"""Recording: hooks on every layer's output, and one between q·kᵀ and softmax in each layer."""

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, Self

import torch
from torch import Tensor, nn

from quantdiff.attention.heads import Heads
from quantdiff.errors import RecordingError, UsageError
from quantdiff.hooks import dispatch
from quantdiff.hooks.check import check_weights
from quantdiff.hooks.entrance import Entrance, in_backward, is_entered
from quantdiff.hooks.found import Found, refuse
from quantdiff.hooks.kept import Detail, Kept
from quantdiff.hooks.layers import is_cross, layer_of
from quantdiff.hooks.masks import (
    check_options,
    position_bias,
    read_heads,
    read_mask,
    read_sdpa,
)
from quantdiff.hooks.own import HeadsCall
from quantdiff.hooks.passes import Pass
from quantdiff.hooks.runs import Runs
from quantdiff.hooks.sdpa import SdpaCall, SdpaMode
from quantdiff.models import describe
from quantdiff.statistics.profile import DEFINITIONS, HiddenStates, Profile
from quantdiff.versions import versions

__all__ = ["Recorder", "record"]


class Recorder:
    """Records a model's attention logits and hidden states while it is entered as a context.

    The model computes exactly what it computes without it; after the context, also when it is left
    by an exception, nothing of the recorder remains on the model. See `record`.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        top_k: int,
        detail: Detail,
        layers: Sequence[str] | None,
        compiled: bool,
    ) -> None:
        if detail not in ("extremes", "full"):
            raise UsageError(f"detail is 'extremes' or 'full', not {detail!r}")
        if top_k < 0:
            raise UsageError(f"top_k is 0 or more, not {top_k}")
        refuse(model)
        self._model = model
        self._found = Found(model, layers)
        self._detail: Detail = detail
        self._handles: list[torch.utils.hooks.RemovableHandle] = []
        self._wrapped: list[Entrance] = []
        self._poisoned: str | None = None
        self._cross: set[str] = set()
        self._checked: set[str] = set()
        self._kept = Kept(self._found.layers, top_k=top_k, detail=detail, compiled=compiled)
        self._runs = Runs(
            [name for name, _ in self._found.layers],
            within=contextlib.nullcontext
            if self._found.attention
            else lambda: SdpaMode(self._sdpa),
            check=self._check_complete,
        )

    def __enter__(self) -> Self:
        if any(dispatch.is_hooked(module) for _, module in self._found.attention) or is_entered(
            self._model
        ):
            raise RecordingError(
                "this model is being recorded already; leave that recording before another begins"
            )
        try:
            dispatch.hook([module for _, module in self._found.attention], self)
            for module in self._found.entrances:
                self._wrapped.append(Entrance(module, self._runs.around))
            watched = self._found.attention or list(self._model.named_modules())[1:]
            for name, module in watched:
                self._handles += [
                    module.register_forward_pre_hook(self._runs.entering(name)),
                    module.register_forward_hook(self._runs.leaving(name), always_call=True),
                ]
            for name, heads in self._found.heads:
                hook = self._heads_hook(name)
                self._handles.append(heads.register_forward_pre_hook(hook, with_kwargs=True))
            for name, layer in self._found.layers:
                self._handles.append(layer.register_forward_hook(self._layer_hook(name)))
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        self._remove()

    def profile(self, *, source: str = "", partial: bool = False) -> Profile:
        """What was recorded so far; later passes do not change it.

        Args:
            source: name of the data, for the record.
            partial: the recording was cut short. A pass that ended in an exception says so by
                itself, since only some of the layers have seen it.

        Raises:
            RecordingError: nothing was recorded yet.
        """
        runs = self._runs
        with runs.lock, self._kept.lock:
            if self._poisoned is not None:
                raise RecordingError(f"this recording holds wrong numbers: {self._poisoned}")
            if not runs.sequences.tokens:
                raise RecordingError("nothing was recorded: the model did not run in the context")
            recorded = Profile(
                model={
                    **describe(self._model),
                    "layout": self._found.layout,
                    "lambda": self._found.lambdas(),
                },
                data={
                    "source": source,
                    "tokens": runs.sequences.tokens,
                    "sequences": runs.sequences.sequences,
                    "sequence_length": runs.sequences.longest,
                },
                definition=dict(DEFINITIONS),
                detail=self._detail,
                partial=partial or runs.interrupted or runs.open > 0,
                versions=versions(),
                attention_logits=self._kept.attention_logits(self._found.layouts),
                hidden_states=HiddenStates(list(self._kept.hidden_sites.values())),
            )
            return recorded.copy()

    def _check_complete(self, now: Pass) -> None:
        # A decoder half stands without its encoder: its cross-attention may stay silent.
        attention = [name for name, _ in self._found.attention if not is_cross(name)]
        attention += [f"{name} (heads)" for name, _ in self._found.heads]
        expected = attention + [name for name, _ in self._found.layers]
        silent = [name for name in expected if not now.fired[name]]
        if silent:
            raise RecordingError(
                f"{len(silent)} hooks never fired in a forward pass, the first at {silent[0]}; "
                "the recording would lack these layers"
            )
        found = self._found.attention or self._found.heads
        if not found and not any(now.fired[name] for name in self._kept.logit_sites):
            raise RecordingError(
                f"no attention was seen in {type(self._model).__name__}: it calls neither "
                "transformers' attention dispatch nor scaled_dot_product_attention; a transformers "
                "model may do so when it is loaded with attention='sdpa'"
            )

    # The hooks

    def attention(self, call: dispatch.AttentionCall) -> None:
        """Record one attention call; called by the dispatch hook."""
        if in_backward():
            return
        name = self._found.names[call.module]
        now = self._runs.current(name)
        now.fired[name] += 1
        turn = now.turn(name, call.query, call.key)
        if turn is None:
            return
        if turn:
            raise RecordingError(
                f"{name} attends more than once in one call, with other queries or keys; quantdiff "
                "does not know what that means"
            )
        check_options(call)
        visible, bias = now.visible(call, lambda: read_mask(call))
        bias = position_bias(call, bias)
        scale = call.options.get("scaling")
        scale = call.query.shape[-1] ** -0.5 if scale is None else scale
        softcap = call.options.get("softcap")
        site = f"{name} (cross-attention)" if is_cross(name) else name
        self._kept.logits(
            site, call.query, call.key, float(scale), visible, now.batch,
            softcap=softcap, bias=bias, cross=is_cross(name),
        )  # fmt: skip
        call.recorded = (float(scale), visible, softcap, bias)

    def attended(self, call: dispatch.AttentionCall, output: Any) -> None:
        """Compare what an eager function returned with what was recorded, once a module."""
        name = self._found.names[call.module]
        if call.recorded is None or call.implementation != "eager" or name in self._checked:
            return
        weights = output[1] if isinstance(output, tuple) and len(output) > 1 else None
        if not isinstance(weights, Tensor):
            raise RecordingError(
                f"the eager attention of {name} returns no weights by which its logits could be "
                "checked; load the model with attention='sdpa'"
            )
        try:
            with torch.no_grad():
                told = check_weights(name, weights, call.query, call.key, *call.recorded)
        except RecordingError as error:
            self._poisoned = str(error)
            raise
        if told:
            self._checked.add(name)

    def _sdpa(self, call: SdpaCall) -> None:
        """Record one scaled_dot_product_attention call of the module under way."""
        if in_backward():
            return
        now = self._runs.current("scaled_dot_product_attention")
        if now.stack and now.stack[-1] in self._found.inside:
            return  # of a backend of our own, whose heads were seen as a whole
        module = now.stack[-1] if now.stack else type(self._model).__name__
        if layer_of(module, self._found.layers) is None:
            raise RecordingError(
                f"{module} attends outside of the layers {self._found.layers[0][0]} … "
                f"{self._found.layers[-1][0]}; name the layers: record(model, layers=['…', …])"
            )
        queries, keys = call.query.shape[2], call.key.shape[2]
        turn = now.turn(module, *call.tensors)
        if turn is None:
            return
        # A further attention in one call of the module, for example of a differential pair.
        name = f"{module} #{turn}" if turn else module
        if is_cross(module) or keys < queries:
            self._cross.add(name)
        elif keys > queries and not call.is_causal and name not in self._cross:
            raise RecordingError(
                f"{module} attends from {queries} queries to {keys} keys: a cache of its own, or "
                "cross-attention, which a module says by 'cross' in its name; neither can be told"
            )
        cross = name in self._cross
        name = f"{name} (cross-attention)" if cross else name
        now.fired[name] += 1
        visible, bias = now.visible(call, lambda: read_sdpa(call))
        scale = call.query.shape[-1] ** -0.5 if call.scale is None else call.scale
        self._kept.logits(
            name, call.query, call.key, float(scale), visible, now.batch, softcap=None, bias=bias,
            cross=cross,
        )  # fmt: skip

    def _heads_hook(self, name: str) -> Callable[..., None]:
        def hook(module: Heads, args: Any, kwargs: Any) -> None:
            if in_backward():
                return
            now = self._runs.current(name)
            now.fired[f"{name} (heads)"] += 1  # the layer itself may have this name
            call = HeadsCall(module, args, kwargs)
            keys, known = call.key.shape[2], now.batch.past + call.query.shape[2]
            if keys != known:
                raise RecordingError(
                    f"{name} attends to {keys} keys where this forward pass knows of {known} "
                    "tokens; a cache is to reach the model's forward as a transformers Cache"
                )
            visible, _ = now.visible(call, lambda: read_heads(call))
            self._kept.logits(
                name, call.query, call.key, module.scale, visible, now.batch, softcap=None,
                bias=None, cross=False,
            )  # fmt: skip

        return hook

    def _layer_hook(self, name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            if in_backward():
                return
            now = self._runs.current(name)
            now.fired[name] += 1
            self._kept.hidden(name, output, now.batch)

        return hook

    def _remove(self) -> None:
        dispatch.unhook([module for _, module in self._found.attention])
        for handle in self._handles:
            handle.remove()
        for entrance in reversed(self._wrapped):
            entrance.remove()
        self._handles.clear()
        self._wrapped.clear()


def record(
    model: nn.Module,
    *,
    top_k: int = 100,
    detail: Detail = "full",
    layers: Sequence[str] | None = None,
    compiled: bool = True,
) -> Recorder:
    """Record a model's attention logits and hidden states within a `with` block.

    Args:
        model: a transformers model whose attention goes through the attention dispatch (eager,
            sdpa, flex_attention or flash_attention_2/3/4), or any module that calls
            `torch.nn.functional.scaled_dot_product_attention` or holds modules of
            `quantdiff.attention`.
        top_k: how many of the largest magnitudes are kept with their coordinates.
        detail: `full`, or `extremes` for counts, maxima and minima alone, which is faster.
        layers: names of the modules whose outputs are the hidden states, in order; found by
            themselves where a list of like blocks holds the attention.
        compiled: False records in plain torch even where the compiled kernels were built.

    Returns:
        A context; its `profile()` gives what was recorded.

    Raises:
        UsageError: `detail`, `top_k` or a name of `layers` that is not known.
        RecordingError: the model, or in a forward pass something it does, cannot be recorded
            rightly.
    """
    return Recorder(model, top_k=top_k, detail=detail, layers=layers, compiled=compiled)
