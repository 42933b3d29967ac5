"""Runs ``plugin_checks`` in a process of its own, where user code is imported.

recipe ──► [code that it names] ──► process that imports it ──► one answer each
                  ▲                            │
                  └──── the code after it ◄────┘ an import that does not end is a problem of its own
"""

import pickle
from collections.abc import Iterator

from slipstream.backend.driver.start.plugin_checks import (
    named_code,
    names_user_code,
    plugin_problems,
    problem_with,
)
from slipstream.configs.schema import RunConfig
from slipstream.rollout.gateway.endpoint.needed import endpoint_problems
from slipstream.rollout.system.imports import ImportEnding, ask

IMPORT_TIMEOUT_S = 60.0
"""Seconds for the import of one module. Longer ones would make every judge and collector start as late."""


def imported_plugin_problems(config: RunConfig, timeout_s: float = IMPORT_TIMEOUT_S) -> list[str]:
    """Return what is wrong with the code that the recipe names. None of the user's is imported here."""
    if not names_user_code(config):
        return plugin_problems(config)
    problems, first = list[str](), 0
    codes = named_code(config)
    while first <= len(codes):  # the last answer is about the endpoint
        request = pickle.dumps((config, first))
        answers, ending = ask(f"{__name__}.answers_to", request, 1 + len(codes) - first, timeout_s)
        problems += [problem for answer in answers for problem in answer]
        first += len(answers)
        if ending is not None and first < len(codes):
            problems.append(f"{codes[first].setting}: {codes[first].path}: {_said(ending, timeout_s)}")
        first += ending is not None
    return problems


def _said(ending: ImportEnding, timeout_s: float) -> str:
    if ending is ImportEnding.ENDED:
        return "importing it ends the process: remove what exits or crashes at import"
    return f"it is not imported within {timeout_s:g} s: do at import only what is needed to import it"


def answers_to(request: bytes) -> Iterator[list[str]]:
    """Yield what is wrong with each code that the recipe names, in the process of the check."""
    config, first = pickle.loads(request)
    for code in named_code(config)[first:]:
        problem = problem_with(code, config)
        yield [] if problem is None else [problem]
    yield endpoint_problems(config.rollout)
