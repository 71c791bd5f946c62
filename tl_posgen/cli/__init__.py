"""The command `tl-posgen`: parses words, calls the library, prints. No arithmetic here."""

import sys

from tl_posgen.errors import PosgenError


def main() -> None:
    """Entry point: what a user can mend is one line on stderr and exit code 2, never a traceback."""
    from tl_posgen.cli.commands import app

    try:
        app()
    except PosgenError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
