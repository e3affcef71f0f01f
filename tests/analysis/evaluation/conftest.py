import contextlib
import json

import pytest
import torch

from tests.tiny import tiny_llama, tiny_tokenizer

WORDS = "the theatre in another land, and the winter rain over the thin sand; then an inner thread "


@pytest.fixture(scope="session")
def model():
    return tiny_llama(max_position_embeddings=1024)


@pytest.fixture(scope="session")
def tokenizer():
    return tiny_tokenizer()


@pytest.fixture(scope="session")
def text(tmp_path_factory):
    """A `--data` value of about 700 tokens."""
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("".join(f"{i} {WORDS}{chr(945 + i)}\n" for i in range(12)), encoding="utf-8")
    return str(path)


@contextlib.contextmanager
def other_weights(model, noise=0.02):
    """A context in which the model computes otherwise, by as much whatever the batch."""
    kept = {name: p.detach().clone() for name, p in model.named_parameters()}
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(noise * torch.randn(p.shape, generator=generator).to(p))
    try:
        yield
    finally:
        with torch.no_grad():
            for name, p in model.named_parameters():
                p.copy_(kept[name])


def plain_logits(model, ids):
    """Logits of one sequence by itself, (n, V) fp64."""
    with torch.no_grad():
        return model(torch.as_tensor(ids)[None]).logits[0].double()


QUESTIONS = [
    {
        "query": f"The {thing} in the {place} is",
        "choices": [f"{thing} {i}", "another thing entirely", f"the {place}", "thin"][: 2 + i % 3],
        "gold": i % 2,
    }
    for i, (thing, place) in enumerate(
        (thing, place)
        for thing in ("thread", "winter’s hand", "theory", "ünner — land")
        for place in ("theatre", "rain", "sand")
    )
]


def write_rows(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


@pytest.fixture(scope="session")
def questions(tmp_path_factory):
    return write_rows(tmp_path_factory.mktemp("questions") / "questions.jsonl", QUESTIONS)


TASK = """
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: "{data}"}}, cache_dir: "{data}.cache"}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{query}}}}"
doc_to_choice: choices
doc_to_target: gold
metric_list:
  - {{metric: acc, aggregation: mean, higher_is_better: true}}
  - {{metric: acc_norm, aggregation: mean, higher_is_better: true}}
"""


def write_task(folder, data, name="own", template=TASK):
    """A local task file of lm-eval."""
    path = folder / f"{name}.yaml"
    path.write_text(template.format(name=name, data=data), encoding="utf-8")
    return path


def run_lm_eval(model, tokenizer, path, batch_size=1, **options):
    """lm-eval's own run of a local task file."""
    import lm_eval
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=str(path.parent), include_defaults=False)
    model = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=batch_size, **options)
    return lm_eval.simple_evaluate(model=model, tasks=[path.stem], task_manager=manager)
