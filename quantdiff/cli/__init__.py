"""The command line: one file per command."""

import os
import sys
from typing import Any

import typer

from quantdiff.cli.common import app, warnings_as_notes
from quantdiff.errors import UsageError, VerificationError

__all__ = ["main"]

# The parser's base class of option errors, which no version of typer exports by name.
_OptionError: Any = typer.BadParameter.__base__


def main() -> None:
    """Run the command line; a user's mistake gives one line on stderr and exit code 2."""
    # Importing them registers the commands.
    from quantdiff.cli import (  # noqa: F401
        calibrate,
        compare,
        convert,
        demo,
        export,
        models,
        profile,
        sweep,
        verify,
    )

    try:
        with warnings_as_notes():
            # Without arguments the help is shown. With arguments, standalone typer would print a
            # mistake in a box and not raise it.
            code = app(prog_name="quantdiff", standalone_mode=len(sys.argv) < 2)
    except UsageError as error:
        sys.stderr.write(f"error: {error}\n")
        sys.exit(2)
    except VerificationError as error:
        sys.stderr.write(f"error: {error}\n")
        sys.exit(1)
    except _OptionError as error:
        sys.stderr.write(f"error: {_in_one_line(error)}\n")
        sys.exit(2)
    except typer.Abort:
        sys.stderr.write("aborted\n")
        sys.exit(1)
    except BrokenPipeError:  # the reader, for example head, has stopped reading
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    sys.exit(code)


def _in_one_line(error: Any) -> str:
    """The option parser's error, and where the options are documented."""
    command = "quantdiff COMMAND" if error.ctx is None else error.ctx.command_path
    return f"{' '.join(error.format_message().split()).rstrip('.')}; see {command} --help"
