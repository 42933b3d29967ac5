"""Runs ``plugin_checks`` in a process of its own: an import of the user's may hang, exit or crash.

recipe ──► [code that it names] ──► process that imports it ──► one answer each
                  ▲                            │
                  └── those behind it ◄────────┘ an import that does not end is reported, its process killed
"""

import io
import json
import os
import pickle
import queue
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from typing import IO

from slipstream.backend.driver.plugin_checks import named_code, names_user_code, plugin_problems, problem_with
from slipstream.configs.schema import RunConfig
from slipstream.rollout.endpoint.needed import endpoint_problems
from slipstream.rollout.linux import PR_SET_PDEATHSIG, prctl

IMPORT_TIMEOUT_S = 60.0
"""Seconds for the import of one module. Longer ones would make every judge and collector start as late."""


def imported_plugin_problems(config: RunConfig, timeout_s: float = IMPORT_TIMEOUT_S) -> list[str]:
    """Return what is wrong with the code that the recipe names. None of the user's is imported here."""
    if not names_user_code(config):
        return plugin_problems(config)
    problems, first = list[str](), 0
    codes = named_code(config)
    while first <= len(codes):  # the last answer is about the endpoint
        answers, ending = _answers(config, first, 1 + len(codes) - first, timeout_s)
        problems += [problem for answer in answers for problem in answer]
        first += len(answers)
        if ending is not None and first < len(codes):
            problems.append(f"{codes[first].setting}: {codes[first].path}: {ending}")
        first += ending is not None
    return problems


def _answers(
    config: RunConfig, first: int, count: int, timeout_s: float
) -> tuple[list[list[str]], str | None]:
    """Return the answers from code ``first`` on, and why there is none about the one behind them."""
    process = subprocess.Popen(
        [sys.executable, "-m", "slipstream.backend.driver.plugin_process", str(os.getpid())],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        start_new_session=True,
    )
    assert process.stdin is not None and process.stdout is not None
    lines: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(process.stdout, lines), name="plug-in check", daemon=True).start()
    answers: list[list[str]] = []
    try:
        with suppress(BrokenPipeError), process.stdin:
            process.stdin.write(pickle.dumps((config, first)))
        lines.get(timeout=IMPORT_TIMEOUT_S)  # it has started: our own imports
        while len(answers) < count:
            line = lines.get(timeout=timeout_s)
            if not line:
                return answers, "importing it ends the process: remove what exits or crashes at import"
            answers.append(json.loads(line))
    except queue.Empty:
        return (
            answers,
            f"it is not imported within {timeout_s:g} s: do at import only what is needed to import it",
        )
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    return answers, None


def _read(stream: IO[bytes], lines: "queue.SimpleQueue[bytes]") -> None:
    """Hand over each line, and an empty one at the end."""
    for line in stream:
        lines.put(line)
    lines.put(b"")


def main(parent: int) -> None:
    """Be that process."""
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        return
    config, first = pickle.load(sys.stdin.buffer)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    sys.stdin = io.StringIO()
    print("started", file=answers, flush=True)
    for code in named_code(config)[first:]:
        problem = problem_with(code, config)
        print(json.dumps([] if problem is None else [problem]), file=answers, flush=True)
    print(json.dumps(endpoint_problems(config)), file=answers, flush=True)
    os._exit(0)  # threads of user code must not hold the process up


if __name__ == "__main__":
    main(int(sys.argv[1]))
