"""Multiple choice against a plain loop and against lm-eval's own run."""

import functools
import json
import lzma
import string
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quantdiff import QuantizationError, Scheme, UsageError, fake_quantize
from quantdiff.analysis.evaluation import Stopped, evaluation, reading
from quantdiff.analysis.evaluation.forward import Forward
from quantdiff.analysis.evaluation.pairs import Encoder, Pair
from quantdiff.analysis.evaluation.reading import read_questions
from quantdiff.analysis.evaluation.scoring import log_likelihoods
from tests.analysis.evaluation.conftest import (
    QUESTIONS,
    other_weights,
    plain_logits,
    run_lm_eval,
    write_rows,
    write_task,
)
from tests.tiny import tiny_llama, tiny_tokenizer


def plain_score(model, tokenizer, query, choice):
    """Log-likelihood of one choice; its tokens start where the space does."""
    start = tokenizer(query)["input_ids"]
    whole = tokenizer(f"{query} {choice}")["input_ids"]
    log_p = plain_logits(model, whole).log_softmax(-1)
    return sum(float(log_p[i - 1, whole[i]]) for i in range(len(start), len(whole)))


def plain(model, tokenizer, rows):
    """Scores, and whether the best is right, by sum and by character."""
    scores = [[plain_score(model, tokenizer, r["query"], c) for c in r["choices"]] for r in rows]
    best = [int(np.argmax(s)) for s in scores]
    lengths = [[len(c) for c in r["choices"]] for r in rows]
    norm = [int(np.argmax(np.divide(s, n))) for s, n in zip(scores, lengths, strict=True)]
    gold = [r["gold"] for r in rows]
    return scores, np.equal(best, gold), np.equal(norm, gold)


def run(model, tokenizer, argument, batch_size=1, side="right", context=None):
    evaluated = evaluation(f"choice:{argument}", model, tokenizer)
    evaluated.forward.padding_side = side
    extra = () if context is None else (context,)
    return evaluated.run(*extra, batch_size=batch_size)


def check(outcome, rows, scores, correct, correct_norm, rtol=1e-5):
    for row, expected in zip(outcome.items["log_likelihoods"], scores, strict=True):
        np.testing.assert_allclose(row[: len(expected)], expected, rtol=rtol)
        assert np.isnan(row[len(expected) :]).all()
    np.testing.assert_array_equal(outcome.items["correct"], correct)
    np.testing.assert_array_equal(outcome.items["correct_norm"], correct_norm)
    np.testing.assert_array_equal(outcome.items["gold"], [row["gold"] for row in rows])
    lengths = [[*map(len, row["choices"])] + [0] * (4 - len(row["choices"])) for row in rows]
    np.testing.assert_array_equal(outcome.items["lengths"], lengths)
    for metric, values in zip(outcome.metrics, (correct, correct_norm), strict=True):
        assert metric.value == pytest.approx(np.mean(values))
        assert metric.stderr == pytest.approx(np.std(values, ddof=1) / len(values) ** 0.5)
        assert metric.count == len(rows)


@settings(max_examples=12)
@given(batch_size=st.integers(1, 20), side=st.sampled_from(["left", "right"]), bos=st.booleans())
def test_equals_a_plain_loop(model, questions, batch_size, side, bos):
    tokenizer = tiny_tokenizer(bos=bos)
    outcome = run(model, tokenizer, questions, batch_size, side)
    assert [metric.name for metric in outcome.metrics] == ["acc", "acc_norm"]
    check(outcome, QUESTIONS, *plain(model, tokenizer, QUESTIONS))


@pytest.mark.parametrize("bos", [True, False])
def test_equals_lm_eval(model, tmp_path, bos):
    tokenizer = tiny_tokenizer(bos=bos)
    path = tmp_path / "rows.jsonl"
    rows = [json.loads(line) for line in lines(read_shipped(), 60)]
    rows += [{"query": " ", "choices": ["a", " b "], "gold": 0} | r for r in ODD[bos]]
    write_rows(path, rows)
    theirs = run_lm_eval(model, tokenizer, write_task(tmp_path, path), batch_size=3)
    ours = run(model, tokenizer, path, batch_size=5)
    for metric in ours.metrics:
        assert metric.value == theirs["results"]["own"][f"{metric.name},none"]
        stderr = theirs["results"]["own"][f"{metric.name}_stderr,none"]
        assert metric.stderr == pytest.approx(stderr)
    for row, sample in zip(ours.items["log_likelihoods"], theirs["samples"]["own"], strict=True):
        expected = [float(answer[0]) for answer in sample["filtered_resps"]]
        np.testing.assert_allclose(row[: len(expected)], expected, rtol=1e-5)


# What needs care in the cut between query and choice. lm-eval 0.4.13 fails on a query of spaces
# alone where the tokenizer adds no BOS.
ODD = {
    True: [{"query": "ends in a space "}, {"query": ""}, {"query": "   "}, {"query": "<s>the"}],
    False: [{"query": "ends in a space "}, {"query": ""}, {"query": "<s>the"}],
}


def read_shipped():
    path = reading._FOLDER / reading.SHIPPED["goal_inference"]
    return lzma.open(path, "rt", encoding="utf-8").read()


def lines(text, count):
    return text.splitlines()[:count]


TEXTS = st.text(alphabet=string.ascii_lowercase[:4] + " the\n.[é😀", max_size=12)


@settings(max_examples=60)
@given(query=TEXTS, choice=TEXTS.filter(str.strip), bos=st.booleans())
def test_pairs_are_cut_as_in_lm_eval(lm_eval_models, query, choice, bos):
    theirs = lm_eval_models[bos]
    ours = Encoder(theirs.tokenizer).pair(query, f" {choice}", "here")
    if query == "":
        start = [theirs.prefix_token_id]
        end = theirs.tok_encode(f" {choice}", add_special_tokens=False)
    else:
        start, end = theirs._encode_pair(query, f" {choice}")
    if not start:  # lm-eval refuses what is blank and gets no BOS
        start = [theirs.prefix_token_id]
    assert ours == Pair(tuple(start), tuple(end))


@pytest.fixture(scope="module")
def lm_eval_models(model):
    from lm_eval.models.huggingface import HFLM

    return [HFLM(pretrained=model, tokenizer=tiny_tokenizer(bos=bos)) for bos in (False, True)]


@given(
    label=TEXTS.filter(str.strip),
    a=TEXTS,
    b=TEXTS,
    endings=st.lists(TEXTS.map("x{}".format), min_size=2, max_size=4),
)
def test_hellaswag_rows_are_cleaned_as_in_lm_eval(
    hellaswag, tmp_path_factory, label, a, b, endings
):
    row = {
        "ind": 1, "activity_label": label, "ctx_a": a + " [title] x", "ctx_b": b,
        "ctx": f"{a} {b}", "endings": [f"[step] {ending} [title]" for ending in endings],
        "label": "1",
    }  # fmt: skip
    path = write_rows(tmp_path_factory.mktemp("rows") / "rows.jsonl", [row])
    expected = hellaswag(row)
    (made,) = read_questions(str(path))
    assert made.query == expected["query"]
    assert list(made.choices) == expected["choices"]
    assert made.gold == expected["gold"] == 1


@pytest.fixture(scope="module")
def hellaswag():
    """lm-eval's own cleaning of one row."""
    from lm_eval.tasks.hellaswag import utils

    class One:
        def map(self, function):
            return function

    return utils.process_docs(One())


def test_hellaswag_without_its_parts(tmp_path):
    row = {"ctx": " A man [x] walks", "endings": ["home.", "[y] away."], "label": 1}
    (made,) = read_questions(str(write_rows(tmp_path / "rows.jsonl", [row])))
    assert (made.query, made.choices, made.gold) == ("A man walks", ("home.", " away."), 1)


def test_first_questions_and_compressed_files(model, tokenizer, questions, tmp_path):
    whole = run(model, tokenizer, questions)
    part = run(model, tokenizer, f"{questions}@5", batch_size=3)
    compressed = tmp_path / "questions.jsonl.xz"
    compressed.write_bytes(lzma.compress(questions.read_bytes()))
    again = run(model, tokenizer, f"{compressed}@5", batch_size=3)
    for outcome in (part, again):
        assert outcome.metrics[0].count == 5
        np.testing.assert_allclose(
            outcome.items["log_likelihoods"], whole.items["log_likelihoods"][:5], rtol=1e-5
        )
    one = evaluation(f"choice:{questions}", model, tokenizer)
    same = evaluation(f"choice:{questions}@100", model, tokenizer)
    other = evaluation(f"choice:{questions}@5", model, tokenizer)
    assert one.data == same.data != other.data
    assert (one.total, other.total) == (len(QUESTIONS), 5)


def test_the_shipped_questions_are_those_of_the_source():
    made = read_questions("goal_inference")
    assert len(made) == 1703
    counts = Counter(len(question.choices) for question in made)
    assert counts == {4: 1701, 5: 2}
    assert made[0].query.startswith("The most reasonable goal of 'Choose the school districts")
    assert made[0].choices[made[0].gold] == "Get a Teaching Job"
    assert read_questions("goal_inference@400") == made[:400]


@pytest.mark.parametrize("side", ["left", "right"])
def test_within_contexts(tokenizer, questions, side):
    model = tiny_llama(max_position_embeddings=1024)
    context = functools.partial(other_weights, model)
    with context():
        expected = plain(model, tokenizer, QUESTIONS)
    check(run(model, tokenizer, questions, 7, side, context), QUESTIONS, *expected)

    context = functools.partial(fake_quantize, model, Scheme("attention_logits", bits=6))
    one = run(model, tokenizer, questions, 1, "right", context)
    many = run(model, tokenizer, questions, 7, side, context)
    np.testing.assert_allclose(
        many.items["log_likelihoods"], one.items["log_likelihoods"], rtol=1e-4
    )


@torch.no_grad()
def test_answers_of_one_token_share_a_row(model, monkeypatch):
    seen = []
    whole = Forward.__call__
    monkeypatch.setattr(
        Forward, "__call__", lambda self, s, spans: seen.append(len(s)) or whole(self, s, spans)
    )
    context = (0, 20, 21, 22, 23)
    pairs = [Pair(context, (i,)) for i in (30, 31, 32)] + [Pair(context[:3], (22, 23, 40))]
    sums, greedy = log_likelihoods(Forward(model, None), pairs, batch_size=8)
    log_p = plain_logits(model, context).log_softmax(-1)
    expected = [float(log_p[-1, i]) for i in (30, 31, 32)]
    expected += [float(log_p[2, 22] + log_p[3, 23] + log_p[4, 40])]
    np.testing.assert_allclose(sums, expected, rtol=1e-5)
    assert seen == [1]
    best = int(log_p[-1].argmax())
    _, greedy = log_likelihoods(
        Forward(model, None), [Pair(context, (best,)), Pair(context, (best - 1,))], batch_size=1
    )
    assert greedy.tolist() == [True, False]


def test_tells_progress_and_stops(model, tokenizer, questions):
    evaluated = evaluation(f"choice:{questions}", model, tokenizer)
    told = []
    evaluated.run(batch_size=3, progress=told.append)
    assert sum(told) == evaluated.total
    assert max(told) < evaluated.total
    with pytest.raises(Stopped):
        evaluated.run(batch_size=3, stop=lambda: True)


def test_values_that_are_not_finite_are_refused(tokenizer, questions):
    model = tiny_llama()
    with torch.no_grad():
        model.lm_head.weight[tokenizer("ü")["input_ids"][-1]] = torch.nan
    with pytest.raises(QuantizationError, match="a log-likelihood of question 0 is not finite"):
        run(model, tokenizer, questions)


GOOD = '{"query": "q", "choices": ["a", "b"], "gold": 0}'


@pytest.mark.parametrize(
    ("second", "message"),
    [
        ('{"query": ', "line 3, is not JSON"),
        ("[1]", "line 3, is not an object"),
        ('{"query": "q", "gold": 0}', "line 3, has no 'choices'"),
        ('{"ctx": "q", "endings": ["a", "b"]}', "line 3, has no 'label'"),
        ('{"endings": ["a", "b"], "label": 0}', "line 3, has no 'ctx'"),
        ('{"query": "q", "choices": ["a"], "gold": 0}', "line 3, has fewer than two choices"),
        ('{"query": "q", "choices": "ab", "gold": 0}', "line 3, has fewer than two choices"),
        ('{"query": "q", "choices": ["a", ""], "gold": 0}', "line 3, has an empty text"),
        ('{"query": 1, "choices": ["a", "b"], "gold": 0}', "line 3, has a int in 'query'"),
        ('{"query": "q", "choices": ["a", 1], "gold": 0}', "line 3, has a int in 'choices'"),
        ('{"query": "\\ud800", "choices": ["a", "b"], "gold": 0}', "line 3, holds half"),
        ('{"query": "q", "choices": ["a", "b"], "gold": 2}', "line 3, has gold 2, which is none"),
        ('{"query": "q", "choices": ["a", "b"], "gold": -1}', "line 3, has gold -1"),
        ('{"query": "q", "choices": ["a", "b"], "gold": true}', "line 3, has gold True"),
        ('{"query": "q", "choices": ["a", "b"], "gold": "1"}', "line 3, has gold '1'"),
        ('{"ctx": "q", "endings": ["a", "b"], "label": ""}', "line 3, has label ''"),
        (
            json.dumps({"query": "q" * 1100, "choices": ["a", "b"], "gold": 0}),
            "line 3, has a query",
        ),
        ("", None),
    ],
)
def test_broken_lines_are_named(model, tokenizer, tmp_path, second, message):
    path = tmp_path / "rows.jsonl"
    path.write_text(f"{GOOD}\n\n{second}\n", encoding="utf-8")
    if message is None:
        assert evaluation(f"choice:{path}", model, tokenizer).total == 1
        return
    with pytest.raises(UsageError, match=message) as error:
        evaluation(f"choice:{path}", model, tokenizer)
    assert "\n" not in str(error.value)
    assert evaluation(f"choice:{path}@1", model, tokenizer).total == 1


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("none.jsonl", None, "there is no file"),
        ("rows.csv", b"", "is no file of questions"),
        ("", None, "is no file of questions"),
        ("rows.jsonl", b"", "holds no question"),
        ("rows.jsonl", b"\xff\n", "line 1, is not UTF-8"),
        ("rows.jsonl.xz", b"no xz", "is broken or no xz file"),
        ("rows.jsonl@0", None, "asks for no questions"),
    ],
)
def test_bad_files(model, tokenizer, tmp_path, monkeypatch, name, content, message):
    monkeypatch.chdir(tmp_path)
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(UsageError, match=message):
        evaluation(f"choice:{name}", model, tokenizer)


def test_longest_that_fits(tokenizer, tmp_path):
    """lm-eval's own bound: the last token is predicted, and never seen."""
    model = tiny_llama(max_position_embeddings=16)
    fits = {"query": "q" * 13, "choices": ["b", "ab"], "gold": 0}  # BOS + 13 + 3 tokens
    path = write_rows(tmp_path / "rows.jsonl", [fits])
    (scores,), _, _ = plain(model, tokenizer, [fits])
    found = run(model, tokenizer, path, 2).items["log_likelihoods"]
    np.testing.assert_allclose(found, [scores], rtol=1e-5)
    write_rows(path, [fits | {"query": "q" * 14}])
    with pytest.raises(UsageError, match=r"15 \+ 3 tokens, beyond the model's context of 16"):
        run(model, tokenizer, path)


def test_a_choice_without_a_token_of_its_own(model, tmp_path):
    class Merging:
        """A tokenizer for which the text after the first word does not count."""

        bos_token_id, eos_token_id = 0, 1

        def decode(self, token):
            return "<s>"

        def __call__(self, text, **_):
            return {"input_ids": [0, 5]}

    path = write_rows(tmp_path / "rows.jsonl", QUESTIONS[:1])
    with pytest.raises(UsageError, match="line 1, has a choice that adds no token"):
        evaluation(f"choice:{path}", model, Merging())
