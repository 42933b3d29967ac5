"""Long series of cases: a few in every run of the tests, all of them in `make test-slow`.

CASES = {...}
KEPT = ("one rank", "tensor 2")

@pytest.fixture(scope="module")
def results(request): ...            run the cases of chosen(request, "case")

@pytest.mark.parametrize("case", shortened(CASES, KEPT))
def test_...(case, results): ...
"""

from collections.abc import Container, Iterable
from typing import Any

import pytest


def shortened(cases: Iterable[Any], kept: Container[Any]) -> list[Any]:
    """Return parameters for all ``cases``, of which those that are not ``kept`` are slow."""
    return [
        pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=() if case in kept else SLOW)
        for case in cases
    ]


SLOW = (pytest.mark.slow,)


def chosen(request: pytest.FixtureRequest, *arguments: str) -> list[Any]:
    """Return the cases of the tests of this module that are to run, each once: values of the argument of that
    name, or tuples for several arguments."""
    cases: dict[Any, None] = {}
    for item in request.session.items:
        values = getattr(getattr(item, "callspec", None), "params", {})
        if item.path == request.path and all(name in values for name in arguments):
            case = tuple(values[name] for name in arguments)
            cases[case[0] if len(arguments) == 1 else case] = None
    return list(cases)
