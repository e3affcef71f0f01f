"""Log-likelihoods of continuations, and of the choices of questions."""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from quantdiff.analysis.evaluation.base import quiet, unstopped
from quantdiff.analysis.evaluation.estimates import check_finite
from quantdiff.analysis.evaluation.forward import Forward, batched, scaled, target_nll
from quantdiff.analysis.evaluation.pairs import Pair

__all__ = ["best", "log_likelihoods", "score_choices"]


def log_likelihoods(
    forward: Forward,
    pairs: Sequence[Pair],
    *,
    batch_size: int,
    progress: Callable[[int], None] = quiet,
    stop: Callable[[], bool] = unstopped,
) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """Summed log-likelihood of each continuation, and whether all of its tokens are the likeliest.

    The longest come first, so that a batch that does not fit into memory fails at once. Pairs
    with the same input, such as answers A, B and C to one question, share a row.

    Args:
        forward: the model.
        pairs: R of them.
        batch_size: sequences in one forward pass.
        progress: called with the number of pairs done.
        stop: called between passes.

    Returns:
        Nats, (R,) fp64, and (R,) bool, in the order of the pairs. Values may be non-finite.

    Raises:
        Stopped: `stop` returned True.
    """
    rows: dict[tuple[int, ...], list[int]] = {}
    for number, pair in enumerate(pairs):
        rows.setdefault(pair.inputs, []).append(number)
    work = sorted(rows.items(), key=lambda row: len(row[0]), reverse=True)
    sums = np.empty(len(pairs))
    greedy = np.empty(len(pairs), dtype=np.bool_)
    for batch in batched(work, batch_size, lambda row: len(row[1]), progress, stop):
        sequences = [torch.tensor(inputs) for inputs, _ in batch]
        lengths = [[len(pairs[number].continuation) for number in row] for _, row in batch]
        starts = [len(s) - max(each) for s, each in zip(sequences, lengths, strict=True)]
        wanted = forward(sequences, list(zip(starts, map(len, sequences), strict=True)))
        # The logits of a pair are at the end of those of its row.
        ends = np.cumsum([max(each) for each in lengths])
        numbers = [number for _, row in batch for number in row]
        places = [
            torch.arange(end - length, end)
            for end, each in zip(ends, lengths, strict=True)
            for length in each
        ]
        targets = torch.tensor([t for number in numbers for t in pairs[number].continuation])
        nll, likeliest = target_nll(wanted.at(torch.cat(places)), targets)
        split = [len(place) for place in places]
        sums[numbers] = [-float(part.sum()) for part in nll.split(split)]
        greedy[numbers] = [bool(part.all()) for part in likeliest.split(split)]
    return sums, greedy


def score_choices(
    forward: Forward,
    questions: Sequence[Sequence[Pair]],
    *,
    batch_size: int,
    progress: Callable[[int], None] = quiet,
    stop: Callable[[], bool] = unstopped,
) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """Log-likelihoods of all choices of Q questions.

    Args:
        forward: the model.
        questions: each one's choices as pairs, at most C of them.
        batch_size, stop: as in `log_likelihoods`.
        progress: called with the number of questions done.

    Returns:
        Nats, (Q, C) fp64, NaN where a question has no such choice; and whether the choice is what
        greedy decoding gives, (Q, C) bool.

    Raises:
        Stopped: `stop` returned True.
        QuantizationError: a log-likelihood is not finite.
    """
    counts = [len(question) for question in questions]
    flat = [pair for question in questions for pair in question]
    tell = scaled(progress, len(flat), len(questions))
    sums, greedy = log_likelihoods(forward, flat, batch_size=batch_size, progress=tell, stop=stop)
    scores = np.full((len(questions), max(counts)), np.nan)
    exact = np.zeros(scores.shape, dtype=np.bool_)
    there = np.arange(max(counts)) < np.array(counts)[:, None]  # (Q, C)
    scores[there], exact[there] = sums, greedy
    check_finite(np.where(there, scores, 0), "a log-likelihood", "question")
    return scores, exact


def best(scores: NDArray[np.float64]) -> NDArray[np.int64]:
    """The choice with the largest score, (Q,); the first of equals, as numpy's argmax."""
    return np.nanargmax(scores, axis=1)
