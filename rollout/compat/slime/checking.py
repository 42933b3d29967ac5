"""Looks at the hooks of a recipe before a run: every path that leads nowhere, every wrong signature.

recipe ──► [setting, path] ──► process that imports them ──► one answer each
                 ▲                         │
                 └── those behind it ◄─────┘ an import that does not end is a problem of its own
"""

import json
from collections.abc import Iterator

from slipstream.configs.schema import HooksConfig, RunConfig
from slipstream.rollout.compat.slime.arguments import slime_arguments
from slipstream.rollout.system.imports import ImportEnding, ask


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
        answers, ending = ask(
            "slipstream.rollout.compat.slime.check_process",
            json.dumps(left).encode(),
            len(left),
            hooks.import_timeout_s,
        )
        if ending is not None:
            answers = [*answers, _said(ending, hooks.import_timeout_s)]
        for (setting, path), problem in zip(left, answers, strict=False):
            if problem is not None:
                yield f"rollout.hooks.{setting}: {path} {problem}"
        left = left[len(answers) :]


def _said(ending: ImportEnding, timeout_s: float) -> str:
    if ending is ImportEnding.ENDED:
        return "ends the process that imports it"
    return f"is not imported within {timeout_s:g} s (rollout.hooks.import_timeout_s)"
