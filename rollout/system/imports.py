"""Asks a process of its own about user code: an import may hang, exit or crash, and the asker goes on.

request ──► child process that imports ──► one line of JSON for each question
                                                │
      killed, with all of its session ◄─────────┘ the last answer, a time-out, or its end
"""

import io
import json
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from enum import Enum
from typing import IO, Any

from slipstream.rollout.system.linux import PR_SET_PDEATHSIG, prctl

START_TIMEOUT_S = 60.0
"""Seconds for the start of the process, which are spent on imports of Slipstream itself."""


class ImportEnding(Enum):
    """Why a question has no answer."""

    ENDED = "the process has ended"
    LATE = "the time is over"


def ask(module: str, request: bytes, count: int, timeout_s: float) -> tuple[list[Any], ImportEnding | None]:
    """Run ``module``, whose ``main`` is ``serve``, and return up to ``count`` answers in order.

    ``timeout_s``: seconds for each answer. The second value says why there are fewer; None: all are there.
    """
    process = subprocess.Popen(
        [sys.executable, "-m", module, str(os.getpid())],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        start_new_session=True,
    )
    assert process.stdin is not None and process.stdout is not None
    lines: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(process.stdout, lines), name="import check", daemon=True).start()
    answers: list[Any] = []
    try:
        with suppress(BrokenPipeError), process.stdin:
            process.stdin.write(request)
        started = lines.get(timeout=START_TIMEOUT_S)
        while started and len(answers) < count:
            line = lines.get(timeout=timeout_s)
            if not line:
                break
            answers.append(json.loads(line))
    except queue.Empty:
        return answers, ImportEnding.LATE
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    return answers, None if len(answers) == count else ImportEnding.ENDED


def _read(stream: IO[bytes], lines: "queue.SimpleQueue[bytes]") -> None:
    """Hand over each line, and an empty one at the end."""
    for line in stream:
        lines.put(line)
    lines.put(b"")


def serve(answers_to: Callable[[bytes], Iterator[object]]) -> None:
    """Be that process: answer the request on the standard input, and end with the asker.

    What user code prints goes to the standard error, and what it reads from the standard input is empty.
    """
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(sys.argv[1]):
        return
    request = sys.stdin.buffer.read()
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    sys.stdin = io.StringIO()
    print("started", file=answers, flush=True)
    for answer in answers_to(request):
        print(json.dumps(answer), file=answers, flush=True)
    os._exit(0)  # threads of user code must not hold the process up
