"""What the machine has: the GPU, the libraries, the flash-attn packages."""

import platform
from importlib import metadata
from typing import Any

import torch

from gpu_checks.attention import flash_state
from gpu_checks.common import Check, Found, MissingPartError, Place
from quantdiff.attention import flash
from quantdiff.statistics import native

__all__ = ["machine_checks"]


def machine_checks(place: Place) -> list[Check]:
    """What the machine has."""
    return [("machine", lambda: _machine(place)), ("packages", _packages), *_flash()]


def _machine(place: Place) -> Found:
    told: dict[str, Any] = {"python": platform.python_version(), "system": platform.platform()}
    if place.device.type == "cuda":
        properties = torch.cuda.get_device_properties(place.device)
        told["gpu"] = properties.name
        told["capability"] = f"{properties.major}.{properties.minor}"
        told["memory"] = f"{properties.total_memory / 2**30:.0f} GiB"
        told["cuda"], told["cudnn"] = torch.version.cuda, torch.backends.cudnn.version()
        told["torch's flash kernel"] = torch.backends.cuda.is_flash_attention_available()
    else:
        told["cpu"] = torch.backends.cpu.get_cpu_capability()
        told["threads"] = torch.get_num_threads()
    return Found(told=told)


def _packages() -> Found:
    told: dict[str, Any] = {"compiled kernels": native.available()}
    for name in (
        "torch",
        "transformers",
        "numpy",
        "triton",
        "flash-attn",
        "flash-attn-4",
        "kernels",
    ):
        try:
            told[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            told[name] = "none"
    return Found(told=told)


def _flash() -> list[Check]:
    def state(kernel: flash.Kernel) -> Found:
        reason = flash_state(kernel)
        if reason is not None:
            raise MissingPartError(reason)
        return Found(told={"works": True})

    return [(kernel.name, lambda kernel=kernel: state(kernel)) for kernel in flash.KERNELS]
