"""What all evaluations have in common."""

import importlib

import pytest

from quantdiff.analysis.evaluation import EVALUATIONS, cost_sign


@pytest.mark.parametrize("name", EVALUATIONS)
def test_each_says_which_metrics_are_costs(name):
    module = importlib.import_module(f"quantdiff.analysis.evaluation.{EVALUATIONS[name]}")
    assert set(module.COSTS.values()) <= {-1, 1}
    for metric, sign in module.COSTS.items():
        assert cost_sign(f"{name}:x.jsonl@3", metric) == sign


@pytest.mark.parametrize(
    ("name", "better", "worse"),
    [
        ("perplexity", (), ("perplexity", "nll")),
        ("divergence", ("agreement",), ("kl", "perplexity", "nll")),
        ("choice:x", ("acc", "acc_norm"), ()),
        ("needles:4,2", ("acc", "exact"), ()),
        ("order:x", ("acc",), ()),
        (
            "lm-eval:x",
            ("acc", "acc_norm", "acc_bytes", "acc_all", "acc_mutual_info", "exact_match", "f1"),
            ("perplexity", "word_perplexity", "byte_perplexity", "bits_per_byte"),
        ),
    ],
)
def test_more_is_better_or_worse(name, better, worse):
    assert {metric: cost_sign(name, metric) for metric in better} == dict.fromkeys(better, -1)
    assert {metric: cost_sign(name, metric) for metric in worse} == dict.fromkeys(worse, 1)


def test_names_of_lm_eval():
    assert cost_sign("lm-eval:gsm8k", "exact_match,strict-match") == -1
    assert cost_sign("lm-eval:mmlu", "mmlu_law:acc,none") == -1
    assert cost_sign("lm-eval:x", "invented,none") is None
    assert cost_sign("of-tomorrow", "kl") is None
