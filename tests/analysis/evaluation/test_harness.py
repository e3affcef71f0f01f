"""Tasks of lm-eval on the live model, against lm-eval's own run."""

import contextlib
import functools
import importlib
import json
import logging
import random
import sys
import warnings
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import CompileConfig

from quantdiff import MissingExtraError, QuantizationError, Scheme, UsageError, fake_quantize
from quantdiff.analysis.evaluation import Stopped, evaluation
from quantdiff.errors import CutWarning
from tests.analysis.evaluation.conftest import (
    QUESTIONS,
    TASK,
    other_weights,
    run_lm_eval,
    write_rows,
    write_task,
)
from tests.conftest import needs
from tests.tiny import tiny_llama, tiny_tokenizer

ROLLING = """
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: "{data}"}}, cache_dir: "{data}.cache"}}
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: query
metric_list:
  - {{metric: word_perplexity, aggregation: weighted_perplexity, higher_is_better: false}}
  - {{metric: byte_perplexity, aggregation: weighted_perplexity, higher_is_better: false}}
"""

GENERATION = """
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: "{data}"}}, cache_dir: "{data}.cache"}}
test_split: test
output_type: generate_until
doc_to_text: query
doc_to_target: "{{{{choices[0][0]}}}}"
generation_kwargs: {{max_gen_toks: 4, until: ["\\n"], do_sample: false}}
metric_list:
  - {{metric: exact_match, aggregation: mean, higher_is_better: true, ignore_case: true}}
"""


@pytest.fixture(scope="session")
def task(tmp_path_factory, questions):
    return write_task(tmp_path_factory.mktemp("tasks"), questions)


def run(model, tokenizer, argument, batch_size=2, context=None, **options):
    extra = () if context is None else (context,)
    made = evaluation(f"lm-eval:{argument}", model, tokenizer)
    return made.run(*extra, batch_size=batch_size, **options)


@pytest.mark.parametrize(
    "template", [TASK, TASK + "num_fewshot: 2\n", ROLLING], ids=["choice", "few-shot", "rolling"]
)
def test_equals_lm_evals_own_run(model, tokenizer, tmp_path, questions, template):
    path = write_task(tmp_path, questions, template=template)
    theirs = run_lm_eval(model, tokenizer, path)
    made = evaluation(f"lm-eval:{path}", model, tokenizer)
    # Twice: the examples of a few-shot task must not go on from where the first run ended.
    for batch_size in (2, 5):
        ours = made.run(batch_size=batch_size)
        expected = theirs["results"]["own"]
        assert [m.name for m in ours.metrics] == [
            key.removesuffix(",none")
            for key in expected
            if key.endswith(",none") and "_stderr" not in key
        ]
        for metric in ours.metrics:
            assert metric.value == pytest.approx(expected[f"{metric.name},none"], rel=1e-5)
            stderr = expected[f"{metric.name}_stderr,none"]
            assert metric.stderr == (None if stderr == "N/A" else pytest.approx(stderr))
            assert metric.count == len(QUESTIONS)
            values = [sample[metric.name] for sample in theirs["samples"]["own"]]
            np.testing.assert_allclose(ours.items[metric.name], values, rtol=1e-5)


def test_likelihoods_are_of_fp32_logits(tokenizer, tmp_path, questions):
    model = tiny_llama(max_position_embeddings=1024).bfloat16()
    path = write_task(tmp_path, questions, template=ROLLING)
    ours = run(model, tokenizer, path, 1).items["word_perplexity"][:, 0]  # summed log-likelihoods

    def gap(**options):
        samples = run_lm_eval(model, tokenizer, path, **options)["samples"]["own"]
        theirs = np.array([sample["word_perplexity"][0] for sample in samples])
        return np.abs(ours / theirs - 1).max()

    assert gap(softmax_dtype="float32") < 1e-5
    assert gap() > 1e-4


def test_generation_is_lm_evals(tokenizer, tmp_path, questions):
    model = tiny_llama(max_position_embeddings=1024)
    path = write_task(tmp_path, questions, template=GENERATION)
    theirs = run_lm_eval(model, tokenizer, path)
    told, made = [], evaluation(f"lm-eval:{path}", model, tokenizer)
    ours = made.run(batch_size=5, progress=told.append)
    assert ours.metrics[0].name == "exact_match"
    samples = theirs["samples"]["own"]
    np.testing.assert_array_equal(ours.items["exact_match"], [s["exact_match"] for s in samples])
    written = [[asked.filtered_resps["none"]] for asked in made.tasks["tasks"]["own"].instances]
    assert written == [sample["filtered_resps"] for sample in samples]
    assert len({text for (text,) in written}) > len(QUESTIONS) / 2
    assert sum(told) == len(QUESTIONS)
    with pytest.raises(Stopped):
        run(model, tokenizer, path, 5, stop=lambda: True)
    context = functools.partial(fake_quantize, model, Scheme("attention_logits", bits=4))
    assert run(model, tokenizer, path, 5, context).metrics[0].count == len(QUESTIONS)


def test_generation_is_never_compiled(tokenizer, tmp_path, questions, monkeypatch):
    """transformers does that on a GPU where a model asks for a static cache: hooks are lost."""
    model = tiny_llama(max_position_embeddings=1024)
    model.generation_config.cache_implementation = "static"
    model.generation_config.compile_config = CompileConfig()
    model.generation_config.compile_config._compile_all_devices = True
    compiled = []
    monkeypatch.setattr(model, "get_compiled_call", lambda how: compiled.append(how) or model)
    ids = torch.tensor([[5, 6, 7]])
    model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=3, pad_token_id=1)
    assert compiled
    compiled.clear()
    path = write_task(tmp_path, questions, template=GENERATION)
    context = functools.partial(fake_quantize, model, Scheme("attention_logits", bits=4))
    assert run(model, tokenizer, f"{path}@2", 2, context).metrics[0].count == 2
    assert not compiled


@contextlib.contextmanager
def short_ruler():
    """The file of lm-eval's `niah_single_1`: two questions of at most 700 tokens, of few words.

    Its modules are imported as if for the first time.
    """
    words, nltk = (importlib.import_module(name) for name in ("wonderwords", "nltk"))
    some = {kind: sorted(each)[:8] for kind, each in words.RandomWord()._categories.items()}
    name = "lm_eval.tasks.ruler.prepare_niah"
    kept = sys.modules.pop(name, None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(words, "RandomWord", lambda: SimpleNamespace(_categories=some))
        # Nothing is downloaded: only essays are split into sentences.
        patch.setattr(nltk.data, "find", lambda *_: None)
        state = random.getstate()
        niah = importlib.import_module(name)
        assert random.getstate() == state  # or a process would ask others at first
        generate = niah.generate_samples

        def few(*given, **options):
            options |= {"num_samples": 2, "max_seq_length": 700}
            return [row | {"max_length": 4096} for row in generate(*given, **options)]

        patch.setattr(niah, "generate_samples", few)
        yield Path(niah.__file__).with_name("niah_single_1.yaml")
    del sys.modules[name]
    if kept is not None:
        sys.modules[name] = kept


@needs(find_spec("wonderwords") is not None, "needs lm-eval[ruler]")
def test_questions_made_of_random_numbers_are_the_same_again(tokenizer):
    """A sweep that goes on compares their fingerprints."""
    model, made = tiny_llama(max_position_embeddings=1024), []
    for seed in (1, 2):
        random.seed(seed)
        with short_ruler() as path:
            made.append(evaluation(f"lm-eval:{path}", model, tokenizer))
    assert made[0].data == made[1].data
    asked = [one.args[0] for one in made[0].tasks["tasks"]["niah_single_1"].instances]
    assert len({*asked}) == 2
    assert all("One of the special magic numbers for" in text for text in asked)
    outcome = made[0].run(batch_size=2)
    assert [(metric.name, metric.count) for metric in outcome.metrics] == [("4096", 2)]


def test_how_a_model_generates_is_a_setting_of_tasks_that_generate(
    tokenizer, tmp_path, questions, task
):
    model = tiny_llama(max_position_embeddings=1024)
    path = write_task(tmp_path, questions, template=GENERATION)

    def settings(argument):
        return evaluation(f"lm-eval:{argument}@2", model, tokenizer).settings

    before = settings(path), settings(task)
    run(model, tokenizer, f"{path}@2")
    assert settings(path) == before[0]
    model.generation_config.repetition_penalty = 1.5
    assert settings(path) != before[0]
    assert settings(task) == before[1]
    assert before[0].keys() - before[1].keys() == {"generation"}


def test_equals_choice_within_contexts(tokenizer, questions, task):
    model = tiny_llama(max_position_embeddings=1024)
    quantized = functools.partial(fake_quantize, model, Scheme("attention_logits", bits=4))
    for context in (functools.partial(other_weights, model), quantized):
        ours = run(model, tokenizer, task, 1, context)
        made = evaluation(f"choice:{questions}", model, tokenizer)
        theirs = made.run(context, batch_size=1)
        np.testing.assert_array_equal(ours.items["acc"], theirs.items["correct"])
        np.testing.assert_array_equal(ours.items["acc_norm"], theirs.items["correct_norm"])
        for one, other in zip(ours.metrics, theirs.metrics, strict=True):
            assert one.stderr == pytest.approx(other.stderr)


def test_padding_does_not_count_in_a_dynamic_range(tokenizer, tmp_path, questions):
    model = tiny_llama(max_position_embeddings=1024)
    path = write_task(tmp_path, questions, template=ROLLING)
    context = functools.partial(fake_quantize, model, Scheme("attention_logits", bits=6))
    one, many = (run(model, tokenizer, path, size, context) for size in (1, 12))
    np.testing.assert_allclose(
        one.items["word_perplexity"], many.items["word_perplexity"], rtol=1e-4
    )


def test_first_documents(model, tokenizer, task):
    whole = evaluation(f"lm-eval:{task}", model, tokenizer)
    part = evaluation(f"lm-eval:{task}@5", model, tokenizer)
    assert (whole.total, part.total) == (len(QUESTIONS), 5)
    assert whole.data != part.data
    outcome = part.run(batch_size=2)
    assert outcome.metrics[0].count == 5
    np.testing.assert_array_equal(outcome.items["acc"], whole.run(batch_size=2).items["acc"][:5])


def test_the_fingerprint_is_that_of_what_is_asked(model, tokenizer, tmp_path, questions):
    def fingerprint(rows, template=TASK):
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        folder.mkdir()
        path = write_task(folder, write_rows(folder / "rows.jsonl", rows), template=template)
        return evaluation(f"lm-eval:{path}", model, tokenizer).data

    one = fingerprint(QUESTIONS[:3])
    assert fingerprint(QUESTIONS[:3]) == one
    changed = [*QUESTIONS[:2], QUESTIONS[2] | {"gold": 1 - QUESTIONS[2]["gold"]}]
    others = [
        fingerprint(QUESTIONS[:4]),
        fingerprint(changed),
        fingerprint(QUESTIONS[:3], TASK.replace("{{query}}", "Q: {{query}}")),
        fingerprint(QUESTIONS[:3], TASK + "num_fewshot: 1\n"),
    ]
    assert len({one, *others}) == 5


OWN = """
from functools import partial

class Rule:
    pass

class Judge(Rule):
    def __call__(self):
        return 0.0

rule, judge = Rule(), Judge()

def kept(docs, first):
    return docs.select(range(first, len(docs)))

some = partial(kept, first={first})

def asked(doc):
    return doc["query"]

def filtered(resps, docs):
    return [one[{filtered}:] for one in resps]
"""
OWN_TASK = f"""
{TASK.replace('"{{{{query}}}}"', "!function own.asked").strip()}
process_docs: !function own.some
filter_list:
  - name: none
    filter:
      - function: custom
        filter_fn: !function own.filtered
        objects: [!function own.rule, !function own.judge]
"""


def test_functions_of_a_task_are_told_by_their_source_and_not_by_where_they_lie(
    model, tokenizer, tmp_path, questions
):
    kept = []  # or the functions of the next module would lie where those of the last one lay

    def fingerprint(**change):
        (tmp_path / "own.py").write_text(OWN.format(**{"first": 2, "filtered": 0} | change))
        path = write_task(tmp_path, questions, template=OWN_TASK)
        made = evaluation(f"lm-eval:{path}", model, tokenizer)
        kept.append((made, sys.modules.pop(str(tmp_path / "own"))))
        return made.data

    one = fingerprint()
    assert fingerprint() == one
    assert len({one, fingerprint(first=3), fingerprint(filtered=1)}) == 3


def test_groups_come_first_and_tasks_are_named(model, tokenizer, tmp_path, questions):
    other = write_rows(tmp_path / "other.jsonl", QUESTIONS[:5])
    write_task(tmp_path, questions, name="one")
    write_task(tmp_path, other, name="two")
    (tmp_path / "both.yaml").write_text(
        "group: both\ntask: [one, two]\n"
        "aggregate_metric_list: [{metric: acc, aggregation: mean, weight_by_size: true}]\n"
    )
    outcome = run(model, tokenizer, tmp_path / "both.yaml")
    assert [metric.name for metric in outcome.metrics] == [
        "both:acc", "one:acc", "one:acc_norm", "two:acc", "two:acc_norm",
    ]  # fmt: skip
    counts = [metric.count for metric in outcome.metrics]
    assert counts == [len(QUESTIONS) + 5] + [len(QUESTIONS)] * 2 + [5] * 2
    assert outcome.items["two:acc"].shape == (5,)


def test_model_tokenizer_and_process_are_left_as_they_were(tmp_path, questions, task):
    model = tiny_llama(max_position_embeddings=1024, tie_word_embeddings=True).train()
    # Not tied in truth: lm-eval would tie it.
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone() * 1.5)
    tokenizer = tiny_tokenizer()
    tokenizer.pad_token = None
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    random.seed(5)
    np.random.seed(5)
    torch.manual_seed(5)
    states = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    level = logging.getLogger("lm_eval").level
    run(model, tokenizer, task)
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, weights[name], rtol=0, atol=0)
    assert model.training
    assert "tie_weights" not in vars(model)
    assert tokenizer.pad_token is None
    assert states == (
        random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist(),
    )  # fmt: skip
    assert logging.getLogger("lm_eval").level == level


def test_tells_progress_and_stops(model, tokenizer, task):
    told = []
    run(model, tokenizer, task, 3, progress=told.append)
    assert sum(told) == len(QUESTIONS)
    assert max(told) < len(QUESTIONS)
    with pytest.raises(Stopped):
        run(model, tokenizer, task, 3, stop=lambda: True)


def test_values_that_are_not_finite_are_refused(tokenizer, tmp_path, questions):
    model = tiny_llama()
    with torch.no_grad():
        model.lm_head.weight.mul_(torch.nan)
    path = write_task(tmp_path, questions, template=ROLLING)
    with pytest.raises(QuantizationError, match="is not finite"):
        run(model, tokenizer, path)


def test_bad_tasks(model, tokenizer, tmp_path, questions):
    with pytest.raises(UsageError, match="names no task"):
        run(model, tokenizer, "")
    with pytest.raises(UsageError, match=r"there is no task file none\.yaml"):
        run(model, tokenizer, "none.yaml")
    broken = tmp_path / "broken.yaml"
    missing = TASK.format(name="broken", data=tmp_path / "none.jsonl")
    for content in ("task: [", missing, "nothing: here\n"):
        broken.write_text(content)
        with pytest.raises(UsageError, match="lm-eval cannot load") as error:
            run(model, tokenizer, broken)
        assert "\n" not in str(error.value)
    row = {"query": "q", "choices": ["a" * 2000, "b"], "gold": 0}
    long = write_rows(tmp_path / "long.jsonl", [row])
    with pytest.raises(UsageError, match="the likelihood of 2001 tokens"):
        run(model, tokenizer, write_task(tmp_path, long, name="long"))
    unsafe = write_task(tmp_path, questions, name="unsafe", template=TASK + "unsafe_code: true\n")
    with pytest.raises(UsageError, match="runs code that the model writes"):
        run(model, tokenizer, unsafe)


def test_what_is_too_long_is_cut_from_the_left(tokenizer, tmp_path):
    model = tiny_llama(max_position_embeddings=24)
    rows = [{"query": f"{'q' * i} the land", "choices": ["ab", "c"], "gold": 0} for i in (3, 40)]
    path = write_task(tmp_path, write_rows(tmp_path / "rows.jsonl", rows))
    theirs = run_lm_eval(model, tokenizer, path)
    with pytest.warns(CutWarning, match=r"own\.yaml: 2 of 4 requests .* context of 24 tokens"):
        *ours, cut = run(model, tokenizer, path).metrics
    assert [metric.value for metric in ours] == [
        theirs["results"]["own"][key] for key in ("acc,none", "acc_norm,none")
    ]
    assert (cut.name, cut.value, cut.stderr, cut.count) == ("cut", 0.5, None, 4)


def test_cut_texts_to_go_on_from_are_told_too(tokenizer, tmp_path):
    model = tiny_llama(max_position_embeddings=24)
    # Four tokens are to be written, so that twenty remain for the text.
    rows = [{"query": "q" * length, "choices": ["a"], "gold": 0} for length in (19, 20, 21, 40)]
    lengths = [len(tokenizer(row["query"])["input_ids"]) for row in rows]
    data = write_rows(tmp_path / "rows.jsonl", rows)
    path = write_task(tmp_path, data, template=GENERATION)
    expected = sum(length > 20 for length in lengths)
    assert 0 < expected < len(rows)
    for batch_size in (1, 4):
        with pytest.warns(CutWarning, match=f"{expected} of 4 requests were cut"):
            outcome = run(model, tokenizer, path, batch_size)
        assert outcome.metrics[-1].value == expected / 4


def test_nothing_is_said_of_cuts_where_there_are_none(tokenizer, tmp_path):
    """Also of texts that lm-eval reads piece by piece."""
    model = tiny_llama(max_position_embeddings=24)
    data = write_rows(tmp_path / "rows.jsonl", [{"query": "the land " * 20}])
    path = write_task(tmp_path, data, template=ROLLING)
    with warnings.catch_warnings():
        warnings.simplefilter("error", CutWarning)
        names = [metric.name for metric in run(model, tokenizer, path).metrics]
    assert names == ["word_perplexity", "byte_perplexity"]


def test_what_tasks_print_is_not_on_stdout(model, tokenizer, tmp_path, questions, capsys):
    (tmp_path / "talking.py").write_text(
        "print('imported')\n"
        "def asked(doc):\n    print('asked')\n    return doc['query']\n"
        "def judged(doc, results):\n    print('judged')\n    return {'acc': 1.0}\n"
    )
    template = TASK.replace('"{{{{query}}}}"', "!function talking.asked")
    template = template.partition("  - {{metric: acc_norm")[0]
    template += "process_results: !function talking.judged\n"
    path = write_task(tmp_path, questions, template=template)
    assert run(model, tokenizer, path).metrics[0].value == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert {"imported", "asked", "judged"} <= set(err.splitlines())


def test_without_lm_eval(model, tokenizer, task, monkeypatch):
    for name in ("lm_eval", "lm_eval.tasks"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(MissingExtraError, match=r"pip install 'quantdiff\[eval\]'"):
        run(model, tokenizer, task)


def test_settings_are_json(model, tokenizer, task):
    made = evaluation(f"lm-eval:{task}@3", model, tokenizer)
    assert json.loads(json.dumps(made.settings)) == made.settings
    assert made.settings["limit"] == 3
