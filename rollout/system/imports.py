"""Asks a process of its own about user code: an import may hang, exit or crash, and the asker goes on.

request ──► child process that imports ──► one frame of JSON for each question
                                                │
        ended, with all that it has started ◄───┘ the last answer, a time-out, or its end
"""

import json
import os
import socket
import subprocess
import sys
from enum import Enum
from typing import Any

from slipstream.rollout.system.plugins import resolve
from slipstream.rollout.system.programs.start import kept, python_calling
from slipstream.rollout.system.stream import framed, receive

START_TIMEOUT_S = 60.0
"""Seconds for the start of the process, which are spent on imports of Slipstream itself."""

END_S = 8.0
"""Seconds for a keeper to end everything. Then it is killed itself, and the process with it."""


class ImportEnding(Enum):
    """Why a question has no answer."""

    ENDED = "the process has ended"
    LATE = "the time is over"


def ask(
    answers_to: str, request: bytes, count: int, timeout_s: float
) -> tuple[list[Any], ImportEnding | None]:
    """Call a function in a process of its own, and return up to ``count`` of its answers in order.

    ``answers_to``: import path of the function, which yields the answers to ``request`` as plain data.
    ``timeout_s``: seconds for each answer. The second value says why there are fewer; None: all are there.
    """
    (ours, theirs), (lifeline, kept_lifeline) = socket.socketpair(), socket.socketpair()
    with ours, lifeline:
        with theirs, kept_lifeline:
            inherited = theirs.fileno(), kept_lifeline.fileno()
            serving = python_calling("slipstream.rollout.system.imports.serve", answers_to, inherited[0])
            process = subprocess.Popen(
                kept(serving, inherited[1]),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=inherited,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
                start_new_session=True,
            )
        try:
            return _asked(ours, request, count, timeout_s)
        finally:
            lifeline.close()  # the keeper takes it for the end of this process
            try:
                process.wait(END_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _asked(
    connection: socket.socket, request: bytes, count: int, timeout_s: float
) -> tuple[list[Any], ImportEnding | None]:
    answers: list[Any] = []
    try:
        connection.settimeout(START_TIMEOUT_S)
        connection.sendall(framed(request))
        if receive(connection) is None:
            return answers, ImportEnding.ENDED
        connection.settimeout(timeout_s)
        while len(answers) < count:
            if (answer := receive(connection)) is None:
                return answers, ImportEnding.ENDED
            answers.append(json.loads(answer))
    except TimeoutError:
        return answers, ImportEnding.LATE
    except ConnectionError:
        return answers, ImportEnding.ENDED
    return answers, None


def serve(answers_to: str, descriptor: int) -> None:
    """Run the process: answer the request that comes over the socket ``descriptor``."""
    os.set_inheritable(descriptor, False)
    connection = socket.socket(fileno=descriptor)
    answering = resolve(answers_to)
    request = receive(connection)
    if request is None:
        return
    connection.sendall(framed(b"started"))
    for answer in answering(request):
        connection.sendall(framed(json.dumps(answer).encode()))
    os._exit(0)  # threads of user code must not hold the process up
