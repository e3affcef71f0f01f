"""What moves the last digits of results and is in no cell's id: processor, threads, batches.

Sums in another order are rounded otherwise, which under quantization may take a value at a rounding
boundary to its other side, and what follows moves with it.
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
    """What the record tells of a request.

    Args:
        devices: of the models.
        batch_size: sequences in one forward pass.

    Returns:
        `processors`: of a CPU the instructions that torch uses, of a GPU its name; `threads` on a
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
    """A sentence where earlier results were computed otherwise than those that are added.

    Args:
        requests: of the record; each a `command` and its `conditions`, or without where it was not
            recorded.
        now: `conditions`.
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
