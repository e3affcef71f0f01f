"""The grid of a sweep: which schemes are requested, and which cells they make."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, NamedTuple

from quantdiff.errors import UsageError
from quantdiff.quantization import name_of
from quantdiff.quantization.remedy import NONE, Remedy
from quantdiff.quantization.scheme import Scheme

__all__ = [
    "Cell",
    "SweepGrid",
    "Together",
    "cells_of",
    "distinct",
    "make_grid",
    "short_name",
    "where",
]

_LETTERS = {
    "attention_logits": "L", "attention_maps": "P", "keys": "K", "values": "V",
    "linear_inputs": "A", "hidden_states": "H", "weights": "W",
}  # fmt: skip
_PROBE = 8  # bits with which other choices are checked

Together = tuple[Scheme, ...]  # the schemes of one cell; empty for the unquantized model


class SweepGrid(NamedTuple):
    """The schemes of a sweep.

    Attributes:
        schemes: in the order in which they run, each once; 16 bits once, whatever the site.
        notes: one sentence for each combination that was left out.
    """

    schemes: tuple[Scheme, ...]
    notes: tuple[str, ...]


@dataclass(frozen=True)
class Cell:
    """One evaluation of one model under one scheme, or several together.

    Attributes:
        id: hash of everything that its result depends on.
        model: name of the model.
        evaluation: as the user wrote it.
        schemes: empty for the unquantized model, which stands for 16 bits.
        data: fingerprint of the evaluation's data.
        calibration: fingerprint of what a static range comes from; None for a dynamic one.
        remedy: what is done to the model beforehand.
    """

    id: str
    model: str
    evaluation: str
    schemes: Together
    data: str
    calibration: str | None
    remedy: Remedy = NONE

    def fields(self) -> dict[str, Any]:
        """The fields that all lines of the cell in `results.jsonl` share, except data and outcome.

        Schemes used together have the sites of all, the fewest bits, and no common range or
        granularity; `options` lists each of them, as well as newest tokens, layers and heads of a
        scheme, and a remedy.
        """
        scheme = self.schemes[0] if len(self.schemes) == 1 else None
        options: dict[str, Any] = {}
        if scheme is not None:
            options = {"symmetric": scheme.symmetric} | _some(scheme)
        elif self.schemes:
            options = {"schemes": [_told(one) for one in self.schemes]}
        if self.calibration is not None:
            options["calibration"] = self.calibration
        if self.remedy != NONE:
            options["remedy"] = self.remedy.name
        return {
            "cell": self.id,
            "model": self.model,
            "scheme": short_name(self.schemes),
            "site": "+".join(one.site for one in self.schemes) or None,
            "bits": min((one.bits for one in self.schemes), default=16),
            "range": scheme and scheme.range,
            "granularity": scheme and scheme.granularity,
            "options": options,
            "causal": all(one.causal for one in self.schemes),
            "eval": self.evaluation,
        }


def make_grid(
    *,
    bits: Iterable[int],
    ranges: Iterable[str] = ("dynamic",),
    granularities: Iterable[str] = ("",),
    sites: Iterable[str] = ("attention_logits",),
    symmetric: Iterable[bool] = (True,),
) -> SweepGrid:
    """All combinations of the given choices that make sense.

    Args:
        bits: 2 to 8; 16 adds one cell without quantization.
        ranges, granularities, sites, symmetric: as in `quantdiff.Scheme`; the granularity `""` is
            the default of the site.

    Raises:
        UsageError: no site supports a choice, or no combination is left.
    """
    bits, ranges, granularities = tuple(bits), tuple(ranges), tuple(granularities)
    sites, symmetric = tuple(sites), tuple(symmetric)
    for name, values in (
        ("bits", bits), ("range", ranges), ("granularity", granularities), ("site", sites),
        ("symmetry", symmetric),
    ):  # fmt: skip
        if not values:
            raise UsageError(f"the grid is empty: no {name} was given")
    _check_each(bits, ranges, granularities, sites)
    schemes: list[Scheme] = []
    left_out: dict[str, str] = {}
    for site, range_, granularity, even, width in product(
        sites, ranges, granularities, symmetric, bits
    ):
        try:
            schemes.append(Scheme(site, width, range_, granularity, even))
        except UsageError as error:
            what = f"{site} with range {range_}"
            if granularity:
                what += f" and granularity {granularity}"
            left_out[what] = str(error)
    if not schemes:
        raise UsageError(f"the grid is empty: {next(iter(left_out.values()))}")
    notes = tuple(f"left out: {what}: {why}" for what, why in left_out.items())
    return SweepGrid(distinct(schemes), notes)


def distinct(schemes: Iterable[Scheme]) -> tuple[Scheme, ...]:
    """Each scheme once, with its range's parameter spelt out; at most one of 16 bits."""
    found: dict[Any, Scheme] = {}
    for scheme in map(_spelt, schemes):
        found.setdefault(scheme if scheme.quantizes else None, scheme)
    return tuple(found.values())


def cells_of(wanted: Iterable[Scheme | Iterable[Scheme]]) -> tuple[Together, ...]:
    """What each cell computes with, each once: single schemes, and schemes used together."""
    found: dict[frozenset[Scheme], Together] = {}
    for entry in wanted:
        given = (entry,) if isinstance(entry, Scheme) else entry
        together = tuple(_spelt(scheme) for scheme in given if scheme.quantizes)
        found.setdefault(frozenset(together), together)
    return tuple(found.values())


def _spelt(scheme: Scheme) -> Scheme:
    """Spell out a parameter: `percentile` and `percentile:99.90`, one range, must be one cell."""
    if scheme.percentile is None:
        return scheme
    return replace(scheme, range=f"{scheme.observer}:{scheme.percentile:.12g}")


def short_name(schemes: Together) -> str:
    """A name for a narrow column, such as `L4` or `W8A8+KV8`; `fp` for the unquantized model."""
    if len(schemes) == 1:
        (scheme,) = schemes
        newest = f"r{scheme.newest}" if scheme.newest else ""
        return f"{_LETTERS[scheme.site]}{scheme.bits}{newest}"
    return name_of(schemes)


def where(options: Mapping[str, Any]) -> str:
    """What a cell's short name leaves out: its remedy, and the layers and heads it is for.

    Args:
        options: those of a line of `results.jsonl`.
    """
    told = ""
    schemes = options.get("schemes", [options])
    for name in ("layers", "heads"):
        numbers = [scheme.get(name) for scheme in schemes]
        if numbers[0] is not None and numbers.count(numbers[0]) == len(numbers):
            told += f" {name.removesuffix('s')} {', '.join(map(str, numbers[0]))}"
    return f"{told} {options['remedy']}" if "remedy" in options else told


def _told(scheme: Scheme) -> dict[str, Any]:
    names = ("site", "bits", "range", "granularity", "symmetric")
    return {name: getattr(scheme, name) for name in names} | _some(scheme)


def _some(scheme: Scheme) -> dict[str, Any]:
    """The tokens, layers and heads that a scheme is for, where it is not for all."""
    told: dict[str, Any] = {"newest": scheme.newest} if scheme.newest else {}
    numbers = (("layers", scheme.layers), ("heads", scheme.heads))
    return told | {name: list(of_one) for name, of_one in numbers if of_one is not None}


def _check_each(
    bits: Sequence[int], ranges: Sequence[str], granularities: Sequence[str], sites: Sequence[str]
) -> None:
    """Refuse unknown choices, as opposed to incompatible ones."""
    for site in sites:
        _one_fits([(site, _PROBE, "dynamic", "")])
    for width in bits:
        _one_fits([(sites[0], width, "dynamic", "")])
    for granularity in granularities:
        _one_fits([(site, _PROBE, "dynamic", granularity) for site in sites])
    for range_ in ranges:
        _one_fits([(site, _PROBE, range_, "") for site in sites])


def _one_fits(choices: Iterable[tuple[str, int, str, str]]) -> None:
    refusals = []
    for choice in choices:
        try:
            Scheme(*choice)
        except UsageError as error:
            refusals.append(error)
        else:
            return
    raise refusals[0]
