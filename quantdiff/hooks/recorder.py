"""Recording: hooks on every layer's output, and one between q·kᵀ and softmax in each layer."""

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, Self

import torch
from torch import Tensor, nn

from quantdiff.errors import RecordingError, UsageError
from quantdiff.hooks import dispatch
from quantdiff.hooks.check import check_weights
from quantdiff.hooks.entrance import Entrance, in_backward, is_entered
from quantdiff.hooks.kept import Detail, Kept
from quantdiff.hooks.layers import block_list, is_cross, layer_of, named_layers, owning_list
from quantdiff.hooks.masks import check_options, position_bias, read_mask, read_sdpa
from quantdiff.hooks.passes import Pass
from quantdiff.hooks.runs import Runs
from quantdiff.hooks.sdpa import SdpaCall, SdpaMode
from quantdiff.models import describe
from quantdiff.models.families import layout_of
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
        _refuse(model)
        self._model = model
        self._detail: Detail = detail
        self._handles: list[torch.utils.hooks.RemovableHandle] = []
        self._wrapped: list[Entrance] = []
        self._poisoned: str | None = None
        self._cross: set[str] = set()
        self._checked: set[str] = set()
        self._find(layers)
        self._layout = layout_of(model)
        self._kept = Kept(self._layers, top_k=top_k, detail=detail, compiled=compiled)
        self._runs = Runs(
            [name for name, _ in self._layers],
            within=contextlib.nullcontext if self._attention else lambda: SdpaMode(self._sdpa),
            check=self._check_complete,
        )

    def _find(self, layers: Sequence[str] | None) -> None:
        """The layers and, where they ask transformers' dispatch, the attention modules."""
        found = dispatch.attention_modules(self._model)
        if not found:
            # Calls of scaled_dot_product_attention are looked for while the model runs.
            self._layers = named_layers(self._model, layers) if layers else block_list(self._model)
            self._attention: list[tuple[str, nn.Module]] = []
        else:
            names = [name for name, _ in found]
            if layers:
                self._layers = named_layers(self._model, layers)
                kept = [name for name in names if layer_of(name, self._layers) is not None]
            else:
                self._layers, kept = owning_list(self._model, names)
            self._attention = [(name, module) for name, module in found if name in set(kept)]
        self._names = {module: name for name, module in self._attention}

    def __enter__(self) -> Self:
        if any(dispatch.is_hooked(module) for _, module in self._attention) or is_entered(
            self._model
        ):
            raise RecordingError(
                "this model is being recorded already; leave that recording before another begins"
            )
        try:
            dispatch.hook([module for _, module in self._attention], self)
            for module in self._entrances():
                self._wrapped.append(Entrance(module, self._runs.around))
            watched = self._attention or list(self._model.named_modules())[1:]
            for name, module in watched:
                self._handles += [
                    module.register_forward_pre_hook(self._runs.entering(name)),
                    module.register_forward_hook(self._runs.leaving(name), always_call=True),
                ]
            for name, layer in self._layers:
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
                model={**describe(self._model), "layout": self._layout, "lambda": None},
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
                attention_logits=self._kept.attention_logits(self._layout),
                hidden_states=HiddenStates(list(self._kept.hidden_sites.values())),
            )
            return recorded.copy()

    def _entrances(self) -> list[nn.Module]:
        """The modules through which a pass may begin: the model and the decoders inside it."""
        if not self._attention:
            return [self._model]
        from transformers import PreTrainedModel

        path = self._layers[0][0].split(".")
        found = [self._model]
        for name, module in self._model.named_modules():
            inside = name.split(".") == path[: len(name.split("."))]
            if module is not self._model and inside and isinstance(module, PreTrainedModel):
                found.append(module)
        return found

    def _check_complete(self, now: Pass) -> None:
        # A decoder half stands without its encoder: its cross-attention may stay silent.
        attention = [name for name, _ in self._attention if not is_cross(name)]
        expected = attention + [name for name, _ in self._layers]
        silent = [name for name in expected if not now.fired[name]]
        if silent:
            raise RecordingError(
                f"{len(silent)} hooks never fired in a forward pass, the first at {silent[0]}; "
                "the recording would lack these layers"
            )
        if not self._attention and not any(now.fired[name] for name in self._kept.logit_sites):
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
        name = self._names[call.module]
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
        name = self._names[call.module]
        dropout = call.options.get("dropout") or 0.0
        if call.recorded is None or call.implementation != "eager" or name in self._checked:
            return
        weights = output[1] if isinstance(output, tuple) and len(output) > 1 else None
        if dropout and call.module.training:
            return
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
        module = now.stack[-1] if now.stack else type(self._model).__name__
        if layer_of(module, self._layers) is None:
            raise RecordingError(
                f"{module} attends outside of the layers {self._layers[0][0]} … "
                f"{self._layers[-1][0]}; name the layers: record(model, layers=['…', …])"
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

    def _layer_hook(self, name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            if in_backward():
                return
            now = self._runs.current(name)
            now.fired[name] += 1
            self._kept.hidden(name, output, now.batch)

        return hook

    def _remove(self) -> None:
        dispatch.unhook([module for _, module in self._attention])
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
            `torch.nn.functional.scaled_dot_product_attention`.
        top_k: how many of the largest magnitudes are kept with their coordinates.
        detail: `full`, or `extremes` for counts, maxima and minima alone, which is faster.
        layers: names of the modules whose outputs are the hidden states, in order; found by
            themselves where a list of like blocks holds the attention.
        compiled: False records in plain torch even where the compiled kernels were built.

    Returns:
        A context; its `profile()` gives what was recorded.

    Raises:
        RecordingError: the model, or in a forward pass something it does, cannot be recorded
            rightly.
    """
    return Recorder(model, top_k=top_k, detail=detail, layers=layers, compiled=compiled)


def _refuse(model: nn.Module) -> None:
    """Refuse models that cannot be recorded rightly, before they run."""
    for module in model.modules():
        optimized = type(module).__name__ == "OptimizedModule"
        if optimized or getattr(module, "_compiled_call_impl", None) is not None:
            raise RecordingError(
                "a model under torch.compile runs past the hooks; record the model before it is "
                "compiled (model._orig_mod)"
            )
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        raise RecordingError(
            f"{type(model).__name__} is an encoder-decoder; quantdiff records decoder-only models"
        )
