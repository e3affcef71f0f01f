"""What a check returns, and where it runs."""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

__all__ = ["Check", "Found", "MissingPartError", "NotReachedError", "Place", "largest", "relative"]


class MissingPartError(Exception):
    """The machine lacks what the check needs; the message states what."""


class NotReachedError(Exception):
    """There is no time for the check; the message states why."""


@dataclass
class Found:
    """What one check found.

    Attributes:
        within: errors, each with the bound that it must keep.
        told: what is only reported.
    """

    within: dict[str, tuple[float, float]] = field(default_factory=dict)
    told: dict[str, Any] = field(default_factory=dict)

    @property
    def good(self) -> bool:
        """Whether every error keeps its bound; a NaN does not."""
        return all(error <= bound for error, bound in self.within.values())


@dataclass
class Place:
    """Where the checks run.

    Attributes:
        device: the GPU, or the CPU.
        small: sizes that a CPU computes in seconds.
        until: when the current part's time ends, in seconds of `time.monotonic`.
    """

    device: torch.device
    small: bool
    until: float = float("inf")

    @property
    def left(self) -> float:
        """Seconds left for the current part."""
        return self.until - time.monotonic()

    def wait(self) -> None:
        """Wait until the GPU has done its work."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()


Check = tuple[str, Callable[[], Found]]


def largest(errors: Iterable[Any]) -> float:
    """The largest number, or NaN if any is NaN, which `max` keeps only in the first place."""
    return float(np.max([float(error) for error in errors]))


def relative(found: torch.Tensor, exact: torch.Tensor) -> tuple[float, float]:
    """Largest error over the largest magnitude, and root mean square over root mean square."""
    found, exact = found.double().cpu(), exact.double().cpu()
    error = found - exact
    most = float(error.abs().max() / exact.abs().max())
    return most, float(error.square().mean().sqrt() / exact.square().mean().sqrt())
