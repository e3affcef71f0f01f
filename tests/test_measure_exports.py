"""The tables of docs/export.md: each text and dtype has its own, with digits enough."""

import importlib
import json
import sys
from pathlib import Path

import pytest
import torch

import quantdiff
from quantdiff.analysis.sweep.identity import model_fingerprint
from quantdiff.errors import VerificationError
from quantdiff.export import Exported, Verification
from quantdiff.export.verifying import Check
from tests.tiny import tiny_llama, tiny_tokenizer

SCRIPTS = Path(__file__).parent.parent / "scripts"
COMMAND = "python scripts/measure_exports.py tiny --tokens"


def row(tokens, *, kl, agreement):
    return {
        "model": "tiny", "format": "bf16", "reload": "the logits from before, to the bit",
        "parameters": 100, "source_bytes": 400, "bytes": 200, "bits_per_weight": 16.0,
        "asked": {"dtype": "float32", "data": "corpus", "tokens": tokens, "seq_len": 32},
        "command": f"{COMMAND} {tokens}",
        "measured": {
            "data": f"{tokens} tokens of corpus in windows of 32", "source": {"perplexity": 2.0},
            "perplexity": 2.5, "kl": kl, "agreement": agreement,
        },
    }  # fmt: skip


@pytest.fixture
def main(tmp_path, monkeypatch):
    """The script on a page of its own; gives the page."""
    monkeypatch.syspath_prepend(SCRIPTS)
    script = importlib.import_module("measure_exports")
    monkeypatch.setattr(script, "DOCS", tmp_path)
    monkeypatch.setattr(script, "load", lambda name, **_: pytest.fail(f"{name} is measured"))
    page = tmp_path / "export.md"
    page.write_text(f"before\n{script.BEGIN}\n{script.END}\nafter")
    rows = row(64, kl=0.01, agreement=0.99996), row(128, kl=2.5e-7, agreement=1.0)
    (tmp_path / "results.jsonl").write_text("".join(json.dumps(one) + "\n" for one in rows))

    def main(*arguments):
        monkeypatch.setattr(sys, "argv", ["measure_exports.py", *arguments])
        script.main()
        return page.read_text()

    return lambda *arguments: main("--out", str(tmp_path), *arguments)


def test_each_text_has_a_table_and_a_footer(main):
    told = main("--table-only")
    assert told.count("| tiny | source | 0.0 | 32.00 | 2.000 | | | |") == 2
    for tokens, digits in ((64, "0.01000 | 99.996%"), (128, "2.500e-07 | 100.00%")):
        assert f"| | bf16 | 0.0 | 16.00 | 2.500 | {digits} | to the bit |" in told
        data = f"{tokens} tokens of corpus in windows of 32"
        footer = f"Measured on {data}, from float32, by `{COMMAND} {tokens}`. Weights alone are"
        assert footer in told


class Exports:
    """In the place of `quantdiff.export`: tells what was asked for, and measures nothing."""

    def __init__(self):
        self.asked, self.failing = [], ()

    def __call__(self, model, tokenizer, out, *, format, measure):
        self.asked.append(format)
        if format in self.failing:
            raise VerificationError(f"{format} does not reload")
        check = Check("logits", True, "the logits from before, to the bit")
        measured = row(64, kl=0.5, agreement=0.25)["measured"]
        return Exported("out", format, "tiny", 100, 200, 400, "float32", (), measured,
                        Verification("out", [check]))  # fmt: skip


@pytest.fixture
def exports(main, monkeypatch):
    """Tiny models under the name of `tiny`, by their seed; what is exported of them."""
    script, made = sys.modules["measure_exports"], Exports()
    monkeypatch.setattr(quantdiff, "export", made)
    monkeypatch.setattr(script, "measuring", lambda *_: (None, 0))

    def exports(*arguments, seed=0, failing=()):
        model = tiny_llama(seed=seed)
        monkeypatch.setattr(script, "load", lambda name, dtype: (
            model.to(getattr(torch, dtype)), tiny_tokenizer()
        ))  # fmt: skip
        made.asked, made.failing = [], failing
        told = main("tiny", "--seq-len", "32", *arguments)
        return made.asked, told

    return exports


ONE = ("--formats", "bf16", "--tokens")


def test_results_of_another_text_are_not_those_asked_for(exports):
    assert exports(*ONE, "64")[0] == ["bf16"]
    assert exports(*ONE, "64")[0] == []
    for other in (("96",), ("64", "--dtype", "bfloat16")):
        assert exports(*ONE, *other)[0] == ["bf16"]
        assert exports(*ONE, *other)[0] == []
    assert exports(*ONE, "64")[0] == []


def test_results_of_other_weights_are_replaced(exports, tmp_path):
    """Rows without a fingerprint, which are there from the start, are of nobody knows what."""
    both = ("--formats", "bf16", "fp16", "--tokens", "64")
    asked, told = exports(*both)
    assert asked == ["bf16", "fp16"]
    assert "99.996%" not in told
    assert told.count("| | bf16 |") == told.count("| | fp16 |") == 1
    asked, told = exports(*ONE, "64", seed=1)
    assert asked == ["bf16"]
    assert told.count("| | bf16 |") == 1
    assert "| | fp16 |" not in told
    rows = [json.loads(line) for line in (tmp_path / "results.jsonl").open()]
    assert [one["model_fingerprint"] for one in rows] == [
        model_fingerprint(tiny_llama(seed=1), tiny_tokenizer())
    ]
    assert exports(*both)[0] == ["bf16", "fp16"]


def test_results_of_other_versions_are_replaced(exports, tmp_path, monkeypatch):
    exports(*ONE, "64")
    script = sys.modules["measure_exports"]
    monkeypatch.setattr(script, "deciding_versions", lambda: {"quantdiff": "another"})
    asked, told = exports(*ONE, "64")
    assert asked == ["bf16"]
    assert told.count("| | bf16 |") == 1
    rows = [json.loads(line) for line in (tmp_path / "results.jsonl").open()]
    assert [one["versions"] for one in rows] == [{"quantdiff": "another"}]


def test_a_format_that_does_not_reload_stops_no_other(exports, tmp_path, capsys):
    with pytest.raises(SystemExit) as exit_:
        exports("--formats", "bf16", "fp16", "--tokens", "64", failing=["bf16"])
    assert exit_.value.code == 1
    assert "tiny bf16: bf16 does not reload" in capsys.readouterr().out
    told = (tmp_path / "export.md").read_text()
    assert "| | fp16 |" in told
    assert "| | bf16 |" not in told
