"""What a model computes with that the versions recorded with every result do not cover."""

import ast
import hashlib
import inspect
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from contextlib import suppress
from importlib import metadata
from importlib.util import resolve_name
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import nn

__all__ = ["own_code", "quantizer_versions"]

_RECORDED = {"torch", "transformers", "quantdiff"}  # their versions are part of every cell's id
_LIBRARIES = {"site-packages", "dist-packages"}  # folders that packages are installed into

# Distribution, by the package that modules come from and by a config's `quant_method`, which is the
# only indication where the library works on modules of torch.
_QUANTIZERS = {
    "bitsandbytes": "bitsandbytes",
    "compressed_tensors": "compressed-tensors",
    "gptqmodel": "gptqmodel",
    "optimum": "optimum-quanto",
}
_METHODS = {"quanto": "optimum-quanto", "gptq": "gptqmodel"}  # other methods: the same name


def own_code(objects: Iterable[object]) -> list[str]:
    """SHA-256, as hex, of the files that define the classes of some objects.

    The files that these import are included. Only files that are part of no installed library
    count: modelling code that comes with a checkpoint, or a checkout. Of a script, or a notebook,
    only the methods of its classes count, as it changes with everything done with the model.

    Args:
        objects: modules and a tokenizer.

    Returns:
        Sorted, so that the location of the files does not matter; empty if all is installed.
    """
    classes = _classes(objects)
    names = {one.__module__ for one in classes} & sys.modules.keys()
    found = {
        hashlib.sha256(Path(str(module.__file__)).read_bytes()).hexdigest()
        for module in _reached(sys.modules[name] for name in names)
    }
    found |= {_methods(one) for one in classes if one.__module__ == "__main__"}
    return sorted(found)


def quantizer_versions(model: nn.Module) -> dict[str, str]:
    """Versions of the libraries that compute with a quantized checkpoint, by distribution."""
    roots = {one.__module__.partition(".")[0] for one in _classes(model.modules())}
    wanted = {_QUANTIZERS[root] for root in roots & _QUANTIZERS.keys()}
    config: Any = getattr(model, "config", None)
    settings = config.to_dict().get("quantization_config") if config is not None else None
    method = (settings or {}).get("quant_method")
    if method is not None:
        name = str(getattr(method, "value", method))
        wanted.add(_METHODS.get(name, name))
    versions = {}
    for name in sorted(wanted):
        with suppress(metadata.PackageNotFoundError):  # transformers implements some methods itself
            versions[name] = metadata.version(name)
    return versions


def _classes(objects: Iterable[object]) -> set[type]:
    return {one for kind in set(map(type, objects)) for one in kind.__mro__}


def _reached(modules: Iterable[ModuleType]) -> list[ModuleType]:
    """The modules that are part of no library, and such modules among their imports."""
    found: dict[str, ModuleType] = {}
    left = list(modules)
    while left:
        module = left.pop()
        if module.__name__ in found or not _is_own(module):
            continue
        found[module.__name__] = module
        left += [sys.modules[name] for name in _imported(module) if name in sys.modules]
    return list(found.values())


def _imported(module: ModuleType) -> Iterator[str]:
    """Names of the modules that a module's source imports when it is loaded.

    Not taken from its attributes: those of a package include every submodule imported anywhere.
    """
    try:
        left: list[ast.AST] = [ast.parse(Path(str(module.__file__)).read_bytes())]
    except (SyntaxError, ValueError):  # compiled
        return
    while left:
        node = left.pop()
        if isinstance(node, ast.Import):
            for alias in node.names:
                parts = alias.name.split(".")
                yield from (".".join(parts[:end]) for end in range(1, len(parts) + 1))
        elif isinstance(node, ast.ImportFrom):
            with suppress(ImportError):  # caught there too, or the module would not be loaded
                source = resolve_name("." * node.level + (node.module or ""), module.__package__)
                for alias in node.names:
                    name = f"{source}.{alias.name}"
                    bound = getattr(sys.modules.get(source), alias.name, None)
                    yield name if name in sys.modules and sys.modules[name] is bound else source
        # What a function imports is loaded once it has run, which must not matter.
        elif not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            left += ast.iter_child_nodes(node)


def _is_own(module: ModuleType) -> bool:
    file = getattr(module, "__file__", None)
    if file is None or module.__name__.partition(".")[0] in {*_RECORDED, "__main__"}:
        return False
    path = Path(file)
    standard = path.is_relative_to(sysconfig.get_path("stdlib"))
    return path.is_file() and not standard and not _LIBRARIES & set(path.parts)


def _methods(one: type) -> str:
    """SHA-256, as hex, of those methods of a class whose source is available."""
    digest = hashlib.sha256(one.__qualname__.encode())
    for _, value in sorted(vars(one).items()):
        if inspect.isfunction(value):
            with suppress(OSError):
                digest.update(inspect.getsource(value).encode())
    return digest.hexdigest()
