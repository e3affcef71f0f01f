"""Validation of what a user may choose when loading: device, dtype, attention implementation."""

import os
import shutil
from importlib import metadata

import torch

from quantdiff.errors import MissingExtraError, UsageError

__all__ = ["check_attention", "check_flash_dtype", "resolve_device", "resolve_dtype"]

DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float64": torch.float64,
}

# Flash implementation -> distribution that provides it, command that installs it. transformers
# checks the distribution too: flash-attn and flash-attn-4 share the import name flash_attn.
FLASH = {
    "flash_attention_2": ("flash-attn", "pip install flash-attn --no-build-isolation"),
    "flash_attention_3": (
        "flash-attn-3",
        "pip install 'git+https://github.com/Dao-AILab/flash-attention.git#subdirectory=hopper'",
    ),
    "flash_attention_4": ("flash-attn-4", "pip install flash-attn-4"),
}
ATTENTION = ("eager", "sdpa", "flex_attention", *FLASH)


def resolve_device(device: str | torch.device | None) -> torch.device:
    """The device to load on; by default the current CUDA device if there is one, else the CPU.

    Raises:
        UsageError: neither a CPU nor a CUDA device, or a CUDA device that is not there.
    """
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        target = torch.device(device)
    except RuntimeError as error:
        raise UsageError(f"device {device!r} is unknown: use cpu, cuda or cuda:N") from error
    if target.type not in ("cpu", "cuda"):
        raise UsageError(f"device {str(device)!r} is not supported: use cpu, cuda or cuda:N")
    if target.type == "cpu":
        return target
    if not torch.cuda.is_available():
        raise UsageError(
            f"device {str(device)!r} was asked for, but torch {torch.__version__} sees no CUDA "
            f"device here: use device cpu, or install a CUDA build of torch"
        )
    # With its index, so that it can be compared with the device of a tensor.
    index = torch.cuda.current_device() if target.index is None else target.index
    if index >= torch.cuda.device_count():
        raise UsageError(
            f"device {str(device)!r} does not exist: torch sees {torch.cuda.device_count()} CUDA "
            f"device(s), counted from 0"
        )
    return torch.device("cuda", index)


def resolve_dtype(dtype: str | torch.dtype | None, device: torch.device) -> torch.dtype | str:
    """The dtype to load in, or "auto" for the checkpoint's own.

    Args:
        dtype: None is "auto" on a GPU and float32 on a CPU.
        device: where the model goes.

    Raises:
        UsageError: an unknown dtype.
    """
    if dtype is None:
        return "auto" if device.type == "cuda" else torch.float32
    if isinstance(dtype, str) and dtype == "auto":
        return dtype
    if isinstance(dtype, str) and dtype in DTYPES:
        return DTYPES[dtype]
    if dtype in DTYPES.values():
        return dtype
    raise UsageError(f"dtype {str(dtype)!r} is unknown: use one of {', '.join(DTYPES)}, auto")


def check_attention(attention: str | None, device: torch.device) -> None:
    """Refuse an attention implementation that cannot work here, before anything is loaded.

    Args:
        attention: None is the model's default.
        device: where the model goes.

    Raises:
        UsageError: unknown name, a flash implementation without a CUDA device, or flex attention
            on a CPU without a C++ compiler.
        MissingExtraError: a flash implementation whose package is not installed.
    """
    if attention is not None and attention not in ATTENTION:
        raise UsageError(
            f"attention {attention!r} is unknown: use one of {', '.join(ATTENTION)}, or leave it "
            f"out for the model's default"
        )
    if attention == "flex_attention" and device.type == "cpu" and not _has_cpp_compiler():
        raise UsageError(
            "attention 'flex_attention' is compiled on a CPU and no C++ compiler was found: "
            "install g++ (or set CXX), or use sdpa"
        )
    if attention not in FLASH:
        return
    distribution, command = FLASH[attention]
    try:
        metadata.version(distribution)
    except metadata.PackageNotFoundError as error:
        raise MissingExtraError(
            f"attention {attention!r} needs the package {distribution}, which is not installed: "
            f"{command}"
        ) from error
    if device.type != "cuda":
        raise UsageError(f"attention {attention!r} runs on CUDA devices only: use sdpa on the CPU")


def _has_cpp_compiler() -> bool:
    return any(map(shutil.which, filter(None, (os.environ.get("CXX"), "g++", "clang++", "c++"))))


def check_flash_dtype(attention: str | None, dtype: torch.dtype | str | None) -> None:
    """Refuse a dtype that flash kernels do not support.

    Raises:
        UsageError: flash attention with something other than float16 or bfloat16.
    """
    if attention in FLASH and dtype in (torch.float32, torch.float64):
        raise UsageError(
            f"attention {attention!r} computes in float16 and bfloat16 only, not in "
            f"{str(dtype).removeprefix('torch.')}: pass dtype='bfloat16'"
        )
