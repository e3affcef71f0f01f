"""Names and numbers as a reader should see them."""

import math
import re

__all__ = ["UNKNOWN", "four_digits", "literal", "number", "shorten", "slug", "two_digits"]

UNKNOWN = "–"


def literal(name: object) -> str:
    """A name on one line: what cannot be printed (a line break, a lone surrogate) becomes `�`."""
    return "".join(letter if letter.isprintable() else "�" for letter in str(name))


def shorten(text: str, length: int) -> str:
    """At most `length` characters, with an ellipsis in the middle where some had to go."""
    if len(text) <= length:
        return text
    end = max(length - 1, 1) // 2
    return f"{text[: max(length - 1 - end, 0)]}…{text[len(text) - end :]}"


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
