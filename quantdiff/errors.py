"""Errors that a user can fix: one sentence that names the problem and the remedy."""

__all__ = [
    "CutWarning",
    "LeftAloneWarning",
    "MissingExtraError",
    "QuantizationError",
    "RecordingError",
    "SchemesLeftOutWarning",
    "UnknownLayoutWarning",
    "UsageError",
    "VerificationError",
    "require",
]

import importlib
from types import ModuleType


class UsageError(ValueError):
    """A request that cannot be met as asked; the command line prints it and exits with code 2."""


class MissingExtraError(UsageError, ImportError):
    """An optional dependency is not installed; the message holds the pip command."""


class RecordingError(UsageError):
    """A model, or a call of it, that cannot be recorded correctly and is therefore refused."""


class QuantizationError(UsageError):
    """A model, or a call of it, that cannot be quantized as asked and is refused."""


class VerificationError(RuntimeError):
    """A checkpoint is not what was measured; the command line prints it and exits with code 1."""


class CutWarning(UserWarning):
    """An evaluation asked for more than fits into the model's context."""


class UnknownLayoutWarning(UserWarning):
    """The head layout or the λ of a differential model is not known."""


class LeftAloneWarning(UserWarning):
    """A layer holds weights that no linear module computes with; they are left unchanged."""


class SchemesLeftOutWarning(UserWarning):
    """A checkpoint measured with quantized activations is opened without quantizing them."""


def require(module: str, extra: str, purpose: str) -> ModuleType:
    """Import an optional dependency.

    Args:
        module: import name, for example `datasets`.
        extra: the extra of quantdiff that provides it, for example `eval`.
        purpose: what it is needed for, worded to follow "to".

    Raises:
        MissingExtraError: it is not installed.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise MissingExtraError(
            f"{module} is needed to {purpose} and is not installed: "
            f"pip install 'quantdiff[{extra}]'"
        ) from error
