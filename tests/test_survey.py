"""A fixed sample of the families survey; scripts/survey_families.py does all of them."""

import importlib
from pathlib import Path

import pytest
import torch

from quantdiff.analysis.profiling import profile_text
from quantdiff.calibration import TextWindows

SCRIPTS = Path(__file__).parent.parent / "scripts"


@pytest.fixture(scope="module")
def survey():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(SCRIPTS)
        yield importlib.import_module("survey_families").survey


@pytest.mark.parametrize("family", [
    "bert", "cohere2", "deepseek_v3", "diffllama", "gemma3_text", "gemma4_text", "gpt2", "gpt_neox",
    "jamba", "llama", "llama4", "mixtral", "olmo2", "opt", "phi3", "qwen3", "qwen3_next",
    "qwen4_exp", "smollm3", "zamba2",
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


def test_not_tried_with_a_sentence(survey):
    result = survey("gemma4_assistant", ("eager",))
    assert result.words == {"eager": "not tried"}
    assert result.name == "Gemma4AssistantForCausalLM"
    assert "does not run on its own" in result.reasons["eager"]


def test_layers_that_share_keys_are_profiled_whole(survey):
    """Gemma 4 leaves tokens out in its last layers where only the last logits are asked for."""
    import tiny_families

    config_class, model_class = tiny_families.family_classes("gemma4_text")
    model = tiny_families.build(model_class, tiny_families.small_config(config_class), "sdpa")
    windows = TextWindows("test", [torch.arange(3, 35)], 32, 32, has_bos=False)
    profile = profile_text(model, windows)
    heads = 4
    assert (
        profile.attention_logits.sites[-1].count.tolist()
        == [profile.attention_logits.sites[1].count[0]] * heads
    )
    assert all(site.count[0] == 32 * 64 for site in profile.hidden_states.sites)
