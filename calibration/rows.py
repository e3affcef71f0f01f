"""Rows of a table or of JSON lines: which field is the text, and whether it holds any."""

from collections.abc import Iterable, Iterator
from typing import Any

from quantdiff.errors import UsageError

__all__ = ["TEXT_FIELDS", "filled", "first_line", "listed", "text_field"]

TEXT_FIELDS = ("text", "content", "document", "article", "passage", "sentence")


def text_field(names: Iterable[str], wanted: str | None, place: str) -> str:
    """The field that holds the text: the wanted one, else the first of `TEXT_FIELDS` present.

    Raises:
        UsageError: it is not among `names`; the message lists them.
    """
    names = list(names)
    for field in [wanted] if wanted else TEXT_FIELDS:
        if field in names:
            return field
    looked_for = repr(wanted) if wanted else f"of the names {', '.join(TEXT_FIELDS)}"
    raise UsageError(
        f"{place} has no field {looked_for} (found: {listed(names)}): "
        "rename the one that holds the text"
    )


def filled(value: Any, field: str, place: str) -> Iterator[tuple[str]]:
    """`value` as a document of one part, or nothing if it is blank or missing.

    Raises:
        UsageError: `value` is not text, or cannot be encoded as UTF-8.
    """
    if value is None:
        return
    if not isinstance(value, str):
        raise UsageError(
            f"{place} has no text in {field!r} but a {type(value).__name__}: "
            "name a source whose field is a string"
        )
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise UsageError(f"{place} holds half a surrogate pair: mend or drop it") from error
    if value.strip():
        yield (value,)


def listed(names: Iterable[str]) -> str:
    """`names` as a message shows them."""
    return ", ".join(map(str, names)) or "none"


def first_line(error: BaseException) -> str:
    """The message of `error`, short enough for a one-line message."""
    return (str(error).strip() or type(error).__name__).splitlines()[0][:200]
