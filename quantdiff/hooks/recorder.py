"""Recording: forward hooks on every decoder layer, and one between q·kᵀ and softmax in each."""

import inspect
import threading
import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any, Literal, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from quantdiff.attention.layouts import branches
from quantdiff.errors import RecordingError, UsageError
from quantdiff.hooks import dispatch
from quantdiff.hooks.layers import decoder_layers
from quantdiff.hooks.masks import Bias, check_options, read_mask
from quantdiff.hooks.sequences import Batch, Sequences
from quantdiff.models import describe
from quantdiff.models.families import layout_of
from quantdiff.statistics import (
    NonFiniteError,
    SiteStatistics,
    Visible,
    measure_logits,
    measure_values,
)
from quantdiff.statistics.profile import (
    DEFINITIONS,
    AttentionLogits,
    HiddenStates,
    Profile,
)
from quantdiff.versions import versions

__all__ = ["Recorder", "record"]

Detail = Literal["extremes", "full"]


class _Pass:
    """What is known of the forward pass under way in one thread."""

    def __init__(self, batch: Batch, owner: nn.Module) -> None:
        self.batch = batch
        self.owner = owner
        self.fired: Counter[str] = Counter()
        # Weakly: held, the queries and keys of all layers would outweigh the activations.
        self.seen: dict[str, tuple[weakref.ref[Tensor], weakref.ref[Tensor]]] = {}
        self.masks: dict[Any, tuple[Any, Visible, Bias | None]] = {}


class Recorder:
    """Records a model's attention logits and hidden states while it is entered as a context.

    The model computes exactly what it computes without it; after the context, also when it is left
    by an exception, nothing of the recorder remains on the model. See `record`.
    """

    def __init__(self, model: nn.Module, *, top_k: int, detail: Detail, compiled: bool) -> None:
        if detail not in ("extremes", "full"):
            raise UsageError(f"detail is 'extremes' or 'full', not {detail!r}")
        if top_k < 0:
            raise UsageError(f"top_k is 0 or more, not {top_k}")
        self._model = model
        self._compiled = compiled
        self._detail: Detail = detail
        self._top_k = top_k
        self._local = threading.local()
        self._lock = threading.Lock()
        self._handles: list[torch.utils.hooks.RemovableHandle] = []
        self._sequences = Sequences()
        self._interrupted = False
        self._attention = dispatch.attention_modules(model)
        if not self._attention:
            raise RecordingError(
                f"{type(model).__name__} has no attention layer that goes through transformers' "
                "attention dispatch; its logits cannot be reached"
            )
        names = [name for name, _ in self._attention]
        self._layers, layer_of = decoder_layers(model, names)
        self._layer_of = dict(zip(names, layer_of, strict=True))
        self._names = {module: name for name, module in self._attention}
        self._layout = layout_of(model)
        full = detail == "full"
        self._logit_sites: dict[str, SiteStatistics] = {}
        self._hidden_sites = {
            name: SiteStatistics.empty(name, i, 1, full=full, rank=top_k, coordinates=4)
            for i, (name, _) in enumerate(self._layers)
        }

    def __enter__(self) -> Self:
        if any(dispatch.is_hooked(module) for _, module in self._attention):
            raise RecordingError(
                "this model is being recorded already; leave that recording before another begins"
            )
        try:
            dispatch.hook([module for _, module in self._attention], self)
            for module in self._entrances():
                self._handles += [
                    module.register_forward_pre_hook(self._enter_pass, with_kwargs=True),
                    module.register_forward_hook(
                        self._leave_pass, with_kwargs=True, always_call=True
                    ),
                ]
            for i, (name, layer) in enumerate(self._layers):
                self._handles.append(layer.register_forward_hook(self._layer_hook(i, name)))
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
        with self._lock:
            if not self._sequences.tokens:
                raise RecordingError("nothing was recorded: the model did not run in the context")
            branch_of = {
                site.layer: branches(self._layout, site.groups)
                for site in self._logit_sites.values()
            }
            order = sorted(self._logit_sites.values(), key=lambda site: site.layer)
            recorded = Profile(
                model={**describe(self._model), "layout": self._layout, "lambda": None},
                data={
                    "source": source,
                    "tokens": self._sequences.tokens,
                    "sequences": self._sequences.sequences,
                    "sequence_length": self._sequences.longest,
                },
                definition=dict(DEFINITIONS),
                detail=self._detail,
                partial=partial or self._interrupted,
                versions=versions(),
                attention_logits=AttentionLogits(order, branch_of),
                hidden_states=HiddenStates(list(self._hidden_sites.values())),
            )
            return recorded.copy()

    # The passes

    def _entrances(self) -> list[nn.Module]:
        """The modules through which a pass may begin: the model and the decoder inside it."""
        from transformers import PreTrainedModel

        owners = self._layers[0][0].split(".")
        found = [self._model]
        for name, module in self._model.named_modules():
            inside = name.split(".") == owners[: len(name.split("."))]
            if module is not self._model and inside and isinstance(module, PreTrainedModel):
                found.append(module)
        return found

    def _enter_pass(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if getattr(self._local, "now", None) is not None:
            return  # the decoder inside the model whose pass has begun
        given = _arguments(module, args, kwargs)
        tokens = given.get("input_ids")
        tokens = given.get("inputs_embeds") if tokens is None else tokens
        if tokens is None:
            raise RecordingError("a recorded model is called with input_ids or inputs_embeds")
        mask = given.get("attention_mask")
        mask = mask if isinstance(mask, Tensor) and mask.dim() == 2 else None
        with self._lock:
            batch = self._sequences.begin(tokens.shape[0], tokens.shape[1], mask, _cache(given))
            # Reserved now, so that passes in other threads get other numbers.
            self._sequences.sequences = max(
                self._sequences.sequences, batch.first + tokens.shape[0]
            )
        self._local.now = _Pass(batch, module)

    def _leave_pass(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> None:
        now = getattr(self._local, "now", None)
        if now is None or now.owner is not module:
            return
        self._local.now = None
        if output is None:  # left by an exception: some layers have seen the pass, others not
            self._interrupted = True
            return
        expected = [name for name, _ in self._attention] + [name for name, _ in self._layers]
        silent = [name for name in expected if not now.fired[name]]
        if silent:
            raise RecordingError(
                f"{len(silent)} hooks never fired in a forward pass, the first at {silent[0]}; "
                "the recording would lack these layers"
            )
        cache = _cache(output) if isinstance(output, dict | tuple) else None
        cache = _cache(_arguments(module, args, kwargs)) if cache is None else cache
        with self._lock:
            self._sequences.end(now.batch, cache)

    def _current(self, name: str) -> _Pass:
        now: _Pass | None = getattr(self._local, "now", None)
        if now is None:
            raise RecordingError(
                f"{name} was called outside of the recorded model's forward pass; quantdiff cannot "
                "tell which sequence this is"
            )
        return now

    # The hooks

    def attention(self, call: dispatch.AttentionCall) -> None:
        """Record one attention call; called by the dispatch hook."""
        name = self._names[call.module]
        now = self._current(name)
        now.fired[name] += 1
        before = now.seen.get(name)
        if before is not None:
            # DiffLlama attends twice with the same queries and keys, once for each half of V.
            if before[0]() is call.query and before[1]() is call.key:
                return
            raise RecordingError(
                f"{name} attends more than once in a forward pass, with other queries or keys; "
                "quantdiff would count its logits twice"
            )
        now.seen[name] = (weakref.ref(call.query), weakref.ref(call.key))
        check_options(call)
        scale = call.options.get("scaling")
        if scale is None:
            scale = call.query.shape[-1] ** -0.5
        visible, bias = self._visible(now, call)
        layer = self._layer_of[name]
        batch = now.batch
        offset = batch.key_offset(call.key.shape[2])
        with self._lock:
            site = self._logit_sites.get(name)
            if site is None:
                heads = call.query.shape[1]
                site = SiteStatistics.empty(
                    name, layer, heads, full=self._detail == "full", rank=self._top_k, coordinates=5
                )
                self._logit_sites[name] = site
            try:
                measure_logits(
                    call.query, call.key, float(scale), visible, site,
                    lambda place: _locate_logits(place, layer, batch, offset),
                    softcap=call.options.get("softcap"), bias=bias, compiled=self._compiled,
                )  # fmt: skip
            except NonFiniteError as error:
                raise RecordingError(
                    f"NaN or infinity among the attention logits of layer {layer}, "
                    f"head {error.group} ({name})"
                ) from None

    def _visible(self, now: _Pass, call: dispatch.AttentionCall) -> tuple[Visible, Bias | None]:
        """The call's mask, read once for all layers that share it."""
        if call.query.shape[0] != now.batch.shape[0] or call.query.shape[2] != now.batch.shape[1]:
            raise RecordingError(
                f"queries of shape {tuple(call.query.shape)} do not fit a pass over "
                f"{now.batch.shape[0]} sequences of {now.batch.shape[1]} tokens"
            )
        key = (
            id(call.mask), call.implementation, call.key.shape[2],
            call.options.get("sliding_window"), call.options.get("is_causal"),
            getattr(call.module, "is_causal", None),
        )  # fmt: skip
        known = now.masks.get(key)
        if known is None:
            visible, bias = read_mask(call)
            visible = visible.only(now.batch.real.to(visible.stop.device))
            known = now.masks[key] = (call.mask, visible, bias)  # holding the mask keeps its id
        return known[1], known[2]

    def _layer_hook(self, layer: int, name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            now = self._current(name)
            now.fired[name] += 1
            if now.fired[name] > 1:
                raise RecordingError(f"{name} was called more than once in a forward pass")
            hidden = output if isinstance(output, Tensor) else output[0]
            self._record_hidden(layer, name, hidden, now.batch)

        return hook

    def _record_hidden(self, layer: int, name: str, hidden: Tensor, batch: Batch) -> None:
        if hidden.dim() != 3 or tuple(hidden.shape[:2]) != batch.shape:
            raise RecordingError(
                f"{name} gives a tensor of shape {tuple(hidden.shape)}, not (sequences, tokens, "
                "channels)"
            )
        positions = batch.positions[:, batch.past :]
        width = hidden.shape[1]
        real = batch.real.to(hidden.device).flatten()

        def locate(place: NDArray[np.int64]) -> NDArray[np.int64]:
            b, n = place[:, 2] // width, place[:, 2] % width
            return np.stack(
                [np.full_like(b, layer), batch.first + b, positions[b, n], place[:, 3]], 1
            )

        with self._lock:
            try:
                measure_values(
                    hidden.flatten(0, 1), real, self._hidden_sites[name], locate,
                    compiled=self._compiled,
                )  # fmt: skip
            except NonFiniteError:
                raise RecordingError(
                    f"NaN or infinity among the hidden states of layer {layer} ({name})"
                ) from None

    def _remove(self) -> None:
        dispatch.unhook([module for _, module in self._attention])
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._local = threading.local()


def record(
    model: nn.Module, *, top_k: int = 100, detail: Detail = "full", compiled: bool = True
) -> Recorder:
    """Record a model's attention logits and hidden states within a `with` block.

    Args:
        model: a transformers model whose attention goes through the attention dispatch: eager,
            sdpa, flex_attention or flash_attention_2/3/4.
        top_k: how many of the largest magnitudes are kept with their coordinates.
        detail: `full`, or `extremes` for counts, maxima and minima alone, which is faster.
        compiled: False records in plain torch even where the compiled kernels were built.

    Returns:
        A context; its `profile()` gives what was recorded.

    Raises:
        RecordingError: the model, or in a forward pass something it does, cannot be recorded
            rightly.
    """
    return Recorder(model, top_k=top_k, detail=detail, compiled=compiled)


def _arguments(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    names = list(inspect.signature(module.forward).parameters)
    return {**dict(zip(names, args, strict=False)), **kwargs}


def _cache(source: Any) -> Any:
    """The key-value cache among a call's arguments or in a model's output, or None."""
    # Its name changed from past_key_values to cache; asking a new output by the old name warns.
    values = list(source.values()) if isinstance(source, dict) else list(source)
    return next((value for value in values if hasattr(value, "get_seq_length")), None)


def _locate_logits(
    place: NDArray[np.int64],
    layer: int,
    batch: Batch,
    offset: int,
) -> NDArray[np.int64]:
    """From (head, batch row, query row, key) to (layer, head, sequence, query, key)."""
    head, b, n, m = place.T
    return np.stack(
        [
            np.full_like(head, layer),
            head,
            batch.first + b,
            batch.positions[b, batch.past + n],
            batch.positions[b, offset + m],
        ],
        1,
    )
