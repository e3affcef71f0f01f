"""Needles: what is hidden where, and how it is scored."""

import json

import numpy as np
import pytest
import torch

from quantdiff import Scheme, UsageError, fake_quantize
from quantdiff.analysis.compare.paired import units_of
from quantdiff.analysis.evaluation import evaluation, needles
from quantdiff.analysis.evaluation.haystack import haystack, words_there
from quantdiff.analysis.evaluation.needles import DEPTHS
from quantdiff.analysis.evaluation.pairs import Encoder
from tests.analysis.evaluation.conftest import plain_logits
from tests.tiny import tiny_llama, tiny_tokenizer


@pytest.fixture
def few(monkeypatch):
    """Two texts for each length and depth."""
    monkeypatch.setattr(needles, "SAMPLES", 2)


@pytest.mark.parametrize("bos", [True, False])
@pytest.mark.parametrize("depth", DEPTHS)
def test_a_haystack_holds_what_it_says(depth, bos):
    tokenizer = tiny_tokenizer(bos=bos)
    made = haystack(Encoder(tokenizer), 4, 2, 600, depth, 7)
    assert made == haystack(Encoder(tokenizer), 4, 2, 600, depth, 7)
    assert len(set(made.cities)) == len(set(made.numbers)) == 4
    lines = made.text.split("\n")
    places = []
    for city, number in zip(made.cities, made.numbers, strict=True):
        needle = f"The magic number for {city} is {number}."
        assert lines.count(needle) == made.text.count(city) == 1
        before = " ".join(line for line in lines[: lines.index(needle)] if "magic" not in line)
        places.append(len(before.split()))
    words = sum(len(line.split()) for line in lines if "magic" not in line)
    assert places[:2] == [round(depth * words)] * 2
    longest = 0
    for query, choices in enumerate(made.pairs):
        city = made.cities[query]
        answers = [tokenizer.decode(pair.continuation).removeprefix(" ") for pair in choices]
        assert sorted(answers) == sorted(made.numbers)
        assert answers[made.gold[query]] == made.numbers[query]
        for number, pair in zip(answers, choices, strict=True):
            whole = tokenizer(f"{made.text}\nThe magic number for {city} is {number}")["input_ids"]
            assert list(pair.context + pair.continuation) == whole
            assert tokenizer.decode(pair.continuation) == f" {number}"
            longest = max(longest, len(whole))
    # As many words as fit: the next one has some tokens.
    assert 600 - 20 < longest <= 600


def test_samples_of_all_depths_differ_in_nothing_else():
    made = [haystack(Encoder(tiny_tokenizer()), 3, 1, 400, depth, 1) for depth in DEPTHS]
    assert len({(each.cities, each.numbers, each.gold) for each in made}) == 1
    assert len({" ".join(sorted(each.text.split())) for each in made}) == 1
    assert len({each.text for each in made}) == len(DEPTHS)
    other = haystack(Encoder(tiny_tokenizer()), 3, 1, 400, 0.5, 2)
    assert other.numbers != made[0].numbers


def test_equals_a_plain_loop(model, tokenizer, few):
    made = evaluation("needles:3,2@260,300", model, tokenizer)
    assert made.total == 2 * len(DEPTHS) * 2 * 2
    told = []
    outcome = made.run(batch_size=7, progress=told.append)
    assert sum(told) == made.total
    made.forward.padding_side = "left"
    again = made.run(batch_size=2)
    items = outcome.items
    np.testing.assert_allclose(items["log_likelihoods"], again.items["log_likelihoods"], rtol=1e-5)
    number = 0
    answers: dict[tuple[int, int], list[bool]] = {}  # by length and sample, at all depths
    for text in made.texts:
        of_text = answers.setdefault((text.length, text.sample), [])
        count = list(answers).index((text.length, text.sample))
        for query in range(2):
            scores, exact = [], []
            for pair in text.pairs[query]:
                ids = pair.context + pair.continuation
                log_p = plain_logits(model, ids).log_softmax(-1)
                rows = range(len(pair.context) - 1, len(ids) - 1)
                scores.append(sum(float(log_p[i, ids[i + 1]]) for i in rows))
                exact.append(all(int(log_p[i].argmax()) == ids[i + 1] for i in rows))
            np.testing.assert_allclose(items["log_likelihoods"][number], scores, rtol=1e-5)
            gold = text.gold[query]
            of_text.append(np.argmax(scores) == gold)
            assert items["correct"][number] == of_text[-1]
            assert items["exact"][number] == exact[gold]
            found = [items[key][number] for key in ("length", "depth", "text", "gold")]
            assert found == [text.length, text.depth, count, gold]
            number += 1
    by_text = np.array([np.mean(of_text) for of_text in answers.values()])
    assert len(by_text) == 2 * 2
    acc = outcome.metrics[0]
    assert acc.value == pytest.approx(items["correct"].mean())
    assert acc.stderr == pytest.approx(by_text.std(ddof=1) / len(by_text) ** 0.5)
    assert acc.count == made.total
    units = units_of(items, "acc", acc.value)
    assert (units.kind, units.weights.tolist()) == ("texts", [len(DEPTHS) * 2] * 4)
    assert units.sums / units.weights == pytest.approx(by_text)


def test_the_right_number_has_no_place_of_its_own(tokenizer):
    model = tiny_llama(max_position_embeddings=1024)
    torch.nn.init.zeros_(model.lm_head.weight)  # all answers are alike
    outcome = evaluation("needles:3,1@260", model, tokenizer).run(batch_size=64)
    scores, gold = outcome.items["log_likelihoods"], outcome.items["gold"]
    assert (scores == scores[:, :1]).all()
    assert set(gold) == set(range(3))
    assert outcome.metrics[0].value == (gold == 0).mean() <= 0.5


class Copying:
    """A model that has learnt to copy: it says what followed the same twenty tokens before."""

    def __init__(self, forward):
        self.forward, self.model = forward, forward.model

    def __call__(self, sequences, spans):
        wanted = self.forward(sequences, spans)
        wanted.logits.zero_()
        places = (
            (s.tolist(), p) for s, span in zip(sequences, spans, strict=True) for p in range(*span)
        )
        for (ids, place), row, column in zip(places, wanted.rows, wanted.columns, strict=True):
            for i in range(20, place):
                if ids[i - 20 : i] == ids[place - 19 : place + 1]:
                    wanted.logits[row, column, ids[i]] = 9
        return wanted


def test_a_model_that_copies_finds_them_all(model, tokenizer, few):
    made = evaluation("needles:4,1@400", model, tokenizer)
    made.forward = Copying(made.forward)
    assert [metric.value for metric in made.run(batch_size=4).metrics] == [1.0, 1.0]


class Elsewhere(Copying):
    """It knows the right number, but half of the texts it would not go on with a number at all."""

    def __call__(self, sequences, spans):
        wanted = super().__call__(sequences, spans)
        rows = (s for s, span in zip(sequences, spans, strict=True) for _ in range(*span))
        for ids, row, column in zip(rows, wanted.rows, wanted.columns, strict=True):
            if self.is_lost(ids.tolist()):
                wanted.logits[row, column, 0] = 10
        return wanted

    @staticmethod
    def is_lost(ids):
        return sum(ids[:20]) % 2 == 0


def test_what_is_known_is_not_always_written(model, tokenizer, few):
    made = evaluation("needles:2,1@260,300", model, tokenizer)
    made.forward = Elsewhere(made.forward)
    outcome = made.run(batch_size=4)
    written: dict[tuple[int, int], list[bool]] = {}  # by length and sample
    for text in made.texts:
        lost = Elsewhere.is_lost(text.pairs[0][0].context)
        written.setdefault((text.length, text.sample), []).append(not lost)
    by_text = np.array([np.mean(each) for each in written.values()])
    assert 0 < by_text.mean() < 1
    assert by_text.std() > 0
    acc, exact = outcome.metrics
    assert (acc.name, acc.value, acc.stderr) == ("acc", 1.0, 0.0)
    assert (exact.name, exact.count) == ("exact", made.total)
    assert exact.value == pytest.approx(by_text.mean())
    assert exact.stderr == pytest.approx(by_text.std(ddof=1) / len(by_text) ** 0.5)
    assert outcome.items["exact"].tolist() == [
        not Elsewhere.is_lost(text.pairs[0][0].context) for text in made.texts
    ]


def test_within_fake_quantize(tokenizer, few):
    model = tiny_llama(max_position_embeddings=1024)
    made = evaluation("needles:2,1@260", model, tokenizer)
    context = fake_quantize(model, Scheme("attention_logits", bits=4))
    plain, quantized = made.run(batch_size=3), made.run(lambda: context, batch_size=3)
    gap = plain.items["log_likelihoods"] - quantized.items["log_likelihoods"]
    assert (gap != 0).all()


def test_says_what_it_depends_on(model, tokenizer, few):
    made = evaluation("needles:2,1@260", model, tokenizer)
    assert json.loads(json.dumps(made.settings)) == made.settings
    assert made.data == evaluation("needles:2,1@260", model, tokenizer).data
    assert made.data != evaluation("needles:2,1@261", model, tokenizer).data
    default = evaluation("needles", model, tokenizer).settings
    found = default["needles"], default["queries"], default["lengths"]
    assert found == (4, 2, [512, 1024])


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("4", "is not of the form"),
        ("a,b", "is not of the form"),
        ("4,2@", None),
        ("4,2@long", "is not of the form"),
        ("1,1", "asks for 1 of 1 needles"),
        ("2,3", "asks for 3 of 2 needles"),
        ("2,0", "asks for 0 of 2"),
        ("99,1", "asks for 1 of 99"),
        ("4,2@2048", "beyond the model's context of 1024"),
        ("4,2@0", "or below 1"),
        ("4,2@150", "do not fit into 150 tokens"),
    ],
)
def test_bad_requests(model, tokenizer, few, argument, message):
    if message is None:
        assert evaluation(f"needles:{argument}", model, tokenizer).total == 40
        return
    with pytest.raises(UsageError, match=message):
        evaluation(f"needles:{argument}", model, tokenizer)


def test_lengths_beyond_the_shipped_text_are_refused_before_any_text_is_made(tokenizer):
    model = tiny_llama(max_position_embeddings=300_000)
    with pytest.raises(UsageError, match=r"'needles:4,2@300,200000' .* text of 147,697 words"):
        evaluation("needles:4,2@300,200000", model, tokenizer)
    with pytest.raises(UsageError, match="may not fill"):
        evaluation(f"needles:2,1@{words_there()}", model, tokenizer)
