"""Public names that are imported on first use, so that importing stays quick."""

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

__all__ = ["lazy_names"]


def lazy_names(
    package: str, homes: Mapping[str, str]
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """A package's `__getattr__` and `__dir__`.

    Args:
        package: its name.
        homes: public name → module that defines it, within the package or by its full name.
    """

    def get(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        home = homes[name]
        return getattr(import_module(home if "." in home else f"{package}.{home}"), name)

    return get, lambda: sorted(homes)
