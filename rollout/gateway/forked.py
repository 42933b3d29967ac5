"""A gateway process behind a process that has its libraries, and starts it again by a fork.

    imports everything ──► fork ──► serves ──► killed ──► fork ──► serves ──► ends ──► ends with its exit code
    (seconds of a core)             (a child)             (no imports)

The parent only waits. A child that was killed has said nothing about its input, and leaves its sessions in
the journal. Whatever else ends it is for the starter of both.
"""

import logging
import os
import signal
from collections.abc import Callable
from contextlib import suppress

from slipstream.rollout.system.linux import PR_SET_PDEATHSIG, prctl
from slipstream.rollout.system.restarts import RestartLimit, Restarts

log = logging.getLogger(__name__)

LIMIT = RestartLimit("the gateway", allowed=10, window_s=3600.0, progress="it has not served", same=None)
"""Restarts by a fork. Beyond them the starter decides, whose limit is the recipe's."""

SIGNALS = (signal.SIGTERM, signal.SIGINT)


def run_forked(serve: Callable[[], int]) -> int:
    """Run ``serve`` in a child, and again after each child that was killed. Return the exit code.

    The child gets the signals to end that this process gets, and dies with it.
    """
    ends = False
    child = 0

    def forward(number: int, _frame: object) -> None:
        nonlocal ends
        ends = ends or number == signal.SIGTERM
        with suppress(ProcessLookupError):
            os.kill(child, number)

    restarts = Restarts(LIMIT)
    while True:
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)  # until both know what to do with them
        parent = os.getpid()
        child = os.fork()
        if child == 0:
            _serve_as_child(serve, parent)
        for number in SIGNALS:
            signal.signal(number, forward)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if code >= 0 or ends:
            return abs(code)
        failure = f"it has ended by signal {-code}"
        if (refused := restarts.refused(failure)) is not None:
            log.error("the gateway %s", refused)
            return 1
        log.warning("the gateway is started again by a fork: %s", failure)


def _serve_as_child(serve: Callable[[], int], parent: int) -> None:
    """Run ``serve``, and end this process with its exit code."""
    code = 1
    try:
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() == parent:  # else the parent has died before
            for number in SIGNALS:
                signal.signal(number, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
            code = serve()
    except BaseException:
        log.exception("the gateway has failed")
    finally:
        logging.shutdown()
        os._exit(code)
