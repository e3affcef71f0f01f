"""Head layouts of differential attention: which query heads form a pair, and what they read.

For H query heads and G key-value heads in the order of their projections, a layout determines in
which calls plain attention computes all softmax maps, and which map is subtracted from which.

| layout            | who                                   | map 1 / map 2              |
|-------------------|---------------------------------------|----------------------------|
| `none`            | Transformer                           | every head is its own      |
| `adjacent`        | DIFF V1, Motif-2.6B, timm             | even / odd heads, own keys |
| `halves`          | transformers' DiffLlama               | head i / head i + H/2      |
| `adjacent_shared` | DIFF V2                               | even / odd, one key head   |
| `grouped:R`       | Motif-2-12.7B (R = 4)                 | R signal heads / one noise |
"""

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["LAYOUTS", "Call", "Layout", "branches", "layout"]


@dataclass(frozen=True)
class Call:
    """One plain attention call, with grouped queries: its head i reads key head i // (H/G).

    Attributes:
        queries: query heads, by their index in the projection.
        keys: key heads; their number divides that of the queries.
        values: for each key head, the value heads that are read side by side.
    """

    queries: tuple[int, ...]
    keys: tuple[int, ...]
    values: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Layout:
    """How the heads of an attention layer pair up.

    Attributes:
        name: as in `LAYOUTS`, with the ratio after a colon for `grouped`.
        ratio: signal heads per noise head.
        own_keys: whether map 1 and map 2 have key heads of their own; otherwise a pair shares one.
    """

    name: str
    ratio: int = 1
    own_keys: bool = True

    def __str__(self) -> str:
        return self.name

    @property
    def differential(self) -> bool:
        """Whether heads pair up at all."""
        return self.name != "none"

    @property
    def value_width(self) -> int:
        """Width of a head's output, in head widths."""
        return 2 if self.differential and self.own_keys else 1

    def branches(self, heads: int) -> list[int | None]:
        """Branch of each query head: 1 or 2 in a differential pair, None for a standard head."""
        if not self.differential:
            return [None] * heads
        noise = set(self.pairs(heads)[1])
        return [2 if head in noise else 1 for head in range(heads)]

    def pairs(self, heads: int) -> tuple[list[int], list[int]]:
        """Heads of map 1 and of map 2 for every head left after the subtraction, in their order.

        Raises:
            ValueError: the layout is `none`, or `heads` do not form pairs.
        """
        self._check_heads(heads)
        if not self.differential:
            raise ValueError("standard heads form no pairs")
        if self.name == "halves":
            half = heads // 2
            return list(range(half)), list(range(half, heads))
        size = self.ratio + 1
        signal = [head for head in range(heads) if head % size < self.ratio]
        return signal, [head - head % size + self.ratio for head in signal]

    def calls(self, heads: int, kv_heads: int) -> list[Call]:
        """Plain attention calls that compute all maps of H query and G key-value heads.

        Raises:
            ValueError: see `check`.
        """
        self.check(heads, kv_heads)
        everything = tuple(range(kv_heads))
        if not self.differential or not self.own_keys:
            return [Call(tuple(range(heads)), everything, tuple((g,) for g in everything))]
        half = kv_heads // 2
        if self.name == "halves":
            keys = [everything[:half], everything[half:]]
            values = tuple((g, g + half) for g in range(half))
        else:
            keys = [everything[0::2], everything[1::2]]
            values = tuple((2 * g, 2 * g + 1) for g in range(half))
        noise = dict.fromkeys(self.pairs(heads)[1])
        queries = (tuple(h for h in range(heads) if h not in noise), tuple(noise))
        return [Call(q, k, values) for q, k in zip(queries, keys, strict=True)]

    def key_heads(self, heads: int, kv_heads: int) -> list[int]:
        """Key head that each query head reads."""
        found = [0] * heads
        for call in self.calls(heads, kv_heads):
            for i, head in enumerate(call.queries):
                found[head] = call.keys[i * len(call.keys) // len(call.queries)]
        return found

    def value_heads(self, heads: int, kv_heads: int) -> list[tuple[int, ...]]:
        """Value heads that each query head reads side by side."""
        found: list[tuple[int, ...]] = [()] * heads
        for call in self.calls(heads, kv_heads):
            for i, head in enumerate(call.queries):
                found[head] = call.values[i * len(call.values) // len(call.queries)]
        return found

    def check(self, heads: int, kv_heads: int) -> None:
        """Refuse head counts that do not fit.

        Raises:
            ValueError: a count does not fit; the message names it.
        """
        self._check_heads(heads)
        if kv_heads < 1:
            raise ValueError(f"num_kv_heads is 1 or more, not {kv_heads}")
        if self.differential and self.own_keys:
            if kv_heads % 2:
                raise ValueError(
                    f"num_kv_heads = {kv_heads}: in the layout {self} both maps have key heads of "
                    "their own, so their number is even"
                )
            maps = heads // (self.ratio + 1)  # of branch 2, which has fewer
            if maps % (kv_heads // 2):
                raise ValueError(
                    f"num_kv_heads = {kv_heads} does not divide the heads of the layout {self}: "
                    f"{kv_heads // 2} key heads a map, {maps} heads of map 2"
                )
            return
        if heads % kv_heads:
            raise ValueError(f"num_kv_heads = {kv_heads} does not divide {heads} query heads")
        if self.differential:
            self.check_pairs(heads, kv_heads, *self.pairs(heads))

    def check_pairs(
        self, heads: int, kv_heads: int, first: Sequence[int], second: Sequence[int]
    ) -> None:
        """Refuse pairs whose two maps do not read the heads that this architecture requires.

        Both maps of a pair weigh the same values; in `adjacent_shared` (DIFF V2) they also read the
        same key head. Splitting V2's heads into a first and a second half, as DiffLlama does,
        violates that without any shape error, a trap that its authors warn of (microsoft/unilm,
        Diff-Transformer-V2).

        Args:
            heads, kv_heads: H and G.
            first, second: heads of map 1 and of map 2, pair by pair.

        Raises:
            ValueError: there is such a pair; the message names the first.
        """
        group, kinds = heads // kv_heads, self.branches(heads)
        if self.differential and self.own_keys:
            values = self.value_heads(heads, kv_heads)
            what = "value"
        else:
            values = [(head // group,) for head in range(heads)]
            what = "key and value"
        for a, b in zip(first, second, strict=True):
            if values[a] != values[b]:
                raise ValueError(
                    f"heads {a} and {b} of {heads} read different {what} heads ({values[a]} and "
                    f"{values[b]} of {kv_heads}): they are no pair of the layout {self}"
                )
            if self.own_keys and self.differential and (kinds[a], kinds[b]) != (1, 2):
                raise ValueError(
                    f"heads {a} and {b} of {heads} are of branches {kinds[a]} and {kinds[b]}, not "
                    f"1 and 2: they are no pair of the layout {self}"
                )

    def _check_heads(self, heads: int) -> None:
        size = self.ratio + 1
        if heads < 1:
            raise ValueError(f"the number of query heads is 1 or more, not {heads}")
        if self.differential and heads % size:
            what = "pairs" if size == 2 else f"groups of {self.ratio} signal heads and one noise"
            raise ValueError(f"{heads} query heads do not form {what} (layout {self})")


LAYOUTS: dict[str, Layout] = {
    "none": Layout("none"),
    "adjacent": Layout("adjacent"),
    "halves": Layout("halves"),
    "adjacent_shared": Layout("adjacent_shared", own_keys=False),
}


def layout(name: str) -> Layout:
    """The layout with this name.

    Raises:
        ValueError: an unknown name, or a ratio that is not a positive integer.
    """
    if name in LAYOUTS:
        return LAYOUTS[name]
    kind, _, ratio = name.partition(":")
    if kind == "grouped" and ratio.isdecimal() and int(ratio) > 0:
        return Layout(name, ratio=int(ratio))
    raise ValueError(f"unknown head layout {name!r}; known: {', '.join(LAYOUTS)}, grouped:R")


def branches(name: str, heads: int) -> list[int | None]:
    """Branch of each of H query heads in the named layout; see `Layout.branches`."""
    return layout(name).branches(heads)
