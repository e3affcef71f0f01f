"""What changes the last digits of results but is in no cell's id: processor, threads, batches.

Sums in a different order round differently, which under quantization may move a value across a
rounding boundary, and with it everything computed from it.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

__all__ = ["conditions", "elsewhere"]

_MOVES = (
    "without quantization, in fp32, they agree to 1e-5, and with it a value at a rounding boundary "
    "may go to the other side"
)


def conditions(devices: Iterable[torch.device], batch_size: int) -> dict[str, Any]:
    """What is recorded about a request.

    Args:
        devices: those of the models.
        batch_size: sequences per forward pass.

    Returns:
        `processors`: for a CPU the instructions that torch uses, for a GPU its name; `threads` on a
        CPU, None without one; `batch_size`.
    """
    found = set(devices)
    on_cpu = any(device.type == "cpu" for device in found)
    return {
        "processors": sorted(map(_processor, found)),
        "threads": torch.get_num_threads() if on_cpu else None,
        "batch_size": batch_size,
    }


def elsewhere(requests: Sequence[Mapping[str, Any]], now: Mapping[str, Any]) -> str | None:
    """A sentence if earlier results were computed under other conditions than those being added.

    Args:
        requests: from the record; each has a `command` and, if they were recorded, its
            `conditions`.
        now: the current `conditions`.
    """
    others = [told for told in dict.fromkeys(map(_told, requests)) if told != _told(now)]
    if not others:
        return None
    return f"earlier results are from {'; '.join(others)}, and new ones from {_told(now)}: {_MOVES}"


def _processor(device: torch.device) -> str:
    if device.type == "cpu":
        return f"CPU with {torch.backends.cpu.get_cpu_capability()}"
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def _told(one: Mapping[str, Any]) -> str:
    if "processors" not in one:
        return "a machine that was not recorded"
    threads = "" if one["threads"] is None else f", threads: {one['threads']}"
    return f"{' and '.join(one['processors'])}{threads}, batch size: {one['batch_size']}"
