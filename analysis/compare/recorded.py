"""Profiles side by side: which of them can be compared, and what captions say about them."""

import re
from collections.abc import Hashable
from dataclasses import dataclass

from quantdiff.analysis.compare.alike import Fact, Facts, Group, apart, groups
from quantdiff.analysis.compare.runs import Names, ProfileRun, Run
from quantdiff.analysis.frames import ACTIVATIONS
from quantdiff.analysis.text import literal
from quantdiff.statistics.profile import DEFINITIONS, SITE_DEFINITIONS, Profile

__all__ = ["Recorded", "about", "fingerprint", "recorded_groups", "warnings_of"]


@dataclass(frozen=True, eq=False)
class Recorded:
    """A profile and the label of its model."""

    label: str
    profile: Profile


def recorded_groups(runs: list[Run], names: Names) -> list[Group[Recorded]]:
    """Group the profiles of some runs that measured the same on the same data."""
    found = [Recorded(names.of(run), run.profile) for run in runs if isinstance(run, ProfileRun)]
    layers: dict[Hashable, int] = {}  # architecture -> the most in any of its profiles
    for recorded in found:
        known = layers.get(_architecture(recorded), 0)
        layers[_architecture(recorded)] = max(known, len(_layers(recorded)))
    return groups(found, lambda recorded: _facts(recorded, layers[_architecture(recorded)]))


def _architecture(recorded: Recorded) -> Hashable:
    about = recorded.profile.model
    return about.get("family"), about.get("parameters")


def _layers(recorded: Recorded) -> list[str]:
    """Names of the layers whose hidden states were seen."""
    return [site.name for site in recorded.profile.hidden_states.sites]


def _coverage(recorded: Recorded, most: int) -> Fact:
    """The layers, where they are known not to be all of them.

    A profile does not state how many its model has: another profile of the same architecture may
    show it, or the layers' own numbers.
    """
    names = _layers(recorded)
    numbers = [re.search(r"\.(\d+)$", name) for name in names]
    gaps = any(number and int(number[1]) != place for place, number in enumerate(numbers))
    if not names or (not gaps and len(names) == most):
        return Fact(None, "all")
    return Fact(tuple(names), f"{len(names)} alone")


def _facts(recorded: Recorded, layers: int) -> Facts:
    profile = recorded.profile
    data = profile.data
    tokens, length = (int(data.get(name, 0)) for name in ("tokens", "sequence_length"))
    source = literal(data.get("source") or "unnamed data")
    mark = data.get("fingerprint")
    return {
        "data": Fact(mark or f"{source}, unmarked", f"{source} {fingerprint(mark)}"),
        "tokens": Fact(tokens, f"{tokens:,}"),
        "sequences": Fact(int(data.get("sequences", 0)), f"{data.get('sequences', 0):,}"),
        "sequence length": Fact(length, f"{length:,}"),
        "definitions": Fact(tuple(_definition(profile, kind) for kind in ACTIVATIONS)),
        "detail": Fact(profile.detail, profile.detail),
        "dtype": Fact(profile.model.get("dtype"), str(profile.model.get("dtype"))),
        "layers": _coverage(recorded, layers),
        "completeness": Fact(profile.partial, "partial" if profile.partial else "whole"),
    }


def _definition(profile: Profile, kind: str) -> str | None:
    """What was counted, without measures of channels, which are not compared here."""
    told = profile.definition.get(kind)
    return DEFINITIONS[kind] if told == SITE_DEFINITIONS.get(kind) else told


def fingerprint(mark: str | None) -> str:
    """A fingerprint as shown to people: its first twelve digits."""
    return "without a fingerprint" if mark is None else mark[:12]


def about(group: Group[Recorded]) -> str:
    """What was measured on what, as a sentence for captions."""
    profile = group.members[0].profile
    data = profile.data
    told = (
        f"Over {data['tokens']:,} tokens of {literal(data.get('source') or 'unnamed data')} in "
        f"{data['sequences']:,} sequence{'s' * (data['sequences'] != 1)} of up to "
        f"{data['sequence_length']:,} (data {fingerprint(data.get('fingerprint'))}); models in "
        f"{profile.model.get('dtype')}"
    )
    if profile.detail == "extremes":
        told += "; extremes only"
    return f"{told}{'; partial' if profile.partial else ''}."


def warnings_of(some: list[Group[Recorded]]) -> list[str]:
    """What a reader of the profiles must know, one sentence each."""
    sentences = apart("Profiles", some, lambda recorded: recorded.label)
    for group in some:
        profile = group.members[0].profile
        called = ", ".join(recorded.label for recorded in group.members)
        if profile.partial:
            sentences.append(f"The profile of {called} is partial: its recording was cut short.")
        if profile.detail == "extremes":
            sentences.append(
                f"The profile of {called} holds extremes only: no medians and no distributions."
            )
        if profile.data.get("fingerprint") is None and len(group.members) > 1:
            sentences.append(
                f"The data of {called} have no fingerprint: that they are the same is taken from "
                "their name and size alone."
            )
        for kind in ACTIVATIONS:
            bare = [r.label for r in group.members if not getattr(r.profile, kind).count]
            if bare:
                sentences.append(f"{', '.join(bare)}: no {kind.replace('_', ' ')} were recorded.")
    return sentences
