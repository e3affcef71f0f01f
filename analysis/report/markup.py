"""HTML from elements: a text is escaped when it becomes part of one, and nowhere else."""

import html

from quantdiff.analysis.text import literal

__all__ = ["Markup", "element", "joined"]

_VOID = {"br", "img", "link", "meta"}


class Markup(str):
    """Text that is HTML already."""

    __slots__ = ()


def element(name: str, /, *content: str, **attributes: str | int | float | None) -> Markup:
    """An element; all content that is not `Markup` is escaped.

    Args:
        name: of the element.
        content: its content, in order.
        attributes: `class_` is the attribute `class`, `aria_label` is `aria-label`; None is left
            out.
    """
    start = name + "".join(
        f' {key.rstrip("_").replace("_", "-")}="{_escaped(str(value))}"'
        for key, value in attributes.items()
        if value is not None
    )
    if name in _VOID:
        return Markup(f"<{start}>")
    return Markup(f"<{start}>{joined(*content)}</{name}>")


def joined(*content: str) -> Markup:
    """Concatenate; all that is not `Markup` is escaped."""
    return Markup("".join(part if isinstance(part, Markup) else _escaped(part) for part in content))


def _escaped(text: str) -> str:
    # `literal` also replaces characters that change the direction of what follows.
    return html.escape(literal(text), quote=True)
