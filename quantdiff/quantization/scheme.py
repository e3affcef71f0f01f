"""A scheme: what is quantized, to how many bits, over which range."""

from collections.abc import Iterable
from dataclasses import dataclass

from quantdiff.errors import UsageError

__all__ = ["CALIBRATED", "RANGES", "SITES", "Scheme"]

# Site -> granularities that it knows; `group` is written with its size, as in `group:64`.
SITES: dict[str, tuple[str, ...]] = {
    "attention_logits": ("tensor", "head", "row"),
    "attention_maps": ("tensor", "head", "row"),
    "keys": ("token", "head", "channel", "group"),
    "values": ("token", "head", "channel", "group"),
    "linear_inputs": ("tensor", "token"),
    "hidden_states": ("tensor", "token"),
    "weights": ("tensor", "channel", "group"),
}
# Sites with ranges from a calibration.
CALIBRATED = ("attention_logits",)

# Range -> its parameter's default, where it has one; all but `dynamic` come from a calibration.
RANGES: dict[str, float | None] = {
    "dynamic": None,
    "absmax": None,
    "percentile": 99.9,
    "mse": None,
    "entropy": None,
}
BITS = (2, 3, 4, 5, 6, 7, 8, 16)


@dataclass(frozen=True)
class Scheme:
    """How one site is quantized.

    Attributes:
        site: for example `attention_logits`.
        bits: 2 to 8, or 16, which means not quantized.
        range: `dynamic`, from the tensor itself, or static, from a calibration: `absmax`,
            `percentile` (also `percentile:99.99`), `mse`, `entropy`.
        granularity: what shares a range. `tensor`: a layer's values of one sequence, all heads and
            branches, or a weight matrix; `head`; `row`, one query, and `token`; `channel`, of keys
            and values one head's over all tokens, of weights one output; `group:64`, so many
            neighbouring channels of a token, or inputs of an output. Left out, it is the first
            that the site knows: `tensor`, or `token` of keys and values.
        symmetric: whether the grid is; that of `attention_maps` begins at zero in either case.
        layers: numbers of the layers that it is for, from 0; None for all.

    Raises:
        UsageError: names the entry that is not known or does not go with the others.
    """

    site: str
    bits: int
    range: str = "dynamic"
    granularity: str = ""
    symmetric: bool = True
    layers: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if self.site not in SITES:
            raise UsageError(f"unknown site {self.site!r}; known: {', '.join(SITES)}")
        for name in ("site", "range", "granularity"):
            if not isinstance(getattr(self, name), str):
                raise UsageError(f"the {name} of a scheme is a word, not {getattr(self, name)!r}")
        if self.bits not in BITS or type(self.bits) is not int:
            raise UsageError(f"bits are 2 to 8, or 16 for not quantized, not {self.bits!r}")
        self._check_granularity()
        if self.layers is not None:
            known = isinstance(self.layers, Iterable) and not isinstance(self.layers, str)
            layers = tuple(self.layers) if known else ()
            if not layers or any(type(n) is not int or n < 0 for n in layers):
                raise UsageError(f"layers are numbers from 0, at least one, not {self.layers!r}")
            object.__setattr__(self, "layers", tuple(sorted(set(layers))))
        observer, parameter = self.observer, self.range.partition(":")[2]
        if observer not in RANGES:
            raise UsageError(f"unknown range {self.range!r}; known: {', '.join(RANGES)}")
        if parameter and RANGES[observer] is None:
            raise UsageError(f"the range {observer} takes no parameter, as in {self.range!r}")
        if self.range.endswith(":"):
            raise UsageError(f"the range {self.range!r} lacks what stands behind the colon")
        if observer == "percentile":
            try:
                percentile = float(parameter or str(RANGES[observer]))
            except ValueError:
                raise UsageError(f"{parameter!r} is no percentile") from None
            if not 0 < percentile <= 100:
                raise UsageError(f"a percentile lies in (0, 100], not {parameter}")
        if self.granularity == "row" and self.static:
            raise UsageError(
                f"granularity row is always dynamic; with the range {self.range} use tensor or head"
            )
        if self.static and self.site not in CALIBRATED:
            raise UsageError(
                f"calibrations hold no ranges of {self.site}; use the range dynamic there"
            )

    def _check_granularity(self) -> None:
        known = SITES[self.site]
        if not self.granularity:
            object.__setattr__(self, "granularity", known[0])
        kind, _, size = self.granularity.partition(":")
        if kind not in known:
            raise UsageError(
                f"granularity of {self.site} is one of {', '.join(known)}, not {self.granularity!r}"
            )
        if kind == "group" and not (size.isascii() and size.isdigit() and int(size) > 0):
            raise UsageError(f"a group has a size, as in group:64, not {self.granularity!r}")
        if kind != "group" and size:
            raise UsageError(f"the granularity {kind} takes no size, as in {self.granularity!r}")

    @property
    def group(self) -> int | None:
        """Channels of a group; None for other granularities."""
        kind, _, size = self.granularity.partition(":")
        return int(size) if kind == "group" else None

    @property
    def observer(self) -> str:
        """The range without its parameter."""
        return self.range.partition(":")[0]

    @property
    def percentile(self) -> float | None:
        """The range's parameter, its default where none was given; None if it has none."""
        default = RANGES[self.observer]
        given = self.range.partition(":")[2]
        return float(given) if given else default

    @property
    def static(self) -> bool:
        """Whether the range comes from a calibration."""
        return self.range != "dynamic"

    @property
    def over_both(self) -> bool:
        """Whether one dynamic range spans both maps of a differential pair."""
        return (
            self.site == "attention_logits"
            and self.range == "dynamic"
            and self.granularity == "tensor"
        )

    @property
    def quantizes(self) -> bool:
        """Whether anything is changed at all: not with 16 bits."""
        return self.bits < 16

    @property
    def causal(self) -> bool:
        """Whether no later token sets the grid of an earlier one."""
        alone = self.granularity in ("row", "token") or self.group is not None
        return self.static or alone or self.site == "weights" or not self.quantizes
