"""`quantdiff models` as a user runs it."""

import json
import sys

import pytest

from quantdiff.cli import main
from quantdiff.models import known_names


@pytest.fixture
def run(monkeypatch, capsys):
    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["quantdiff", "models", *arguments])
        with pytest.raises(SystemExit) as exit_:
            main()
        assert not exit_.value.code
        return capsys.readouterr().out

    return run


def test_names_and_families_are_listed(run):
    out = run()
    for word in (*known_names(), "diffllama", "MultiheadFlashDiff1", "halves", "by its config"):
        assert word in out


def test_json(run):
    content = json.loads(run("--json"))
    assert content["names"] == list(known_names())
    assert content["families"]["model type"]["diffllama"] == "halves"
