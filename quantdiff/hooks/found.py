"""What is recorded of a model: its layers, its attention modules, their head layouts."""

import warnings
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from quantdiff.attention.heads import Heads
from quantdiff.attention.layouts import Layout, layout
from quantdiff.errors import RecordingError, UnknownLayoutWarning, UsageError
from quantdiff.hooks.dispatch import attends_itself, attention_modules
from quantdiff.hooks.layers import block_list, layer_of, named_layers, owning_list
from quantdiff.hooks.logits import HeadsOf
from quantdiff.hooks.own import heads_modules
from quantdiff.models.families import (
    STANDARD,
    Family,
    calls_itself_differential,
    family_of,
    given_family,
    lambda_of,
    looks_differential,
)

__all__ = ["Found", "refuse"]


class Found:
    """The modules of a model that the recorder hooks.

    Attributes:
        layers: names and modules whose outputs are the hidden states, in order.
        attention: names and modules that use transformers' dispatch; with towers, the decoder's.
        names: names of these modules, by module.
        heads: quantdiff's own attention, with the name of the module that it belongs to.
        inside: full names of all `Heads` modules.
        modules: all modules by name.
        bare: names of modules in the layers that attend directly, besides those of the dispatch.
        entrances: the modules through which a pass may begin: the model and the decoders inside.
    """

    def __init__(
        self, model: nn.Module, layers: Sequence[str] | None, layout: str | None = None
    ) -> None:
        """Find them; `layers` are names, or None for the list that holds the attention.

        Args:
            model: to be recorded.
            layers: names, or None.
            layout: head layout of all attention but quantdiff's own, or None for the known ones.

        Raises:
            RecordingError: no list of layers is found, or more than one.
            UsageError: a name that the model does not have, or an unknown layout.
        """
        try:
            self._given = None if layout is None else given_family(layout)
        except ValueError as error:
            raise UsageError(str(error)) from None
        self._model = model
        found = attention_modules(model)
        own = heads_modules(model)
        if not found and own and not layers:
            self.layers, _ = owning_list(model, [name for name, _ in own])
            self.attention: list[tuple[str, nn.Module]] = []
        elif not found:
            # Calls of attention functions are found while the model runs.
            self.layers = named_layers(model, layers) if layers else block_list(model)
            self.attention = []
        else:
            names = [name for name, _ in found]
            if layers:
                self.layers = named_layers(model, layers)
                kept = [name for name in names if layer_of(name, self.layers) is not None]
            else:
                self.layers, kept = owning_list(model, names)
            self.attention = [(name, module) for name, module in found if name in set(kept)]
        self.names = {module: name for name, module in self.attention}
        self.inside = {name for name, m in model.named_modules() if isinstance(m, Heads)}
        self.modules = dict(model.named_modules())
        self._families: dict[str, Family] = {}
        self._first: dict[
            str, tuple[StorageWeakRef, int, int]
        ] = {}  # where the queries of map 1 are in memory
        self._totals: dict[str, int] = {}  # query heads of modules with one call per map
        self.heads: list[tuple[str, Heads]] = []
        for name, heads in own:
            if layer_of(name, self.layers) is not None:
                self.heads.append((name, heads))
                self._families[name] = Family(str(heads.layout))
            elif not layers:
                raise RecordingError(
                    f"{name} attends outside of the layers {self.layers[0][0]} … "
                    f"{self.layers[-1][0]}; name the layers: record(model, layers=['…', …])"
                )
        self.layouts(name for name, _ in self.heads)
        self.dtypes: dict[str, torch.dtype] = {}  # of each attention module's queries
        self.bare = self._bare() if self.attention else []
        self.entrances = self._entrances(model)

    def family(self, name: str) -> Family:
        """How the attention module of this name computes its maps."""
        known = self._families.get(name)
        if known is None:
            module = self.modules.get(name, self._model)
            known = self._given or family_of(self._model, module)
            if known is None:
                known = STANDARD
                if calls_itself_differential(self._model, module):
                    self._warn(name, "fits no head layout that quantdiff knows")
            self._families[name] = known
        return known

    def owner(self, module: str) -> str:
        """The attention module that a bare call belongs to, given the module that is running.

        That is the innermost of this module and its parents that looks differential, or else this
        module: λ may be in a module whose child attends, once for each map.
        """
        parts = module.split(".")
        for end in range(len(parts), 0, -1):
            name = ".".join(parts[:end])
            if layer_of(name, self.layers) is None:
                break
            known = self.modules.get(name)
            if known is not None and (
                looks_differential(known) or family_of(nn.Module(), known) is not None
            ):
                return name
        return module

    def _bare(self) -> list[str]:
        """Modules in the layers, besides those of the dispatch, whose code calls attention."""
        taken = {name for name, _ in self.attention} | self.inside
        owners = tuple(f"{name}." for name, _ in self.heads)
        return [
            name
            for name, module in self.modules.items()
            if name not in taken
            and not f"{name}.".startswith(owners)
            and layer_of(name, self.layers) is not None
            and attends_itself(type(module))
        ]

    def part(self, name: str, turn: int, query: Tensor) -> HeadsOf | None:
        """Which heads a call computes, or None for all of the module's.

        Args:
            name: of the attention module.
            turn: number of attentions with other queries or keys earlier in this call of it.
            query: (B, H, N, D).

        Raises:
            RecordingError: more calls than its layout has, or heads that do not fit a map.
        """
        family, count = self.family(name), query.shape[1]
        if family.layout == "none":
            return None
        heads = layout(str(family.layout))
        calls = 2 if family.apart else 1
        if turn >= calls:
            raise RecordingError(
                f"{name} attends more than {calls} time{'s' * (calls > 1)} in one call, with other "
                f"queries or keys, where the head layout {heads} has {calls}; "
                "record(model, layout='none') records it as plain heads"
            )
        step = heads.ratio if turn and self._repeats(query, heads.ratio) else 1
        try:
            if not family.apart:
                heads.branches(count)
                return None
            groups, rest = divmod(count // step, 1 if turn else heads.ratio)
            if rest:
                raise ValueError(f"{count} heads are no groups of {heads.ratio} signal heads")
            total = groups * (heads.ratio + 1)
            if self._totals.setdefault(name, total) != total:
                raise ValueError(
                    f"its map 2 has {count} heads, which do not go with those of its map 1"
                )
        except ValueError as error:
            if turn:
                raise RecordingError(
                    f"{name} does not fit the head layout {heads}: {error}; "
                    "record(model, layout='none') records it as plain heads"
                ) from None
            self._families[name] = STANDARD
            self._warn(name, f"does not fit the head layout {heads} ({error})")
            return None
        self._check_order(name, turn, query, heads)
        kinds = heads.branches(total)
        which = tuple(head for head in range(total) if kinds[head] == turn + 1)
        return HeadsOf(turn + 1, which, total, step)

    def _check_order(self, name: str, turn: int, query: Tensor, heads: Layout) -> None:
        """Refuse two calls whose queries are views in another order than the layout's.

        In memory, the heads of a pair are one head apart, and heads of the same map two. If the
        queries were copied on the way, nothing can be checked.
        """
        storage = StorageWeakRef(query.untyped_storage())
        place, stride = query.storage_offset(), query.stride(1)
        if not turn:
            self._first[name] = storage, place, stride
        elif name in self._first and heads.name == "adjacent" and query.shape[1] > 1:
            other, before, step = self._first.pop(name)
            apart = place - before
            same = other == storage and not other.expired()
            if same and (apart <= 0 or (step, stride) != (2 * apart, 2 * apart)):
                raise RecordingError(
                    f"the queries of {name}'s two attention calls are not even and odd heads, as "
                    f"the head layout {heads} has them; record(model, layout='none') records them "
                    "as plain heads"
                )

    @staticmethod
    def _repeats(query: Tensor, ratio: int) -> bool:
        """Whether each noise head is repeated for the signal heads that share it."""
        if ratio == 1 or query.shape[1] % ratio:
            return False
        groups = query.unflatten(1, (-1, ratio))
        return bool((groups == groups[:, :, :1]).all())

    def _warn(self, name: str, why: str) -> None:
        warnings.warn(
            f"{name or type(self._model).__name__} ({type(self.modules.get(name)).__name__}) calls "
            f"itself differential but {why}: it is recorded as plain heads, without branches; "
            "record(model, layout='…') names a layout",
            UnknownLayoutWarning,
            stacklevel=2,
        )

    def layouts(self, sites: Iterable[str]) -> list[str]:
        """The head layout of every layer, from the attention modules seen in it.

        Raises:
            RecordingError: a layer holds attention of several layouts.
        """
        kinds: dict[int, set[str]] = {}
        for name in sites:
            layer = layer_of(name, self.layers)
            if layer is not None:
                kinds.setdefault(layer, set()).add(str(self.family(name).layout))
        for layer, several in kinds.items():
            if len(several) > 1:
                raise RecordingError(
                    f"layer {layer} holds attention of several head layouts "
                    f"({', '.join(sorted(several))}); their branches cannot be told apart"
                )
        return ["/".join(kinds.get(i, {""})) for i in range(len(self.layers))]

    def lam(self, name: str) -> float | None:
        """λ of an attention module if it is one number, else None."""
        module = self.modules.get(name)
        return None if module is None else lambda_of(module, self.dtypes.get(name, torch.float32))

    def lambdas(self, sites: Iterable[str]) -> list[float | None] | None:
        """λ of every layer, None where it is not a single number; None if no layer has one."""
        found: list[float | None] = [None] * len(self.layers)
        for name in sites:
            layer = layer_of(name, self.layers)
            if layer is not None and found[layer] is None and name in self.modules:
                found[layer] = self.lam(name)
        return None if all(value is None for value in found) else found

    def _entrances(self, model: nn.Module) -> list[nn.Module]:
        if not self.attention:
            return [model]
        from transformers import PreTrainedModel

        path = self.layers[0][0].split(".")
        found = [model]
        for name, module in model.named_modules():
            inside = name.split(".") == path[: len(name.split("."))]
            if module is not model and inside and isinstance(module, PreTrainedModel):
                found.append(module)
        return found


def refuse(model: nn.Module) -> None:
    """Refuse models that cannot be recorded correctly, before they run.

    Raises:
        RecordingError: a model under torch.compile, or an encoder-decoder.
    """
    for module in model.modules():
        optimized = type(module).__name__ == "OptimizedModule"
        if optimized or getattr(module, "_compiled_call_impl", None) is not None:
            raise RecordingError(
                "a model under torch.compile runs past the hooks; record and call the model itself "
                "(model._orig_mod)"
            )
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        raise RecordingError(
            f"{type(model).__name__} is an encoder-decoder; quantdiff records decoder-only models"
        )
