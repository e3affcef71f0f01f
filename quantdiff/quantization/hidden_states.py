"""The site `hidden_states`: the residual stream after each decoder layer."""

from typing import Any

from torch import Tensor, nn

from quantdiff.errors import QuantizationError
from quantdiff.hooks.found import Found
from quantdiff.hooks.passes import Pass
from quantdiff.hooks.runs import Runs
from quantdiff.quantization.chosen import Schemes
from quantdiff.quantization.rounding import real_tokens, rounded
from quantdiff.quantization.scheme import Scheme
from quantdiff.quantization.static import ends_of
from quantdiff.quantization.table import Table

__all__ = ["HiddenStates"]


class HiddenStates:
    """Rounds hidden states in hooks.

    A range spans one token (`token`) or all real tokens of a sequence (`tensor`), or comes from a
    calibration.
    """

    def __init__(self, found: Found, runs: Runs, schemes: Schemes, table: Table | None) -> None:
        self._runs = runs
        self._layers: list[tuple[str, nn.Module, Scheme]] = []
        for number, (name, layer) in enumerate(found.layers):
            scheme = schemes.of("hidden_states", number)
            if scheme is not None:
                self._layers.append((name, layer, scheme))
        self._ends = {
            name: ends_of(table, scheme, name) for name, _, scheme in self._layers if scheme.static
        }
        self._handles: list[Any] = []

    def begin(self) -> None:
        """Quantize from now on, until `end`."""
        for name, layer, scheme in self._layers:
            self._handles.append(layer.register_forward_hook(self._hook(name, scheme)))

    def end(self) -> None:
        """Restore the modules."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def check(self, now: Pass) -> None:
        """Refuse a pass in which a layer did not run.

        Raises:
            QuantizationError: names the first.
        """
        for name, _, _ in self._layers:
            if not now.fired[f"{name} (hidden)"]:
                raise QuantizationError(
                    f"the layer {name} did not run in a forward pass; it would not be quantized"
                )

    def _hook(self, name: str, scheme: Scheme) -> Any:
        def hook(module: nn.Module, args: Any, output: Any) -> Any:
            now = self._runs.current(name)
            now.fired[f"{name} (hidden)"] += 1
            hidden = output[0] if isinstance(output, tuple) else output
            over = (2,) if scheme.granularity == "token" else (1, 2)
            real = now.batch.real if over == (2,) else real_tokens(now, "hidden_states")
            if not isinstance(hidden, Tensor) or hidden.shape[:2] != real.shape:
                raise QuantizationError(f"{name} gives no tensor of (sequences, tokens, channels)")
            kept = None if over == (2,) else real.to(hidden.device)[..., None]
            found = rounded(hidden, over, scheme, name, kept, self._ends.get(name))
            return (found, *output[1:]) if isinstance(output, tuple) else found

        return hook
