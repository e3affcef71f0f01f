"""What the tests of the commands share."""

import sys

import pytest

from quantdiff.cli import main


@pytest.fixture
def run(monkeypatch, capsys):
    """Run the command line in this process: exit code, stdout, stderr."""

    def run(*arguments):
        capsys.readouterr()  # what the test itself wrote before
        monkeypatch.setattr(sys, "argv", ["quantdiff", *map(str, arguments)])
        try:
            main()
            code = 0
        except SystemExit as exit_:
            code = exit_.code or 0
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


def refused(result, *words):
    """Exit code 2, one sentence on stderr that has the words, no traceback."""
    code, out, err = result
    assert code == 2, (code, out, err)
    lines = [line for line in err.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1, err
    assert "Traceback" not in err
    for word in words:
        assert word in lines[0]
