"""The command `tl-posgen`: parses words, calls the library, prints. No arithmetic here."""

import io
import os
import signal
import sys
from typing import Any

from tl_posgen.errors import PosgenError


class _Stopped(SystemExit):
    """Ctrl-C, or the system's wish that the process end: what is half written is removed on the way out."""

    def __init__(self, number: int):
        super().__init__(128 + number)  # as shells say it
        self.name = signal.Signals(number).name


def main() -> None:
    """Entry point: what a user can mend is one line on stderr and exit code 2, never a traceback."""

    def stop(number: int, frame: Any) -> None:
        raise _Stopped(number)

    for stream, errors in ((sys.stdout, "replace"), (sys.stderr, "backslashreplace")):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors=errors)  # a terminal that has no "•", a name that is no UTF-8
    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        from tl_posgen.cli.commands import name_options, run

        words = sys.argv[1:]
        try:
            code = run(words)
            sys.stdout.flush()
            sys.exit(code)
        except BrokenPipeError:  # `| head` has read enough
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # Python flushes stdout once more at its end
            sys.exit(1)
        except (PosgenError, OSError) as error:  # OSError: what the system says of a path
            print("error:", *name_options(str(error), "".join(words[:1])).splitlines(), file=sys.stderr)
        sys.exit(2)
    except _Stopped as error:
        print(f"\nstopped by {error.name}", file=sys.stderr)
        raise
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
