"""What of a model is recorded: its layers, its attention modules, their head layouts."""

from collections.abc import Sequence

from torch import nn

from quantdiff.attention.heads import Heads
from quantdiff.errors import RecordingError
from quantdiff.hooks.dispatch import attention_modules
from quantdiff.hooks.layers import block_list, layer_of, named_layers, owning_list
from quantdiff.hooks.own import heads_modules
from quantdiff.models.families import lambda_of, layout_of

__all__ = ["Found", "refuse"]


class Found:
    """The modules of a model that the recorder stands at.

    Attributes:
        layers: names and modules whose outputs are the hidden states, in order.
        attention: modules that ask transformers' dispatch; of a model with towers, the decoder's.
        names: of these modules.
        heads: quantdiff's own attention, by the name of the module that it belongs to.
        inside: full names of all `Heads` modules.
        layouts: head layout of every layer.
        entrances: the modules through which a pass may begin: the model and the decoders inside.
    """

    def __init__(self, model: nn.Module, layers: Sequence[str] | None) -> None:
        """Look for them; `layers` are names, or None for the list that holds the attention.

        Raises:
            RecordingError: no list of layers is found, or more than one.
            UsageError: a name that the model does not have.
        """
        found = attention_modules(model)
        own = heads_modules(model)
        if not found and own and not layers:
            self.layers, _ = owning_list(model, [name for name, _ in own])
            self.attention: list[tuple[str, nn.Module]] = []
        elif not found:
            # Calls of scaled_dot_product_attention are looked for while the model runs.
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
        self.layouts = [layout_of(model)] * len(self.layers)
        self.heads: list[tuple[str, Heads]] = []
        kinds: dict[int, set[str]] = {}
        for name, heads in own:
            layer = layer_of(name, self.layers)
            if layer is None and not layers:
                raise RecordingError(
                    f"{name} attends outside of the layers {self.layers[0][0]} … "
                    f"{self.layers[-1][0]}; name the layers: record(model, layers=['…', …])"
                )
            if layer is not None:
                self.heads.append((name, heads))
                kinds.setdefault(layer, set()).add(str(heads.layout))
        for layer, several in kinds.items():
            if len(several) > 1:
                raise RecordingError(
                    f"layer {layer} holds attention of several head layouts "
                    f"({', '.join(sorted(several))}); their branches cannot be told apart"
                )
            (self.layouts[layer],) = several
        self.entrances = self._entrances(model)
        self._modules = dict(model.named_modules())

    @property
    def layout(self) -> str:
        """The head layout of all layers, or `mixed`."""
        return self.layouts[0] if len(set(self.layouts)) == 1 else "mixed"

    def lambdas(self) -> list[float | None] | None:
        """λ of every layer where it is one number a layer; None where no layer has such a one."""
        found: list[float | None] = [None] * len(self.layers)
        for name in [name for name, _ in self.attention] + [name for name, _ in self.heads]:
            layer = layer_of(name, self.layers)
            if layer is not None and found[layer] is None:
                found[layer] = lambda_of(self._modules[name])
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
    """Refuse models that cannot be recorded rightly, before they run.

    Raises:
        RecordingError: a model under torch.compile, or an encoder-decoder.
    """
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
