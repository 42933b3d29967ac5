"""Starts programs: a Python that calls one of our functions, and a keeper with a program in it."""

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import IO

Output = IO[bytes] | int
"""A file, or ``subprocess.PIPE`` or ``subprocess.DEVNULL``."""


def python_calling(path: str, *arguments: object) -> list[str]:
    """Return the command of a Python that calls the function at an import path.

    It imports from where this process does. ``arguments``: values that their ``repr`` makes again. Its exit
    code is what the function returns; None is 0.
    """
    module, _, name = path.rpartition(".")
    given = ", ".join(map(repr, arguments))
    code = (
        f"import sys; sys.path[:] = {list(map(str, sys.path))!r}; "
        f"from {module} import {name}; sys.exit({name}({given}))"
    )
    return [sys.executable, "-c", code]


def start_kept(
    command: Sequence[str],
    lifeline: int,
    *,
    inherited: Sequence[int] = (),
    environment: Mapping[str, str] | None = None,
    stdin: Output,
    stdout: Output,
    stderr: Output,
) -> subprocess.Popen[bytes]:
    """Start a program and the keeper around it, in a session of their own. Raises OSError.

    ``lifeline``: descriptor of the keeper's end. ``inherited``: descriptors for the program. ``environment``:
    all of its variables; None: those of this process.
    """
    return subprocess.Popen(
        python_calling(
            "slipstream.rollout.system.programs.keeper.keep", lifeline, os.getpid(), list(command)
        ),
        stdin=stdin,
        stdout=stdout,
        stderr=stderr,
        pass_fds=(lifeline, *inherited),
        env=None if environment is None else dict(environment),
        start_new_session=True,
    )
