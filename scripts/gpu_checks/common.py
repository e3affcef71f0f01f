"""What a check gives back, and where it runs."""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

__all__ = ["Check", "Found", "MissingPartError", "NotReachedError", "Place", "largest", "relative"]


class MissingPartError(Exception):
    """The machine lacks what the check is about; the message says what."""


class NotReachedError(Exception):
    """There is no time for it; the message says why."""


@dataclass
class Found:
    """What one check found.

    Attributes:
        within: errors with the bound that each of them must keep.
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
        until: the end of the time of the part under way, in seconds of `time.monotonic`.
    """

    device: torch.device
    small: bool
    until: float = float("inf")

    @property
    def left(self) -> float:
        """Seconds left to the part under way."""
        return self.until - time.monotonic()

    def wait(self) -> None:
        """Until the GPU has done what it was told."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()


Check = tuple[str, Callable[[], Found]]


def largest(errors: Iterable[Any]) -> float:
    """The largest of some numbers, or NaN where one is: `max` keeps it in the first place alone."""
    return float(np.max([float(error) for error in errors]))


def relative(found: torch.Tensor, exact: torch.Tensor) -> tuple[float, float]:
    """Largest error over the largest magnitude, and root mean square over root mean square."""
    found, exact = found.double().cpu(), exact.double().cpu()
    error = found - exact
    most = float(error.abs().max() / exact.abs().max())
    return most, float(error.square().mean().sqrt() / exact.square().mean().sqrt())
