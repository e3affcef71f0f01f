"""How evaluations run a model: padded batches, and logits only where they are wanted."""

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from quantdiff.analysis.evaluation.base import Stopped, quiet, unstopped
from quantdiff.calibration.running import model_device, places_to_keep
from quantdiff.errors import UsageError
from quantdiff.models import vocabulary_size

__all__ = ["Forward", "Wanted", "batched", "evaluating", "scaled", "target_nll"]

Item = TypeVar("Item")

_ELEMENTS = 1 << 21  # logits held in a wider dtype at a time


@dataclass(frozen=True)
class Wanted:
    """The logits of one pass, and which of them were asked for.

    Attributes:
        logits: (B, K, V), in the model's dtype; a sequence may want only some of the K positions.
        rows, columns: (R,) each, indices of the wanted ones into B and K, sequence by sequence.
    """

    logits: Tensor
    rows: Tensor
    columns: Tensor

    def blocks(self) -> Iterator[tuple[slice, Tensor]]:
        """Yield the wanted logits in order, some rows at a time: their places in R, and (r, V)."""
        step = max(1, _ELEMENTS // self.logits.shape[-1])
        for start in range(0, len(self.rows), step):
            part = slice(start, start + step)
            yield part, self.logits[self.rows[part], self.columns[part]]

    def at(self, places: Tensor) -> "Wanted":
        """Some of the wanted logits, by their places in R; a place may occur several times."""
        places = places.to(self.rows.device)
        return Wanted(self.logits, self.rows[places], self.columns[places])


class Forward:
    """A causal language model that takes token sequences of any lengths.

    Attributes:
        model: the model.
        padding_side: where the shorter sequences of a batch are padded.
    """

    def __init__(self, model: Any, tokenizer: Any) -> None:
        self.model = model
        self.padding_side: Literal["left", "right"] = "right"
        pad = getattr(tokenizer, "pad_token_id", None)
        # Masked positions may hold any id that has an embedding.
        self._pad = pad if isinstance(pad, int) and 0 <= pad < vocabulary_size(model) else 0
        self._known = inspect.signature(model.forward).parameters

    def __call__(self, sequences: Sequence[Tensor], spans: Sequence[tuple[int, int]]) -> Wanted:
        """One forward pass.

        Args:
            sequences: token ids, each (n,) int64 on the CPU.
            spans: for each sequence the first and one past the last position whose logits are
                wanted; the logits at a position are those of the token after it.
        """
        batch, longest = len(sequences), max(map(len, sequences))
        ids = torch.full((batch, longest), self._pad)  # (B, N)
        mask = torch.zeros_like(ids)  # (B, N)
        columns = []
        for row, (sequence, (first, last)) in enumerate(zip(sequences, spans, strict=True)):
            start = longest - len(sequence) if self.padding_side == "left" else 0
            ids[row, start : start + len(sequence)] = sequence
            mask[row, start : start + len(sequence)] = 1
            columns.append(torch.arange(start + first, start + last))
        rows = torch.repeat_interleave(torch.tensor([len(column) for column in columns]))  # (R,)
        wanted = torch.cat(columns)  # (R,)
        kept = wanted.unique()  # (K,)

        device = model_device(self.model)
        options: dict[str, Any] = {}
        if "use_cache" in self._known:
            options["use_cache"] = False
        places = places_to_keep(self.model, kept)
        if "logits_to_keep" in self._known and places is not None:
            options["logits_to_keep"] = places
        if self.padding_side == "left" and "position_ids" in self._known:
            options["position_ids"] = (mask.cumsum(1) - 1).clamp(min=0).to(device)
        logits = self.model(
            input_ids=ids.to(device), attention_mask=mask.to(device), **options
        ).logits  # (B, K or N, V)
        if logits.shape[1] == len(kept):
            wanted = torch.searchsorted(kept, wanted)
        elif logits.shape[1] != longest:
            raise UsageError(
                f"{type(self.model).__name__} gives logits of {logits.shape[1]} positions where "
                f"{len(kept)} of {longest} were asked for"
            )
        return Wanted(logits, rows.to(logits.device), wanted.to(logits.device))


def target_nll(wanted: Wanted, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Negative log-likelihoods of tokens, from a log-softmax in fp32.

    Over 50,000 tokens it is off by up to 1e-5 nats, and differently from one CPU to another.

    Args:
        wanted: logits, R rows.
        targets: the token that follows each row, (R,) int64.

    Returns:
        Nats, (R,) fp64, and whether the target has the largest logit, (R,) bool; on the CPU.
    """
    targets = targets.to(wanted.logits.device)
    nll = torch.empty(len(targets), dtype=torch.float64, device=targets.device)
    greedy = torch.empty(len(targets), dtype=torch.bool, device=targets.device)
    for part, logits in wanted.blocks():
        nll[part] = F.cross_entropy(logits.float(), targets[part], reduction="none").double()
        greedy[part] = logits.argmax(-1) == targets[part]
    return nll.cpu(), greedy.cpu()


@contextmanager
def evaluating(model: torch.nn.Module) -> Iterator[None]:
    """Disable gradients and dropout in the block; restore modules that were in training mode.

    Not inference mode: what a model keeps from a pass, such as rotary frequencies, could not be
    trained with afterwards.
    """
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module in training:
            module.training = True


def batched(
    items: Sequence[Item],
    batch_size: int,
    units: Callable[[Item], int],
    progress: Callable[[int], None] = quiet,
    stop: Callable[[], bool] = unstopped,
) -> Iterator[Sequence[Item]]:
    """Items in batches, with progress reported after each and `stop` called between them.

    Args:
        items: all of them.
        batch_size: items in a batch.
        units: of progress that an item stands for.
        progress: called with the units of each batch.
        stop: True ends the iteration before the next batch.

    Raises:
        UsageError: `batch_size` below 1.
        Stopped: `stop` returned True.
    """
    if batch_size < 1:
        raise UsageError(f"a batch of {batch_size} sequences is none: use at least 1")
    for start in range(0, len(items), batch_size):
        batch = items[start : start + batch_size]
        yield batch
        progress(sum(map(units, batch)))
        if start + batch_size < len(items) and stop():
            raise Stopped


def scaled(progress: Callable[[int], None], parts: int, units: int) -> Callable[[int], None]:
    """A progress function that is called for `parts` small things and reports `units` larger ones.

    Args:
        progress: called with `units` in total, once `parts` are done.
        parts: for example the choices of all questions.
        units: for example the questions.
    """
    done = told = 0

    def tell(more: int) -> None:
        nonlocal done, told
        done = min(done + more, parts)
        now = done * units // parts
        if now > told:
            progress(now - told)
            told = now

    return tell
