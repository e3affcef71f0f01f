"""How the heads of an attention layer pair up."""

__all__ = ["LAYOUTS", "branches"]

# "none": standard heads. "halves": head i is map 1 and head i + H/2 map 2 of pair i (DiffLlama).
LAYOUTS = ("none", "halves")


def branches(layout: str, heads: int) -> list[int | None]:
    """Branch of each query head: 1 or 2 in a differential pair, None for a standard head.

    Args:
        layout: one of `LAYOUTS`.
        heads: H, all query heads of the projection.

    Raises:
        ValueError: an unknown layout, or an odd number of heads in a differential one.
    """
    if layout == "none":
        return [None] * heads
    if layout == "halves":
        if heads % 2:
            raise ValueError(f"{heads} heads do not divide into two halves")
        return [1 if head < heads // 2 else 2 for head in range(heads)]
    raise ValueError(f"unknown head layout {layout!r}; known: {', '.join(LAYOUTS)}")
