"""Which runs can be compared: those that agree in all that a number depends on but the model."""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

__all__ = ["Fact", "Facts", "Group", "apart", "groups"]

T = TypeVar("T")


@dataclass(frozen=True)
class Fact:
    """One property in which comparable runs agree.

    Attributes:
        value: what is compared.
        told: the value in a few words; empty where it would take too many.
    """

    value: Hashable
    told: str = ""


Facts = dict[str, Fact]


@dataclass(frozen=True, eq=False)
class Group(Generic[T]):
    """Things that can be compared with each other.

    Attributes:
        members: in order.
        facts: those in which all members agree.
    """

    members: tuple[T, ...]
    facts: Facts


def groups(things: Sequence[T], facts: Callable[[T], Facts]) -> list[Group[T]]:
    """Group things that agree in all facts, in the order of each group's first member."""
    found: dict[tuple[tuple[str, Hashable], ...], tuple[Facts, list[T]]] = {}
    for thing in things:
        known = facts(thing)
        key = tuple((name, fact.value) for name, fact in known.items())
        found.setdefault(key, (known, []))[1].append(thing)
    return [Group(tuple(members), known) for known, members in found.values()]


def apart(what: str, some: Sequence[Group[T]], name: Callable[[T], str]) -> list[str]:
    """One sentence for each group but the first: how it differs from the first.

    Args:
        what: what the groups consist of, in the plural.
        some: groups.
        name: gives a member's name.
    """
    sentences = []
    for other in some[1:]:
        first = some[0]
        different = []
        for fact, theirs in other.facts.items():
            ours = first.facts.get(fact)
            if ours is not None and ours.value != theirs.value:
                values = f" ({theirs.told} and {ours.told})" if theirs.told and ours.told else ""
                different.append(f"{fact}{values}")
        names = [", ".join(dict.fromkeys(map(name, group.members))) for group in (other, first)]
        sentences.append(
            f"{what} of {names[0]} cannot be compared with those of {names[1]}: they differ in "
            f"{', '.join(different)}. They stand apart."
        )
    return sentences
