"""`quantdiff models`: what can be opened by name, and the head layouts that are known."""

import json

from quantdiff.cli import common

EPILOG = """
Examples:

  quantdiff models

  quantdiff models --json
"""


@common.app.command(epilog=EPILOG)
def models(as_json: common.Json = False) -> None:
    """List the models that have a name, and the families of differential attention."""
    from quantdiff.models import known_names
    from quantdiff.models.families import FAMILIES, MODULES

    names = list(known_names())
    families = {
        "model type": {name: _layout(family) for name, family in FAMILIES.items()},
        "attention module": {name: _layout(family) for name, family in MODULES.items()},
    }
    if as_json:
        print(json.dumps({"names": names, "families": families}, ensure_ascii=False))
        return
    from rich.console import Console
    from rich.table import Table

    console = Console()
    console.print("by name: " + ", ".join(names), markup=False)
    console.print(
        "anything else: a hub id, a folder, or a .gguf file; attention that is not listed has "
        "standard heads",
        markup=False,
    )
    table = Table("known by its", "name", "head layout (docs/layouts.md)", box=None, pad_edge=False)
    for kind, known in families.items():
        for name, layout in known.items():
            table.add_row(kind, name, layout)
    console.print(table)


def _layout(family: object) -> str:
    layout = getattr(family, "layout", "none")
    return layout if isinstance(layout, str) else "by its config"
