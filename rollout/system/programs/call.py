"""A program that calls one function. Its arguments are a JSON list on standard input, and
its output is the result as JSON.

    python -c 'sys.path = ...; call("my_package.agents.run")'

Whatever the function prints goes to standard error.
"""

import json
import os
import sys
from collections.abc import Sequence

from slipstream.rollout.system.plugins import resolve
from slipstream.rollout.system.programs.start import python_calling


def command_of(name: str) -> Sequence[str]:
    """Return the command that calls the function at an import path, where it can import what we can."""
    return python_calling("slipstream.rollout.system.programs.call.call", name)


def call(name: str) -> None:
    """Run the program."""
    arguments = json.load(sys.stdin)
    result_fd = os.dup(1)
    os.dup2(2, 1)
    result = resolve(name)(*arguments)
    with os.fdopen(result_fd, "w") as output:
        print(json.dumps(result, default=float), file=output)
