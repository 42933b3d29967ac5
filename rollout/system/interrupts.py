"""Ctrl-C in a program that somebody calls: before it has started anything, and in its work."""

import os
import signal
import sys
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

INTERRUPTED = 130
"""Exit code of a program that Ctrl-C has ended, as shells give it."""


def end_at_once() -> None:
    """Let Ctrl-C end this process without a word, until ``attended``. Called before the program's imports.

    Python would raise KeyboardInterrupt in the midst of an import, and show where. Nothing is started yet.
    Does nothing where Ctrl-C is ignored, as in a background job of a script.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _end)


def attended(work: Callable[[], T]) -> T:
    """Return the result of ``work``, in which Ctrl-C is KeyboardInterrupt. It ends the process if nobody has
    caught it.
    """
    try:
        if signal.getsignal(signal.SIGINT) is _end:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        return work()
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)


def _end(*_: object) -> None:
    os._exit(INTERRUPTED)
