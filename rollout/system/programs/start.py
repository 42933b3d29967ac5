"""Commands of programs: a Python that calls one of our functions, and a keeper with a program in it."""

import os
import sys
from collections.abc import Sequence


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


def kept(command: Sequence[str], lifeline: int) -> list[str]:
    """Return the command of a keeper around a program. ``lifeline``: descriptor of the keeper's end."""
    keep = "slipstream.rollout.system.programs.keeper.keep"
    return python_calling(keep, lifeline, os.getpid(), list(command))
