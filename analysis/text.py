"""Names and numbers as a reader should see them."""

import math
import re
from collections.abc import Iterable

__all__ = [
    "UNKNOWN",
    "four_digits",
    "literal",
    "number",
    "shorten",
    "shorten_apart",
    "slug",
    "two_digits",
]

UNKNOWN = "–"

_BEFORE = 3  # letters that are kept before the first in which names differ
_HEAD = 6  # letters that are kept of a name that is cut a second time
_LEAST = 12  # letters of a name that has others beside it


def literal(name: object) -> str:
    """A name on one line: what cannot be printed (a line break, a lone surrogate) becomes `�`."""
    return "".join(letter if letter.isprintable() else "�" for letter in str(name))


def shorten(text: str, length: int) -> str:
    """At most `length` characters, with an ellipsis in the middle where some had to go."""
    if len(text) <= length:
        return text
    end = max(length - 1, 1) // 2
    return f"{text[: max(length - 1 - end, 0)]}…{text[len(text) - end :]}"


def shorten_apart(names: Iterable[str], length: int) -> dict[str, str]:
    """Names that stand side by side, each shortened, and none like another.

    Those that their ends do not tell apart begin where they begin to differ.

    Args:
        names: of one legend or table.
        length: characters of each, at most; more where so few cannot tell them apart.

    Returns:
        By name, in the order of the names.
    """
    length = max(length, _LEAST)
    found = {name: shorten(name, length) for name in names}
    alike: dict[str, list[str]] = {}
    for name, short in found.items():
        alike.setdefault(short, []).append(name)
    for group in alike.values():
        if len(group) > 1:
            # What was cut already has in its first letters how it differs from other groups.
            kept = group[0][:_HEAD] if group[0].startswith("…") else ""
            start = _alike(group) - _BEFORE
            if start > len(kept) + 1:
                rest = shorten_apart([f"{kept}…{name[start:]}" for name in group], length)
                found |= zip(group, rest.values(), strict=True)
    if len(set(found.values())) < len(found):
        return shorten_apart(found, 2 * length)
    return found


def _alike(names: list[str]) -> int:
    """Letters at the start that names have in common."""
    for place, letters in enumerate(zip(*names, strict=False)):
        if len(set(letters)) > 1:
            return place
    return min(map(len, names))


def slug(name: str, length: int = 40) -> str:
    """The end of a name as part of a file's name; two names may give the same."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", name)[-length:].strip("-.") or "unnamed"


def number(value: float | None) -> str:
    """One decimal from 10 on, as the paper prints them, three significant digits below."""
    if value is None or math.isnan(value):
        return UNKNOWN
    if value == 0:
        return "0"
    if not 10 <= abs(value) < 1e7:
        return f"{value:#.3g}"
    return f"{value:.1f}"


def four_digits(value: float) -> str:
    """Four significant digits: widths are compared, which often differ in the fourth."""
    if value == 0:
        return "0"
    return f"{value:.1f}" if 1000 <= abs(value) < 1e7 else f"{value:#.4g}".rstrip(".")


def two_digits(error: float) -> str:
    """Two significant digits of a standard error, for more would claim too much."""
    return f"{error:.0f}" if error >= 10 else f"{error:#.2g}"
