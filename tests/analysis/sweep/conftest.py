import pytest

from quantdiff.analysis.evaluation import Text
from quantdiff.analysis.sweep import make_grid, sweep
from quantdiff.analysis.sweep.record import write_record
from quantdiff.analysis.sweep.results import ResultsFile
from tests.analysis.sweep import counted
from tests.tiny import save_tiny, tiny_diffllama, tiny_llama, tiny_tokenizer

WORDS = "the king and the sea and the whale in the winter "


@pytest.fixture
def known():
    """The evaluation `counted`, for one test."""
    unregister = counted.register()
    yield counted
    unregister()


@pytest.fixture(scope="session")
def folders(tmp_path_factory):
    """Two models and their tokenizer, in folders."""
    top = tmp_path_factory.mktemp("models")
    return [
        str(save_tiny(top / "plain", tiny_llama())),
        str(save_tiny(top / "diff", tiny_diffllama())),
    ]


@pytest.fixture(scope="session")
def text(tmp_path_factory):
    """Text of its own, in short windows."""
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text(WORDS * 20)
    return Text(str(path), tokens=96, seq_len=24)


@pytest.fixture
def live():
    """A model in memory, as `sweep` takes it."""
    return tiny_llama(), tiny_tokenizer(), "live"


@pytest.fixture
def small(text, tmp_path, known):
    """Run a sweep of two widths with `counted`, or what else is asked for."""

    def small(models, *, bits=(16, 4), evaluations=("counted",), out=tmp_path / "out", **options):
        axes = {name: options.pop(name) for name in ("ranges", "granularities", "symmetric")
                if name in options}  # fmt: skip
        schemes = make_grid(bits=bits, **axes).schemes
        options = {"text": text} | options
        return sweep(models, schemes, evaluations, out=out, **options)

    return small


def row(cell, model, way=None, bits=16, **rest):
    """A line of results.jsonl; `way` is (range, granularity, symmetric)."""
    site, options = (None, {}) if way is None else ("attention_logits", {"symmetric": way[2]})
    return {
        "cell": cell, "model": model, "scheme": "fp" if way is None else f"L{bits}", "site": site,
        "bits": bits, "range": way and way[0], "granularity": way and way[1], "options": options,
        "causal": True, "eval": "perplexity", "metric": "perplexity", "value": 10.0,
        "stderr": 0.5, "count": 100, "data": "d", "seconds": 1.0, "status": "ok",
    } | rest  # fmt: skip


def write_sweep(folder, rows):
    """A folder of results that were never computed."""
    folder.mkdir(parents=True, exist_ok=True)
    cells: dict = {}
    for line in rows:
        cells.setdefault(line["cell"], []).append(line)
    about = {"evaluations": {}, "calibration": None}
    write_record(folder, {
        "format": "quantdiff.sweep/1", "models": {line["model"]: about for line in rows},
        "cells": list(cells), "asked": list(cells), "versions": {}, "commands": [],
    })  # fmt: skip
    file = ResultsFile(folder)
    for lines in cells.values():
        file.append(lines, {} if lines[0]["status"] == "ok" else None)
    return folder
