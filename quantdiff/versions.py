"""The versions that a number depends on."""

from importlib.metadata import PackageNotFoundError, version

__all__ = ["VERSION", "versions"]

VERSION = "0.1.0"


def versions() -> dict[str, str]:
    """Versions of quantdiff and of the libraries that compute, as written into every result."""
    found = {"quantdiff": VERSION}
    for name in ("torch", "transformers", "numpy"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:  # a build that carries no metadata
            found[name] = "unknown"
    return found
