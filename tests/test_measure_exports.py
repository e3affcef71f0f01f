"""The tables of docs/export.md: each text and dtype has its own, with digits enough."""

import importlib
import json
import sys
from pathlib import Path

import pytest

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


def test_results_of_another_text_are_not_those_asked_for(main):
    asked = ("tiny", "--formats", "bf16", "--seq-len", "32", "--tokens")
    main(*asked, "64")
    for other in (("96",), ("64", "--dtype", "bfloat16")):
        with pytest.raises(pytest.fail.Exception, match="tiny is measured"):
            main(*asked, *other)
