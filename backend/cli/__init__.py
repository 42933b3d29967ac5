"""Starts ``slipstream``. The command line itself is ``app``, whose imports take a while."""

import os
import signal
import sys

INTERRUPTED = 130
"""Exit code of a command that Ctrl-C has ended, as shells give it."""


def main() -> None:
    """Run the command line. The user's own workflows and rewards are importable from where it is called.

    Ctrl-C ends it at once while it imports its commands: nothing is started yet, and Python would show where
    in an import it was. Afterwards Ctrl-C is KeyboardInterrupt again, which commands clean up after.
    """
    is_default = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if is_default:  # and not ignored, as in a background job of a script
        signal.signal(signal.SIGINT, lambda *_: os._exit(INTERRUPTED))
    from slipstream.backend.cli.app import run

    try:
        if is_default:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        run()
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
