"""A fixed sample of the families survey; scripts/survey_families.py does all of them."""

import importlib.util
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent.parent / "scripts" / "survey_families.py"


@pytest.fixture(scope="module")
def survey():
    spec = importlib.util.spec_from_file_location("survey_families", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module.survey


@pytest.mark.parametrize("family", [
    "bert", "cohere2", "deepseek_v3", "diffllama", "gemma3_text", "gpt2", "gpt_neox", "jamba",
    "llama", "mixtral", "olmo2", "opt", "phi3", "qwen3", "qwen3_next", "smollm3", "zamba2",
])  # fmt: skip
def test_exact_under_eager_and_sdpa(survey, family):
    result = survey(family, ("eager", "sdpa"))
    assert result.words == {"eager": "exact", "sdpa": "exact"}, result.reasons


@pytest.mark.parametrize(
    ("family", "backend"), [("gemma2", "eager"), ("gpt_oss", "eager"), ("falcon", "sdpa")]
)
def test_exact_where_the_family_offers_it(survey, family, backend):
    result = survey(family, (backend,))
    assert result.words == {backend: "exact"}, result.reasons


@pytest.mark.parametrize("family", ["bloom", "mamba", "xlnet"])
def test_refused_with_a_reason(survey, family):
    result = survey(family, ("eager",))
    assert result.words == {"eager": "refused"}, result.reasons
    assert len(result.reasons["eager"]) > 40
