"""Short names of common quantization settings: `W8A8`, `W4g64A16+KV4`, `L4`."""

import re
from collections.abc import Iterable

from quantdiff.errors import UsageError
from quantdiff.quantization.scheme import Scheme

__all__ = ["SHORT", "name_of", "schemes"]

# Letter -> the sites, granularity and symmetry that it stands for.
SHORT: dict[str, tuple[tuple[str, ...], str, bool]] = {
    "W": (("weights",), "channel", True),
    "A": (("linear_inputs",), "token", True),
    "KV": (("keys", "values"), "token", False),
    "K": (("keys",), "token", False),
    "V": (("values",), "token", False),
    "L": (("attention_logits",), "tensor", True),
    "P": (("attention_maps",), "tensor", False),
    "H": (("hidden_states",), "token", True),
}
_ONE = re.compile(r"(KV|[WAKVLPH])([1-9][0-9]*|0)(?:g([0-9]+))?(?:r([0-9]+))?")


def schemes(name: str) -> tuple[Scheme, ...]:
    """The schemes that a short name stands for.

    It consists of letters with bits: W weights (one grid per output channel), A inputs of linear
    modules (per token), KV, K, V keys and values (per token and head, asymmetric), L attention
    logits and P attention maps (per layer and sequence), H hidden states (per token); 16 bits leave
    a site unchanged. `g64` after W, KV, K or V makes groups of 64, and `r128` after KV, K or V
    keeps the newest 128 tokens unrounded. Names are joined by `+`; `W4A16` is `W4+A16`.

    Raises:
        UsageError: an unknown name, a site named twice, or bits that no scheme has.
    """
    found: list[Scheme] = []
    named: set[str] = set()
    for part in name.split("+"):
        if not part or _ONE.sub("", part):
            raise UsageError(
                f"unknown short name {part or name!r}: write letters and bits, such as W8A8, "
                f"W4g64A16+KV4 or L6; letters are {', '.join(SHORT)}"
            )
        for letter, bits, size, newest in _ONE.findall(part):
            sites, granularity, symmetric = SHORT[letter]
            if size:
                granularity = f"group:{size}"
            for site in sites:
                if site in named:
                    raise UsageError(f"{name!r} names {site} twice")
                named.add(site)
                try:
                    scheme = Scheme(
                        site, int(bits), "dynamic", granularity, symmetric, newest=int(newest or 0)
                    )
                except UsageError as error:
                    raise UsageError(f"{letter}{bits} in {name!r}: {error}") from None
                found.append(scheme)
    return tuple(scheme for scheme in found if scheme.quantizes)


def name_of(chosen: Iterable[Scheme]) -> str:
    """A short name of some schemes, by site, bits, groups and newest tokens; `fp` for none.

    For display only: it omits range, granularity except groups, symmetry, layers and heads.
    Several schemes for one site, each for other layers, are shown by their fewest and most bits.
    """
    bits: dict[str, Scheme] = {}
    widths: dict[str, set[int]] = {}
    for one in chosen:
        if one.quantizes:
            bits[one.site] = one
            widths.setdefault(one.site, set()).add(one.bits)
    parts = []
    pair = bits.get("keys"), bits.get("values")
    joined = pair[0] is not None and pair[1] is not None and _alike(*pair)  # type: ignore[arg-type]
    joined = joined and widths["keys"] == widths["values"]
    for letter, (sites, _, _) in SHORT.items():
        if (letter == "KV") != joined and letter in ("KV", "K", "V"):
            continue
        scheme = bits.get(sites[0])
        if scheme is not None:
            group = "" if scheme.group is None else f"g{scheme.group}"
            newest = f"r{scheme.newest}" if scheme.newest else ""
            told = "-".join(map(str, sorted({min(widths[sites[0]]), max(widths[sites[0]])})))
            parts.append(f"{letter}{told}{group}{newest}")
    if "weights" in bits and "linear_inputs" in bits:
        parts[:2] = ["".join(parts[:2])]
    elif "weights" in bits:
        parts[0] += "A16"
    return "+".join(parts) or "fp"


def _alike(keys: Scheme, values: Scheme) -> bool:
    names = ("bits", "granularity", "symmetric", "range", "newest")
    return all(getattr(keys, name) == getattr(values, name) for name in names)
