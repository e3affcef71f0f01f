"""Mistakes on the command line: one line, and where the options are told of."""

import pytest

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


def test_ctrl_c(run, monkeypatch):
    def interrupt():
        raise KeyboardInterrupt

    monkeypatch.setattr("quantdiff.models.known_names", interrupt)
    assert run("models")[0] == 130
