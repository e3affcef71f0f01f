"""The command line: one file a command."""

import os
import sys

from quantdiff.cli.common import app, warnings_as_notes
from quantdiff.errors import UsageError

__all__ = ["main"]


def main() -> None:
    """Run the command line; a user's mistake ends with one line on stderr and exit code 2."""
    # They register themselves.
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
            app(prog_name="quantdiff")
    except UsageError as error:
        sys.stderr.write(f"error: {error}\n")
        sys.exit(2)
    except BrokenPipeError:  # the reader, for example head, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
