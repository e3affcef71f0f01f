"""`quantdiff models`: what can be opened by name, and the known head layouts."""

import json

from quantdiff.cli import common

EPILOG = """
Examples:

  quantdiff models

  quantdiff models --json
"""


@common.app.command(epilog=EPILOG)
def models(as_json: common.Json = False) -> None:
    """List the models that have a name, and the families of differential attention.

    Losses of the zoo are in nats per token, on the shipped held-out text.
    """
    from quantdiff.models import known_names
    from quantdiff.models.families import FAMILIES, MODULES
    from quantdiff.models.zoo import shipped

    names = list(known_names())
    families = {
        "model type": {name: _layout(family) for name, family in FAMILIES.items()},
        "attention module": {name: _layout(family) for name, family in MODULES.items()},
    }
    if as_json:
        told = {"names": names, "zoo": shipped(), "families": families}
        print(json.dumps(told, ensure_ascii=False))
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
    if shipped():
        zoo = Table("zoo", box=None, pad_edge=False)
        for head in ("parameters", "tokens seen", "held-out loss", "bigram", "trained"):
            zoo.add_column(head, justify="right")
        for name, about in shipped().items():
            loss = f"{about['held_out_loss']:.4f} ± {about['held_out_stderr']:.4f}"
            numbers = f"{about['parameters']:,}", f"{about['tokens']:,}", loss
            zoo.add_row(name, *numbers, f"{about['bigram_loss']:.4f}", about["finished"])
        console.print(zoo)
    table = Table("known by its", "name", "head layout (docs/layouts.md)", box=None, pad_edge=False)
    for kind, known in families.items():
        for name, layout in known.items():
            table.add_row(kind, name, layout)
    console.print(table)


def _layout(family: object) -> str:
    layout = getattr(family, "layout", "none")
    return layout if isinstance(layout, str) else "by its config"
