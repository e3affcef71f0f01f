"""Mistakes on the command line: one line, and where the options are told of."""

import sys

import pytest

from quantdiff.cli.common import command_line
from tests.cli.conftest import refused


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            ["profile", "m", "--token", 4],
            ["No such option: --token", "see quantdiff profile --help"],
        ),
        (["profile", "m", "--tokens", "x"], ["'--tokens'", "see quantdiff profile --help"]),
        (["profile", "m", "--detail", "x"], ["'--detail'", "see quantdiff profile --help"]),
        (["profile", "m", "--batch-size", 0], ["'--batch-size'", "see quantdiff profile --help"]),
        (["export", "m", "--format", "bf16"], ["'--out'", "see quantdiff export --help"]),
        (["profile"], ["MODEL", "see quantdiff profile --help"]),
        (["models", "m"], ["unexpected extra argument", "see quantdiff models --help"]),
        (["guess"], ["No such command 'guess'", "see quantdiff --help"]),
    ],
)
def test_one_line(run, arguments, words):
    result = run(*arguments)
    refused(result, *words)
    assert result[1] == ""
    assert len(result[2].splitlines()) == 1


def test_help(run):
    code, shown, err = run("--help")
    assert (code, err) == (0, "")
    assert "export" in shown
    code, shown, err = run()
    assert code == 2
    assert "export" in shown + err
    assert "error: " not in shown + err


@pytest.mark.parametrize("program", ["/usr/bin/quantdiff", "/site-packages/quantdiff/__main__.py"])
def test_the_command_of_the_record_can_be_typed(monkeypatch, program):
    """Whether Python was given the module, as torchrun does too, or the command was."""
    monkeypatch.setattr(sys, "argv", [program, "export", "a model"])
    assert command_line() == "quantdiff export 'a model'"


def test_ctrl_c(run, monkeypatch):
    def interrupt():
        raise KeyboardInterrupt

    monkeypatch.setattr("quantdiff.models.known_names", interrupt)
    assert run("models")[0] == 130
