"""A scheme: what is quantized, to how many bits, over which range."""

from collections.abc import Iterable
from dataclasses import dataclass

from quantdiff.errors import UsageError

__all__ = ["RANGES", "SITES", "STATIC", "Scheme"]

# Site -> granularities that it supports; `group` is written with its size, as in `group:64`.
SITES: dict[str, tuple[str, ...]] = {
    "attention_logits": ("tensor", "head", "row"),
    "attention_maps": ("tensor", "head", "row"),
    "keys": ("token", "head", "channel", "group"),
    "values": ("token", "head", "channel", "group"),
    "linear_inputs": ("tensor", "token"),
    "hidden_states": ("tensor", "token"),
    "weights": ("tensor", "channel", "group"),
}
# Site -> granularities that ranges from a calibration may have.
STATIC: dict[str, tuple[str, ...]] = {
    "attention_logits": ("tensor", "head"),
    "keys": ("head", "channel"),
    "values": ("head", "channel"),
    "linear_inputs": ("tensor",),
    "hidden_states": ("tensor",),
}

# Range -> its parameter's default, where it has one; all but `dynamic` come from a calibration.
RANGES: dict[str, float | None] = {
    "dynamic": None,
    "absmax": None,
    "percentile": 99.9,
    "mse": None,
    "entropy": None,
}
BITS = (2, 3, 4, 5, 6, 7, 8, 16)

_WITH_HEADS = ("attention_logits", "attention_maps", "keys", "values")
_CACHED = ("keys", "values")


@dataclass(frozen=True)
class Scheme:
    """How one site is quantized.

    Attributes:
        site: for example `attention_logits`.
        bits: 2 to 8, or 16, which means not quantized.
        range: `dynamic`, from the tensor itself, or static, from a calibration: `absmax`,
            `percentile` (also `percentile:99.99`), `mse`, `entropy`.
        granularity: what shares a range. `tensor`: a layer's values of one sequence, all heads and
            branches, or a weight matrix; `head`; `row`, one query, and `token`; `channel`, for keys
            and values one channel of a head over all tokens, for weights one output; `group:64`,
            that many neighbouring channels of a token, or inputs of an output. If omitted, it is
            the first that the site and the range support: `tensor`, or for keys and values `token`,
            `head` if the range is static.
        symmetric: whether the grid is symmetric; always False for `attention_maps`, whose grid
            begins at zero.
        layers: numbers of the layers that it applies to, from 0; None for all.
        heads: numbers of the heads that it applies to, from 0, in the order of the projection; None
            for all. They are query heads for logits and maps, key-value heads for keys and values.
            Ranges are those of the same scheme for all heads.
        newest: for keys and values, how many tokens, up to its own, a query meets unrounded: the
            residual window of KIVI (arXiv 2402.02750). Ranges are those of the same scheme with 0:
            those over all tokens (`head`, `channel`) span the newest too.

    Raises:
        UsageError: names the entry that is unknown or does not fit the others.
    """

    site: str
    bits: int
    range: str = "dynamic"
    granularity: str = ""
    symmetric: bool = True
    layers: tuple[int, ...] | None = None
    heads: tuple[int, ...] | None = None
    newest: int = 0

    def __post_init__(self) -> None:
        if self.site not in SITES:
            raise UsageError(f"unknown site {self.site!r}; known: {', '.join(SITES)}")
        for name in ("site", "range", "granularity"):
            if not isinstance(getattr(self, name), str):
                raise UsageError(f"the {name} of a scheme is a word, not {getattr(self, name)!r}")
        if self.bits not in BITS or type(self.bits) is not int:
            raise UsageError(f"bits are 2 to 8, or 16 for not quantized, not {self.bits!r}")
        if self.site == "attention_maps":  # schemes that do the same compare equal
            object.__setattr__(self, "symmetric", False)
        self._check_granularity()
        self._check_numbers("layers")
        self._check_numbers("heads")
        if self.heads is not None and self.site not in _WITH_HEADS:
            raise UsageError(f"{self.site} have no heads; those are of {', '.join(_WITH_HEADS)}")
        if type(self.newest) is not int or self.newest < 0:
            raise UsageError(f"the newest tokens are a number from 0, not {self.newest!r}")
        if self.newest and self.site not in _CACHED:
            raise UsageError(f"{self.site} keep no newest tokens; keys and values do")
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
        if self.static:
            self._check_static()

    def _check_static(self) -> None:
        if self.site not in STATIC:
            raise UsageError(
                f"calibrations hold no ranges of {self.site}; use the range dynamic there"
            )
        if self.granularity not in STATIC[self.site]:
            raise UsageError(
                f"granularity {self.granularity} is always dynamic; with the range {self.range} "
                f"use {' or '.join(STATIC[self.site])}"
            )
        if self.granularity == "channel" and self.observer != "absmax":
            raise UsageError(
                f"a calibration keeps only the extremes of a channel, no {self.observer}; with the "
                "granularity channel use the range absmax"
            )

    def _check_numbers(self, name: str) -> None:
        given = getattr(self, name)
        if given is None:
            return
        known = isinstance(given, Iterable) and not isinstance(given, str)
        numbers = tuple(given) if known else ()
        if not numbers or any(type(n) is not int or n < 0 for n in numbers):
            raise UsageError(f"{name} are numbers from 0, at least one, not {given!r}")
        object.__setattr__(self, name, tuple(sorted(set(numbers))))

    def _check_granularity(self) -> None:
        known = SITES[self.site]
        if not self.granularity:
            first = STATIC.get(self.site, known) if self.static else known
            object.__setattr__(self, "granularity", first[0])
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
        """The range's parameter, or its default if none was given; None if it has none."""
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
        """Whether anything is changed at all; False for 16 bits."""
        return self.bits < 16

    @property
    def causal(self) -> bool:
        """Whether no later token affects the grid of an earlier one."""
        alone = self.granularity in ("row", "token") or self.group is not None
        return self.static or alone or self.site == "weights" or not self.quantizes
