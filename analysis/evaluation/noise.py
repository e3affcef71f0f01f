"""Signal to quantization noise, site by site: where errors arise and where they cancel."""

import contextlib
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quantdiff.analysis.evaluation.base import Evaluation, Metric, Outcome, Text, quiet, unstopped
from quantdiff.analysis.evaluation.estimates import check_finite
from quantdiff.analysis.evaluation.forward import Forward, batched, evaluating
from quantdiff.analysis.evaluation.windows import (
    evaluation_windows,
    no_argument,
    scored,
    window_settings,
)
from quantdiff.calibration.text import TextWindows
from quantdiff.hooks.found import Found
from quantdiff.quantization import FakeQuantizer
from quantdiff.quantization.noise import Energies, NoiseRecorder, decibels

__all__ = ["COSTS", "NOISELESS", "Noise", "build"]

COSTS: dict[str, int] = {}  # an average over unlike sites ranks nothing

MOST = 4096  # tokens: signal and noise are sums, which settle long before a perplexity does
NOISELESS = 200.0  # dB, stands for no noise at all
_KINDS = ("logits", "softmax", "branch 1", "branch 2", "difference")


@dataclass
class Noise(Evaluation):
    """`noise`: signal to quantization noise in dB, 10·log10(Σ plain² / Σ (quantized − plain)²).

    Metrics, each the mean over layers, `count` the number of layers:

    - `snr_logits`, and `snr_softmax` of standard heads or `snr_branch_1`, `snr_branch_2` and
      `snr_difference` of differential ones: of each layer's own rounding, given the queries and
      keys that it receives (`quantdiff.quantization.noise`), over all attention modules of a layer
      together; only where the logits of all layers and heads are quantized and keys are not.
    - `cancellation`: the difference's noise over that of independent errors of its two maps
      (noise 1 + λ²·noise 2); below 1 the subtraction cancels errors, above 1 it adds them up.
    - `snr_hidden`: of the layers' outputs against those of the unquantized model, so it includes
      all earlier noise. It is the main metric, and the only one of a scheme for other sites.

    A layer without any noise counts as 200 dB. Items: each of these per layer, (L,), in dB or as
    a ratio; NaN where a layer has none.

    Attributes:
        forward: the model.
        windows: the text, at most 4,096 tokens of it.
    """

    forward: Forward
    windows: TextWindows
    name: str
    data: str
    settings: dict[str, Any]
    total: int
    unit: str = "tokens"
    _layers: list[Any] = field(default_factory=list)
    _file: IO[bytes] | None = None

    def prepare(
        self,
        folder: Path,
        *,
        batch_size: int,
        progress: Callable[[int], None] = quiet,
        stop: Callable[[], bool] = unstopped,
    ) -> None:
        """See `Evaluation.prepare`."""
        self._layers = [module for _, module in Found(self.forward.model, None).layers]
        # Without a name, so that it disappears with the process.
        self._file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115
        with evaluating(self.forward.model):
            for hidden in self._hidden(batch_size, progress, stop):
                self._file.write(hidden.tobytes())

    def run(
        self,
        context: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext,
        *,
        batch_size: int,
        progress: Callable[[int], None] = quiet,
        stop: Callable[[], bool] = unstopped,
    ) -> Outcome:
        """See `Evaluation.run`.

        Raises:
            RuntimeError: `prepare` was not called before.
        """
        if self._file is None:
            raise RuntimeError("signal and noise need prepare() before run()")
        self._file.seek(0)
        quantizer = context()
        recorder: Any = contextlib.nullcontext()
        if isinstance(quantizer, FakeQuantizer):
            scheme = quantizer.schemes.of("attention_logits")
            # A recording sees keys before rounding, whose logits are not the quantized ones.
            plain_keys = quantizer.schemes.of("keys") is None
            if scheme is not None and scheme.layers is scheme.heads is None and plain_keys:
                recorder = NoiseRecorder(self.forward.model, scheme, quantizer.table)
        energies = np.zeros((2, len(self._layers)))
        with evaluating(self.forward.model), quantizer, recorder:
            for hidden in self._hidden(batch_size, progress, stop):
                plain = np.frombuffer(self._file.read(hidden.nbytes), np.float32)
                plain = plain.reshape(hidden.shape).astype(np.float64)
                energies[0] += np.square(plain).sum((1, 2))
                energies[1] += np.square(hidden - plain).sum((1, 2))
        check_finite(energies[1], "the noise of the hidden states", "layer")
        items = {"snr_hidden": np.array([_decibels(s, n) for s, n in energies.T])}
        if isinstance(recorder, NoiseRecorder):
            items |= _by_layer(recorder.sites(), len(self._layers))
        metrics = tuple(
            Metric(name, float(np.nanmean(values)), None, int((~np.isnan(values)).sum()))
            for name, values in items.items()
        )
        return Outcome(metrics, items)

    def _hidden(
        self, batch_size: int, progress: Callable[[int], None], stop: Callable[[], bool]
    ) -> Iterator[NDArray[np.float32]]:
        """The outputs of all layers without padding, window by window, (L, tokens, channels)."""
        for batch in batched(self.windows.windows, batch_size, len, progress, stop):
            with _caught(self._layers) as outputs:
                self.forward(batch, [scored(window) for window in batch])
            layers = [x.float().cpu() for x in outputs]  # (B, N, channels) each
            longest = max(map(len, batch))
            for row, window in enumerate(batch):
                start = longest - len(window) if self.forward.padding_side == "left" else 0
                real = slice(start, start + len(window))
                yield torch.stack([x[row, real] for x in layers]).numpy()


@contextmanager
def _caught(layers: list[Any]) -> Iterator[list[Tensor]]:
    """Catch the outputs of these modules, in the order in which they run."""
    outputs: list[Tensor] = []

    def keep(module: Any, args: Any, output: Any) -> None:
        outputs.append(output[0] if isinstance(output, tuple) else output)

    handles = [layer.register_forward_hook(keep) for layer in layers]
    try:
        yield outputs
    finally:
        for handle in handles:
            handle.remove()


def _by_layer(sites: list[Energies], layers: int) -> dict[str, NDArray[np.float64]]:
    """Ratios of the energies of all attention modules of a layer together."""
    energies: dict[str, dict[int, Any]] = {}  # kind -> layer -> numerator, denominator
    for site in sites:
        of_site = {kind: (site.signal[kind], site.noise[kind]) for kind in site.noise}
        if site.independent is not None:
            of_site["cancellation"] = site.noise["difference"], site.independent
        for kind, both in of_site.items():
            of_kind = energies.setdefault(kind, {})
            more = np.array([part.sum() for part in both])
            of_kind[site.layer] = of_kind.get(site.layer, 0.0) + more
    ratios = {
        f"snr_{kind.replace(' ', '_')}": {
            layer: _decibels(signal, noise) for layer, (signal, noise) in energies[kind].items()
        }
        for kind in _KINDS
        if kind in energies
    }
    shares = energies.get("cancellation", {}).items()
    ratios["cancellation"] = {layer: noise / alone for layer, (noise, alone) in shares if alone}
    return {
        name: np.array([of_layers.get(layer, np.nan) for layer in range(layers)])
        for name, of_layers in ratios.items()
        if of_layers
    }


def _decibels(signal: float, noise: float) -> float:
    return min(decibels(signal / noise), NOISELESS) if noise else NOISELESS


def build(name: str, argument: str, model: Any, tokenizer: Any, text: Text) -> Noise:
    """Make `noise` for a model.

    Raises:
        UsageError: an argument is given, or the text does not fit the model.
    """
    no_argument(name, argument)
    text = Text(text.source, min(text.tokens, MOST), text.seq_len)
    windows = evaluation_windows(model, tokenizer, text)
    return Noise(
        forward=Forward(model, tokenizer),
        windows=windows,
        name=name,
        data=windows.fingerprint,
        settings={"version": 2, "unit": "dB", "most": MOST} | window_settings(windows),
        total=windows.tokens,
    )
