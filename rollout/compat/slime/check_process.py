"""The process that imports a recipe's hooks to look at their signatures. Started by ``checking``.

Reads one JSON list of [setting, import path] and writes one JSON line for each, in order: null, or what is
wrong. What user code prints goes to the standard error.
"""

import ctypes
import json
import os
import signal
import sys

from slipstream.rollout.compat.slime.alias_path import make_slime_importable
from slipstream.rollout.compat.slime.signatures import SIGNATURES, problem_with
from slipstream.rollout.plugins import PluginError, resolve

_PR_SET_PDEATHSIG = 1
"""From linux/prctl.h."""


def _problem(setting: str, path: str) -> str | None:
    try:
        return problem_with(resolve(path), SIGNATURES[setting])
    except PluginError as error:
        return str(error).removeprefix(f"{path}: ")
    except BaseException as error:  # user code: its import may raise anything, and exit
        return f"its import raises {type(error).__name__}: {error}"


def main(parent: int) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        return
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    make_slime_importable()
    for setting, path in json.loads(sys.stdin.read()):
        answers.write(json.dumps(_problem(setting, path)) + "\n")
        answers.flush()
    answers.flush()
    os._exit(0)  # threads of user code must not hold the process up


if __name__ == "__main__":
    main(int(sys.argv[1]))
