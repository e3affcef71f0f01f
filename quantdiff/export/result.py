"""What an export wrote."""

from dataclasses import asdict, dataclass
from typing import Any

from quantdiff.export.verifying import Verification
from quantdiff.quantization import Scheme

__all__ = ["Exported"]


@dataclass(frozen=True)
class Exported:
    """What was written.

    Attributes:
        folder: its path.
        format: name of the checkpoint format.
        model: name of the source.
        parameters: their number, tied ones counted once.
        bytes: of the model's safetensors files.
        source_bytes: of the live model's parameters, whatever the size of its file.
        source_dtype: the dtype of those parameters.
        schemes: what is quantized besides the weights.
        measured: the numbers from the caller's measurement, or None.
        verification: what was checked, or None if nothing was.
    """

    folder: str
    format: str
    model: str
    parameters: int
    bytes: int
    source_bytes: int
    source_dtype: str
    schemes: tuple[Scheme, ...]
    measured: dict[str, Any] | None
    verification: Verification | None

    @property
    def bits_per_weight(self) -> float:
        """Bits per weight on disk, counting all of the model's tensors."""
        return 8 * self.bytes / self.parameters

    def to_json(self) -> dict[str, Any]:
        """The result as JSON values."""
        verification = self.verification
        return {
            "folder": self.folder,
            "format": self.format,
            "model": self.model,
            "parameters": self.parameters,
            "bytes": self.bytes,
            "source_bytes": self.source_bytes,
            "source_dtype": self.source_dtype,
            "bits_per_weight": self.bits_per_weight,
            "schemes": [asdict(scheme) for scheme in self.schemes],
            "measured": self.measured,
            "verification": None if verification is None else verification.to_json(),
        }
