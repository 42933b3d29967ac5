"""Looks at the hooks of a recipe before a run: every path that leads nowhere, every wrong signature.

recipe ──► [setting, path] ──► process that imports them ──► one answer each
                 ▲                         │
                 └── those behind it ◄─────┘ an import that does not end is reported, its process killed
"""

import json
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from typing import IO

from slipstream.configs.schema import HooksConfig, RunConfig
from slipstream.rollout.compat.slime.arguments import slime_arguments

START_TIMEOUT_S = 60.0
"""Seconds for the start of the process, beside those for the first import."""


def hook_problems(config: RunConfig) -> list[str]:
    """Return everything that is wrong with ``rollout.hooks``, each with the name of its setting."""
    hooks = config.rollout.hooks
    if hooks is None:
        return []
    problems = list(_import_problems(hooks))
    try:
        slime_arguments(config)
    except (OSError, ValueError) as error:
        problems.append(f"rollout.hooks.custom_config_path: {error}")
    return problems


def _import_problems(hooks: HooksConfig) -> Iterator[str]:
    left = [(setting, path) for setting, paths in hooks.named().items() for path in paths]
    while left:
        answers = _answers(left, hooks.import_timeout_s)
        for (setting, path), problem in zip(left, answers, strict=False):
            if problem is not None:
                yield f"rollout.hooks.{setting}: {path} {problem}"
        left = left[len(answers) :]


def _answers(hooks: list[tuple[str, str]], timeout_s: float) -> list[str | None]:
    """Return an answer for each hook, up to the first one whose import does not end."""
    process = subprocess.Popen(
        [sys.executable, "-m", "slipstream.rollout.compat.slime.check_process", str(os.getpid())],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        start_new_session=True,
    )
    assert process.stdin is not None and process.stdout is not None
    lines: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    reader = threading.Thread(target=_read, args=(process.stdout, lines), name="hook check", daemon=True)
    reader.start()
    answers: list[str | None] = []
    try:
        process.stdin.write(json.dumps(hooks).encode())
        process.stdin.close()
        while len(answers) < len(hooks):
            line = lines.get(timeout=timeout_s + (0 if answers else START_TIMEOUT_S))
            if not line:
                return [*answers, "ends the process that imports it"]
            answers.append(json.loads(line))
    except queue.Empty:
        answers.append(f"is not imported within {timeout_s:g} s (rollout.hooks.import_timeout_s)")
    except BrokenPipeError:
        answers.append("cannot be checked: the process that imports it has ended")
    finally:
        _end(process)
    return answers


def _read(stream: IO[bytes], lines: "queue.SimpleQueue[bytes]") -> None:
    """Hand over each line, and an empty one at the end."""
    for line in stream:
        lines.put(line)
    lines.put(b"")


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill the process and what it has started in its session."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
