from collections.abc import Callable
from typing import Any

import pytest
import torch

import quantdiff
from tests.tiny import tiny_diffllama, tiny_ids, tiny_llama


def recorded(model: torch.nn.Module, **options: Any) -> quantdiff.Profile:
    with torch.no_grad(), quantdiff.record(model, **options) as recorder:
        model(input_ids=tiny_ids(2, 24))
    return recorder.profile(source="random ids")


@pytest.fixture(scope="session")
def profiles() -> dict[str, quantdiff.Profile]:
    """A standard model, a differential one, and one of which only the extremes are known."""
    return {
        "llama": recorded(tiny_llama(num_hidden_layers=3)),
        "diffllama": recorded(tiny_diffllama()),
        "extremes": recorded(tiny_llama(), detail="extremes", top_k=5),
    }


@pytest.fixture
def renamed(profiles: dict[str, quantdiff.Profile]) -> Callable[[str], quantdiff.Profile]:
    """The standard model's profile under another name."""

    def rename(name: str) -> quantdiff.Profile:
        profile = profiles["llama"].copy()
        profile.model["name"] = name
        return profile

    return rename
