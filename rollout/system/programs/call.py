"""A program that calls one function. Its arguments are a JSON list on standard input, and
its output is the result as JSON.

    python -c 'sys.path = ...; call("my_package.agents.run")'

Whatever the function prints goes to standard error.
"""

import json
import os
import sys

from slipstream.rollout.system.plugins import resolve


def call(name: str) -> None:
    """Run the program."""
    arguments = json.load(sys.stdin)
    result_fd = os.dup(1)
    os.dup2(2, 1)
    result = resolve(name)(*arguments)
    with os.fdopen(result_fd, "w") as output:
        print(json.dumps(result, default=float), file=output)
