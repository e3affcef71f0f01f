"""Names and numbers formatted for readers."""

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

_BEFORE = 3  # letters kept before the first one in which names differ
_HEAD = 6  # letters kept of a name that is cut a second time
_LEAST = 12  # letters of a name shown beside others, at least


def literal(name: object) -> str:
    """A name on one line; unprintable characters (a line break, a lone surrogate) become `�`."""
    return "".join(letter if letter.isprintable() else "�" for letter in str(name))


def shorten(text: str, length: int) -> str:
    """Shorten to at most `length` characters, with an ellipsis in the middle if any are cut."""
    if len(text) <= length:
        return text
    end = max(length - 1, 1) // 2
    return f"{text[: max(length - 1 - end, 0)]}…{text[len(text) - end :]}"


def shorten_apart(names: Iterable[str], length: int) -> dict[str, str]:
    """Shorten names that are shown side by side, keeping them distinct.

    Those that would look the same are cut to begin shortly before they differ.

    Args:
        names: those in one legend or table.
        length: characters of each, at most; more if so few cannot keep them distinct.

    Returns:
        The shortened names by name, in the order of the names.
    """
    length = max(length, _LEAST)
    found = {name: shorten(name, length) for name in names}
    alike: dict[str, list[str]] = {}
    for name, short in found.items():
        alike.setdefault(short, []).append(name)
    for group in alike.values():
        if len(group) > 1:
            # The first letters of a name that was cut before distinguish it from other groups.
            kept = group[0][:_HEAD] if group[0].startswith("…") else ""
            start = _alike(group) - _BEFORE
            if start > len(kept) + 1:
                rest = shorten_apart([f"{kept}…{name[start:]}" for name in group], length)
                found |= zip(group, rest.values(), strict=True)
    if len(set(found.values())) < len(found):
        return shorten_apart(found, 2 * length)
    return found


def _alike(names: list[str]) -> int:
    """The number of leading letters that names share."""
    for place, letters in enumerate(zip(*names, strict=False)):
        if len(set(letters)) > 1:
            return place
    return min(map(len, names))


def slug(name: str, length: int = 40) -> str:
    """The end of a name, for use in a file name; different names may give the same."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", name)[-length:].strip("-.") or "unnamed"


def number(value: float | None) -> str:
    """One decimal from 10 up, as in the paper; three significant digits below."""
    if value is None or math.isnan(value):
        return UNKNOWN
    if value == 0:
        return "0"
    if not 10 <= abs(value) < 1e7:
        return f"{value:#.3g}"
    return f"{value:.1f}"


def four_digits(value: float) -> str:
    """Four significant digits: values at different widths often differ only in the fourth."""
    if value == 0:
        return "0"
    return f"{value:.1f}" if 1000 <= abs(value) < 1e7 else f"{value:#.4g}".rstrip(".")


def two_digits(error: float) -> str:
    """Two significant digits of a standard error, as more would claim too much."""
    return f"{error:.0f}" if error >= 10 else f"{error:#.2g}"
