"""Loads an exported folder in its own process; arguments: FOLDER OUT DEVICE THREADS.

OUT receives the logits of the folder's passage: `logits` from the format's own loader, and
`quantized_logits` from `quantdiff.load`, with the schemes. See `quantdiff.export.verifying`.
"""

import gc
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file

from quantdiff.errors import UsageError
from quantdiff.export.formats import find_format
from quantdiff.export.loading import load
from quantdiff.export.passage import last_logits
from quantdiff.export.sidecar import LOGITS, QUANTIZED_LOGITS, read_sidecar
from quantdiff.models.quiet import quiet_libraries

__all__ = ["main"]


def main(folder: Path, out: Path, device: torch.device, threads: int) -> None:
    """Write the logits; those of the format's own loader even if the others fail."""
    torch.set_num_threads(threads)
    sidecar = read_sidecar(folder)
    ids = sidecar.content["passage"]["ids"]
    chosen = find_format(sidecar.content["export"]["format"])
    dtype = getattr(torch, sidecar.content["export"]["dtype"])
    with quiet_libraries():
        # Trusted: the caller has checked the code, or it is quantdiff's own.
        model = chosen.load(folder, device, dtype, trust_remote_code=True)
    found = {LOGITS: last_logits(model, ids)}
    save_file(found, out)
    del model
    gc.collect()
    with quiet_libraries():
        model, _ = load(folder, device=device, trust_remote_code=True)
    found[QUANTIZED_LOGITS] = last_logits(model, ids)
    save_file(found, out)


if __name__ == "__main__":
    try:
        main(Path(sys.argv[1]), Path(sys.argv[2]), torch.device(sys.argv[3]), int(sys.argv[4]))
    except UsageError as error:
        sys.exit(str(error))
