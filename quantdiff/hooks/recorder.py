"""Recording: hooks on every layer's output, and one between q·kᵀ and softmax in each layer."""

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, Self

import torch
from torch import Tensor, nn

from quantdiff.attention.heads import Heads
from quantdiff.errors import RecordingError, UsageError
from quantdiff.hooks import dispatch
from quantdiff.hooks.bare import BareCalls, Call
from quantdiff.hooks.check import check_weights
from quantdiff.hooks.complete import check_complete, check_once, site_key
from quantdiff.hooks.entrance import Entrance, in_backward, is_entered
from quantdiff.hooks.found import Found, refuse
from quantdiff.hooks.kept import Detail, Kept
from quantdiff.hooks.layers import is_cross
from quantdiff.hooks.logits import HeadsOf, Logits
from quantdiff.hooks.maps import Lambdas, Maps, Span, WhenDone
from quantdiff.hooks.masks import read_heads
from quantdiff.hooks.own import HeadsCall
from quantdiff.hooks.passes import Pass
from quantdiff.hooks.reading import read_call
from quantdiff.hooks.runs import Runs
from quantdiff.hooks.sites import Sites
from quantdiff.models import describe
from quantdiff.statistics.activations import RECORDED, HiddenStates
from quantdiff.statistics.maps import MAP_DEFINITIONS
from quantdiff.statistics.profile import DEFINITIONS, LAMBDA, SITE_DEFINITIONS, Profile
from quantdiff.versions import versions

__all__ = ["Recorder", "record"]


class Recorder:
    """Records a model's attention logits and hidden states while it is entered as a context.

    The model computes exactly what it computes without it; after the context, even if it is left
    by an exception, nothing of the recorder remains on the model. See `record`; `done` makes the
    object that measures attention modules when they are done, instead of `Maps`.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        top_k: int,
        detail: Detail,
        layers: Sequence[str] | None,
        layout: str | None,
        maps: bool,
        spans: Sequence[Span | None],
        compiled: bool,
        sites: Sequence[str] = (),
        done: Callable[[Found], WhenDone] | None = None,
    ) -> None:
        if detail not in ("extremes", "full"):
            raise UsageError(f"detail is 'extremes' or 'full', not {detail!r}")
        if top_k < 0:
            raise UsageError(f"top_k is 0 or more, not {top_k}")
        _check_sites(sites)
        refuse(model)
        self._model = model
        self._found = Found(model, layers, layout)
        self._detail: Detail = detail
        self._handles: list[torch.utils.hooks.RemovableHandle] = []
        self._wrapped: list[Entrance] = []
        self._poisoned: str | None = None
        self._checked: set[str] = set()
        self._asked = [site for site in RECORDED if site in sites]
        self._kept = Kept(
            self._found.layers, top_k=top_k, detail=detail, compiled=compiled,
            channels="hidden_states" in sites,
        )  # fmt: skip
        self._sites = Sites(
            self._found, sites, self._kept.lock, full=detail == "full", rank=top_k,
            compiled=compiled,
        )  # fmt: skip
        # Whether attention may be seen outside of transformers' dispatch.
        self._mixed = bool(self._found.bare or self._found.heads or not self._found.attention)
        self._runs = Runs(
            [name for name, _ in self._found.layers],
            within=self._watching if self._mixed else contextlib.nullcontext,
            check=self._check_complete,
        )
        self._lambdas = Lambdas(self._found)
        if spans and not maps:
            raise UsageError("spans are measured with maps=True")
        self._maps = Maps(self._found, spans) if maps else None
        self._when_done = self._maps if done is None else done(self._found)
        again = self._sites.cached  # differential attention repeats keys in calls with other values
        self._bare = BareCalls(model, self._found, self._runs, self._bare_call, again=again)

    def __enter__(self) -> Self:
        if any(dispatch.is_hooked(module) for _, module in self._found.attention) or is_entered(
            self._model, Runs
        ):
            raise RecordingError(
                "this model is being recorded already; leave that recording before another begins"
            )
        try:
            dispatch.hook([module for _, module in self._found.attention], self)
            for module in self._found.entrances:
                self._wrapped.append(Entrance(module, self._runs.around))
            watched = self._found.attention
            if self._mixed:
                watched = list(self._model.named_modules())[1:]
            for name, projection in self._lambdas.modules:
                hook = self._lambdas.hook(name, self._runs.current)
                self._handles.append(projection.register_forward_hook(hook))
            if self._when_done is not None:
                for name, module in watched:
                    hook = self._done_hook(name, self._when_done)
                    self._handles.append(module.register_forward_hook(hook))
            self._handles += self._runs.watch(watched)
            self._handles += self._sites.watch(self._runs.current)
            for name, heads in self._found.heads:
                before = self._heads_hook(name)
                self._handles.append(heads.register_forward_pre_hook(before, with_kwargs=True))
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
            partial: whether the recording was cut short. A pass that ended in an exception makes
                it partial in any case, since only some of the layers have seen that pass.

        Raises:
            RecordingError: nothing was recorded yet, or a check found its numbers wrong.
        """
        runs = self._runs
        sites = [name.partition(" ")[0] for name in self._kept.logit_sites]
        with runs.lock, self._kept.lock:
            if self._poisoned is not None:
                raise RecordingError(f"this recording holds wrong numbers: {self._poisoned}")
            if not runs.sequences.tokens:
                raise RecordingError("nothing was recorded: the model did not run in the context")
            layouts = self._found.layouts(sites)
            kinds = {kind for kind in layouts if kind}
            recorded = Profile(
                model={
                    **describe(self._model),
                    "layout": kinds.pop() if len(kinds) == 1 else "mixed",
                    "lambda": self._found.lambdas(sites),
                },
                data={
                    "source": source,
                    "tokens": runs.sequences.tokens,
                    "sequences": runs.sequences.sequences,
                    "sequence_length": runs.sequences.longest,
                },
                definition=self._definitions(),
                detail=self._detail,
                partial=partial or runs.interrupted or runs.open > 0,
                versions=versions(),
                attention_logits=self._kept.attention_logits(layouts),
                hidden_states=HiddenStates(list(self._kept.hidden_sites.values())),
                lambdas=self._lambdas.sites(),
                maps=None if self._maps is None else self._maps.sites(),
                sites=self._sites.recorded(),
            )
            return recorded.copy()

    def _definitions(self) -> dict[str, str]:
        """What is counted, in words."""
        more = {"lambda": LAMBDA} if self._lambdas.sites() else {}
        if self._maps is not None:
            more |= {f"maps.{name}": words for name, words in MAP_DEFINITIONS.items()}
        return DEFINITIONS | {site: SITE_DEFINITIONS[site] for site in self._asked} | more

    def _check_complete(self, now: Pass) -> None:
        check_complete(now, self._model, self._found, self._kept.logit_sites)

    def _watching(self) -> contextlib.AbstractContextManager[None]:
        return self._bare.watching()

    # The hooks

    def _record(self, now: Pass, name: str, part: HeadsOf | None, call: Logits) -> None:
        """Keep what one attention call of a site shows, once."""
        now.fired[site_key(name, None if part is None else part.branch)] += 1
        module = name.partition(" ")[0]
        self._found.dtypes.setdefault(module, call.query.dtype)
        self._kept.logits(name, part, call, now.batch)
        if self._when_done is not None:
            now.pending.setdefault(module, []).append((name, part, call))

    def _bare_call(
        self, now: Pass, name: str, part: HeadsOf | None, logits: Logits, call: Call
    ) -> None:
        """Keep what a call of scaled_dot_product_attention or flash-attn shows."""
        if not call.again:
            self._record(now, name, part, logits)
        value = call.value if call.value.dim() == 4 else call.value[:, None]
        self._sites.attention(now, name.partition(" ")[0], logits.key, value, cross=logits.cross)

    def _done_hook(self, name: str, measure: WhenDone) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            if not in_backward():
                measure.finish(name, self._runs.current(name))

        return hook

    def attention(self, call: dispatch.AttentionCall) -> None:
        """Record one attention call; called by the dispatch hook."""
        if in_backward():
            return
        name = self._found.names[call.module]
        now = self._runs.current(name)
        check_once(name, now.entered[name])
        # Counted for repeated calls too; the layer itself may have this name.
        now.fired[f"{name} (attention)"] += 1
        now.dispatching = True
        turn = now.turn(name, call.query, call.key)
        if turn is None:
            self._sites.attention(now, name, call.key, call.value, cross=is_cross(name))
            return
        part = self._found.part(name, turn, call.query)
        if turn and part is None:
            raise RecordingError(
                f"{name} attends more than once in one call, with other queries or keys; quantdiff "
                "does not know what that means"
            )
        logits = read_call(call, now, cross=is_cross(name))
        self._record(now, f"{name} (cross-attention)" if logits.cross else name, part, logits)
        self._sites.attention(now, name, call.key, call.value, cross=logits.cross)
        call.recorded = logits.scale, logits.visible, logits.softcap, logits.bias

    def attended(self, call: dispatch.AttentionCall, output: Any) -> None:
        """Compare what an eager function returned with what was recorded, once per module."""
        name = self._found.names[call.module]
        if not in_backward():
            self._runs.current(name).dispatching = False
        if call.recorded is None or call.implementation != "eager" or name in self._checked:
            return
        if call.replaced:  # fake quantization itself checks what it replaces
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

    def _heads_hook(self, name: str) -> Callable[..., None]:
        def hook(module: Heads, args: Any, kwargs: Any) -> None:
            if in_backward():
                return
            now = self._runs.current(name)
            now.fired[f"{name} (heads)"] += 1  # the layer itself may have this name
            check_once(name, now.fired[f"{name} (heads)"])
            call = HeadsCall(module, args, kwargs)
            keys, known = call.key.shape[2], now.batch.past + call.query.shape[2]
            if keys != known:
                raise RecordingError(
                    f"{name} attends to {keys} keys where this forward pass knows of {known} "
                    "tokens; a cache is to reach the model's forward as a transformers Cache"
                )
            visible, _ = now.visible(call, lambda: read_heads(call))
            self._record(now, name, None, Logits(call.query, call.key, module.scale, visible))
            self._sites.attention(now, name, *call.cached, cross=False)

        return hook

    def _layer_hook(self, name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            if in_backward():
                return
            now = self._runs.current(name)
            now.fired[name] += 1
            check_once(name, now.fired[name])
            self._kept.hidden(name, output, now.batch)

        return hook

    def _remove(self) -> None:
        dispatch.unhook([module for _, module in self._found.attention], self)
        for handle in self._handles:
            handle.remove()
        for entrance in reversed(self._wrapped):
            entrance.remove()
        self._handles.clear()
        self._wrapped.clear()


def _check_sites(sites: Sequence[str]) -> None:
    """Refuse sites that are not recorded on request."""
    if isinstance(sites, str):
        raise UsageError(f"sites are a list of names, as in ({sites!r},)")
    for site in sites:
        if site not in RECORDED:
            raise UsageError(
                f"the site {site!r} is not recorded on request; known: {', '.join(RECORDED)}"
            )


def record(
    model: nn.Module,
    *,
    top_k: int = 100,
    detail: Detail = "full",
    layers: Sequence[str] | None = None,
    layout: str | None = None,
    maps: bool = False,
    spans: Sequence[Span | None] = (),
    sites: Sequence[str] = (),
    compiled: bool = True,
) -> Recorder:
    """Record a model's attention logits and hidden states within a `with` block.

    Args:
        model: a transformers model whose attention goes through the attention dispatch (eager,
            sdpa, flex_attention or flash_attention_2/3/4), or any module that calls
            `torch.nn.functional.scaled_dot_product_attention` or flash-attn 2, or holds modules of
            `quantdiff.attention`.
        top_k: how many of the largest magnitudes are kept with their coordinates.
        detail: `full`, or `extremes` for counts, maxima and minima only, which is faster.
        layers: names of the modules whose outputs are the hidden states, in order; found
            automatically if a list of like blocks holds the attention.
        layout: head layout of the model's attention, if quantdiff does not know it: `none`,
            `halves` or `adjacent_shared`, whose maps come from one attention call over all heads,
            or `adjacent` or `grouped:R`, whose map 1 and map 2 are two calls, in this order.
        maps: measure the attention maps too (see `MAP_DEFINITIONS`), which takes several times as
            long as the logits; no n×n tensor is held.
        spans: with `maps`, the answer's place in each sequence, by the sequence's number: (first
            token, last token + 1) among the real tokens, or None. The mass on it is taken at the
            last token of each forward pass.
        sites: what to record besides logits and hidden states, with the extremes of each channel:
            `linear_inputs`, `keys`, `values`; `hidden_states` adds the channels of hidden states.
        compiled: False records in plain torch even where the compiled kernels were built.

    Returns:
        A context manager; its `profile()` returns what was recorded.

    Raises:
        UsageError: an invalid `detail`, `top_k`, `layout` or `spans`, or an unknown name in
            `layers` or `sites`.
        RecordingError: the model, or something it does in a forward pass, cannot be recorded
            correctly.
    """
    return Recorder(
        model, top_k=top_k, detail=detail, layers=layers, layout=layout, maps=maps, spans=spans,
        sites=sites, compiled=compiled,
    )  # fmt: skip
