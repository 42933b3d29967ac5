"""The process that imports a recipe's hooks to look at their signatures. Started by ``checking``.

The request is a JSON list of [setting, import path]; each answer is null, or what is wrong.
"""

import json
from collections.abc import Iterator

from slipstream.rollout.compat.slime.alias_path import make_slime_importable
from slipstream.rollout.compat.slime.signatures import SIGNATURES, problem_with
from slipstream.rollout.system.imports import serve
from slipstream.rollout.system.plugins import PluginError, resolve


def _answers_to(request: bytes) -> Iterator[str | None]:
    make_slime_importable()
    for setting, path in json.loads(request):
        yield _problem(setting, path)


def _problem(setting: str, path: str) -> str | None:
    try:
        return problem_with(resolve(path), SIGNATURES[setting])
    except PluginError as error:
        return str(error).removeprefix(f"{path}: ")
    except BaseException as error:  # user code: its import may raise anything, and exit
        return f"its import raises {type(error).__name__}: {error}"


if __name__ == "__main__":
    serve(_answers_to)
