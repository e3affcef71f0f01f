"""The unquantized model's predictions: kept once, returned as logits batch by batch."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from quantdiff.analysis.evaluation.forward import Wanted
from quantdiff.errors import UsageError

__all__ = ["Reference"]

_CLOSE = 1e-6  # relative to the largest logit


class Reference:
    """Logits of the unquantized model at R positions.

    It keeps the inputs of the output embedding, which are about a hundred times smaller than the
    logits, and a copy of its weight. The logits are recomputed from them when needed, with the same
    shapes as in the model's own pass, so that for the same batch they are the same to the bit. The
    copy is used, not the module: a context that quantizes the weight or the module's input changes
    nothing here.

    Where the model does more after its output embedding, such as soft-capping, or has none with
    floating-point weights, the logits themselves are kept, in fp32 in a file without a name, which
    disappears with the process.

    Attributes:
        kept: `inputs` or `logits`; None before the first `add`.
    """

    def __init__(self, model: Any, folder: Path) -> None:
        self.kept: str | None = None
        self._head = _output_embedding(model)
        self._folder = folder
        self._entered: Tensor | None = None
        self._inputs: list[Tensor] = []
        self._file: IO[bytes] | None = None
        self._rows = self._vocabulary = 0

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch passes: those in this block can be added."""
        if self._head is None:
            yield
            return
        handle = self._head.register_forward_pre_hook(self._enter)
        try:
            yield
        finally:
            handle.remove()
            self._entered = None

    def _enter(self, _: nn.Module, args: tuple[Any, ...]) -> None:
        self._entered = args[0] if args and isinstance(args[0], Tensor) else None

    def add(self, wanted: Wanted) -> None:
        """Keep the wanted positions of the last pass.

        Raises:
            UsageError: the folder cannot hold the logits.
        """
        if self.kept is None:
            self._choose(wanted)
        self._rows += len(wanted.rows)
        if self.kept == "inputs":
            assert self._entered is not None
            # The head may be on another device than its input, and so may the logits.
            device = self._entered.device
            rows, columns = wanted.rows.to(device), wanted.columns.to(device)
            self._inputs.append(self._entered[rows, columns].cpu())
            return
        try:
            if self._file is None:
                self._file = tempfile.TemporaryFile(dir=self._folder)  # noqa: SIM115  (kept open)
            for _, logits in wanted.blocks():
                self._file.write(logits.float().cpu().numpy().tobytes())
            self._file.flush()
        except OSError as error:
            raise UsageError(
                f"the logits of the unquantized model cannot be kept in {self._folder} "
                f"({error.strerror or error}): {wanted.logits.shape[-1] * 4} bytes per token are "
                "needed there"
            ) from error

    def _choose(self, wanted: Wanted) -> None:
        self._vocabulary = wanted.logits.shape[-1]
        if self._head is not None:
            self._weight = self._head.weight.detach().clone()  # (V, d)
            bias = getattr(self._head, "bias", None)
            self._bias = bias.detach().clone() if isinstance(bias, Tensor) else None
            if self._gives(wanted.logits):
                self.kept = "inputs"
                return
            del self._weight
        self.kept = "logits"

    def _gives(self, logits: Tensor) -> bool:
        """Whether the output embedding alone maps its input to the model's logits."""
        entered = self._entered
        if entered is None or entered.shape[:2] != logits.shape[:2]:
            return False
        if entered.shape[-1] != self._weight.shape[1] or entered.dtype != self._weight.dtype:
            return False
        ours = F.linear(entered.to(self._weight.device), self._weight, self._bias)
        ours = ours.to(logits.device)
        if ours.shape != logits.shape or ours.dtype != logits.dtype:
            return False
        gap, size = (ours - logits).abs().max(), logits.abs().max()
        return bool(gap <= _CLOSE * size)

    def blocks(self, start: int, wanted: Wanted) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """Logits of a pass with those of the reference, some rows at a time.

        Args:
            start: index of the pass's first wanted position among all that were added.
            wanted: the pass.

        Returns:
            Iterator over places among the wanted ones, reference logits (r, V), logits (r, V).
        """
        if self._file is not None:
            kept: NDArray[np.float32] = np.memmap(
                self._file, dtype=np.float32, mode="r", shape=(self._rows, self._vocabulary)
            )
            for part, logits in wanted.blocks():
                rows = np.array(kept[start + part.start : start + part.start + len(logits)])
                yield part, torch.from_numpy(rows).to(logits.device), logits
            return
        inputs = torch.cat(self._inputs) if len(self._inputs) > 1 else self._inputs[0]  # (R, d)
        self._inputs = [inputs]
        entered = inputs.new_zeros(*wanted.logits.shape[:2], inputs.shape[1])  # (B, K, d)
        entered[wanted.rows.cpu(), wanted.columns.cpu()] = inputs[start : start + len(wanted.rows)]
        logits = F.linear(entered.to(self._weight.device), self._weight, self._bias)  # (B, K, V)
        theirs = Wanted(logits.to(wanted.logits.device), wanted.rows, wanted.columns)
        for (part, before), (_, now) in zip(theirs.blocks(), wanted.blocks(), strict=True):
            yield part, before, now


def _output_embedding(model: Any) -> Any:
    """The module that maps hidden states to logits, if it is a plain product with a weight."""
    find = getattr(model, "get_output_embeddings", None)
    head = None if find is None else find()
    weight = getattr(head, "weight", None)
    if not isinstance(weight, Tensor) or weight.device.type == "meta":
        return None
    return head if weight.dim() == 2 and weight.is_floating_point() else None
