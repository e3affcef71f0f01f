"""Orders of examples against a plain loop."""

import json

import numpy as np
import pytest

from quantdiff import Scheme, UsageError, fake_quantize
from quantdiff.analysis.evaluation import evaluation
from quantdiff.analysis.evaluation.order import EXAMPLES, ORDERS
from tests.analysis.evaluation.conftest import QUESTIONS, write_rows
from tests.analysis.evaluation.test_choice import plain_score
from tests.tiny import tiny_llama


def test_equals_a_plain_loop(model, tokenizer, questions):
    made = evaluation(f"order:{questions}@3", model, tokenizer)
    told = []
    outcome = made.run(batch_size=5, progress=told.append)
    assert sum(told) == made.total == 3 * ORDERS
    orders = made.settings["orders"]
    assert len({tuple(order) for order in orders}) == ORDERS
    assert all(sorted(order) == list(range(EXAMPLES)) for order in orders)
    asked = QUESTIONS[EXAMPLES : EXAMPLES + 3]
    correct = np.zeros((3, ORDERS), dtype=bool)
    for i, row in enumerate(asked):
        for j, order in enumerate(orders):
            shown = (QUESTIONS[k] for k in order)
            start = "\n\n".join(f"{r['query']} {r['choices'][r['gold']]}" for r in shown)
            query = f"{start}\n\n{row['query']}"
            scores = [plain_score(model, tokenizer, query, c) for c in row["choices"]]
            found = outcome.items["log_likelihoods"][i, j]
            np.testing.assert_allclose(found[: len(scores)], scores, rtol=1e-5)
            correct[i, j] = np.argmax(scores) == row["gold"]
    np.testing.assert_array_equal(outcome.items["correct"], correct)
    np.testing.assert_array_equal(outcome.items["gold"], [row["gold"] for row in asked])


def test_metrics(model, tokenizer, questions):
    outcome = evaluation(f"order:{questions}", model, tokenizer).run(batch_size=8)
    correct = outcome.items["correct"]
    acc, spread, std = outcome.metrics
    count = len(QUESTIONS) - EXAMPLES
    assert correct.shape == (count, ORDERS)
    by_order, by_question = correct.mean(0), correct.mean(1)
    assert (acc.name, spread.name, std.name) == ("acc", "spread", "std")
    assert acc.value == pytest.approx(correct.mean())
    assert acc.stderr == pytest.approx(by_question.std(ddof=1) / count**0.5)
    assert spread.value == pytest.approx(by_order.max() - by_order.min())
    assert std.value == pytest.approx(by_order.std(ddof=1))
    assert acc.count == count


def test_padding_and_contexts(tokenizer, questions):
    model = tiny_llama(max_position_embeddings=1024)
    made = evaluation(f"order:{questions}@2", model, tokenizer)
    one = made.run(batch_size=1)
    made.forward.padding_side = "left"
    many = made.run(batch_size=6)
    np.testing.assert_allclose(
        many.items["log_likelihoods"], one.items["log_likelihoods"], rtol=1e-5
    )
    context = fake_quantize(model, Scheme("attention_logits", bits=4))
    quantized = made.run(lambda: context, batch_size=6)
    assert (quantized.items["log_likelihoods"] != one.items["log_likelihoods"]).any()


def test_says_what_it_depends_on(model, tokenizer, questions, tmp_path):
    made = evaluation(f"order:{questions}@3", model, tokenizer)
    assert json.loads(json.dumps(made.settings)) == made.settings
    other = write_rows(tmp_path / "rows.jsonl", QUESTIONS[1:5] + QUESTIONS[4:7])
    assert evaluation(f"order:{other}@3", model, tokenizer).data != made.data


def test_bad_requests(model, tokenizer, tmp_path):
    few = write_rows(tmp_path / "few.jsonl", QUESTIONS[:EXAMPLES])
    with pytest.raises(UsageError, match="none is left to ask"):
        evaluation(f"order:{few}", model, tokenizer)
    with pytest.raises(UsageError, match="line 5, has a query and choice"):
        evaluation("order:goal_inference@1", tiny_llama(max_position_embeddings=64), tokenizer)
    with pytest.raises(UsageError, match="no file of questions"):
        evaluation("order:", model, tokenizer)
