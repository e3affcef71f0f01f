"""The versions that a number depends on."""

from importlib.metadata import PackageNotFoundError, version

__all__ = ["VERSION", "versions"]

VERSION = "0.1.0"


def versions() -> dict[str, str]:
    """Versions of quantdiff and the libraries it computes with, as written into every result."""
    found = {"quantdiff": VERSION}
    for name in ("torch", "transformers", "numpy"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:  # a build without metadata
            found[name] = "unknown"
    return found
