"""Where the decoder layers are: the repeated block list that holds the attention modules."""

from collections.abc import Sequence

from torch import nn

from quantdiff.errors import RecordingError

__all__ = ["decoder_layers"]


def decoder_layers(
    model: nn.Module, attention: Sequence[str]
) -> tuple[list[tuple[str, nn.Module]], list[int]]:
    """The layers whose outputs form the residual stream, and each attention module's layer.

    Args:
        model: any model.
        attention: names of its attention modules.

    Returns:
        Names and modules of the layers in order; for each attention module its layer's index.

    Raises:
        RecordingError: no block list, or more than one, holds the attention modules.
    """
    lists = {name: m for name, m in model.named_modules() if isinstance(m, nn.ModuleList)}
    owners = []
    for site in attention:
        parts = site.split(".")
        prefixes = [".".join(parts[:i]) for i in range(1, len(parts))]
        owner = next((prefix for prefix in prefixes if prefix in lists), None)
        if owner is None:
            raise RecordingError(f"the attention module {site} stands in no list of layers")
        owners.append(owner)
    if len(set(owners)) != 1:
        found = ", ".join(sorted(set(owners)))
        raise RecordingError(
            f"attention modules stand in more than one list of layers ({found}); "
            "quantdiff records decoder-only models"
        )
    owner = owners[0]
    layers = [(f"{owner}.{i}", layer) for i, layer in enumerate(lists[owner])]
    at = len(owner) + 1
    return layers, [int(site[at:].split(".")[0]) for site in attention]
