"""Engines of a run, seen and changed from outside: what ``slipstream engine`` does."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

import msgspec

from slipstream.backend.commands.outcome import Failed, NotYet, WrongInput
from slipstream.backend.driver.modes.joining import EngineService, NotAnswered, join, leaving
from slipstream.backend.driver.processes.joined_engines import EngineState
from slipstream.backend.driver.start.inputs import InputError
from slipstream.backend.driver.start.run_folder import RECIPE
from slipstream.configs.load import load_recipe
from slipstream.rollout.engine.server_process import EngineStartError

T = TypeVar("T")


def listed(run: Path) -> list[EngineState]:
    """Return the engines of a run. Raises WrongInput and Failed."""
    return _asked(lambda: EngineService(run).engines())


def as_json(states: list[EngineState]) -> str:
    return json.dumps(msgspec.to_builtins(states), indent=2)


def line(state: EngineState) -> str:
    """Return a line that says where an engine stands."""
    standing = (
        "serves" if state.serves else "gets the version" if state.url else "starts, or waits for a node"
    )
    standing = f"{standing}, then leaves" if state.leaving else standing
    return f"{state.name:<12} {'joined' if state.joined else 'of the run':<11} {standing:<27} {state.url}"


def remove(run: Path, name: str, wait_s: float) -> None:
    """Let an engine leave that has joined. Raises NotYet if that takes longer, WrongInput and Failed."""
    state = _asked(lambda: EngineService(run).remove(name, wait_s))
    if state.left is None:
        raise NotYet(f"{leaving(state, wait_s)}; the same command waits on, with --wait for longer")


def join_run(run: Path, host: str | None, say: Callable[[str], None]) -> None:
    """Serve a run with an engine on this machine until a signal, or the end of the run. Raises WrongInput and
    Failed.
    """

    async def joined() -> str | None:
        service = EngineService(run)  # before the recipe is read: it may be no folder of a run
        return await join(load_recipe(run / RECIPE, []), service, run.absolute(), host, say)

    try:
        reason = _asked(joined)
    except EngineStartError as error:
        raise Failed(str(error)) from None
    if reason is not None:
        raise Failed(reason)


def _asked(question: Callable[[], Awaitable[T]]) -> T:
    async def answer() -> T:
        return await question()

    try:
        return asyncio.run(answer())
    except (InputError, NotAnswered) as error:
        raise WrongInput(str(error)) from None
    except OSError as error:
        raise Failed(str(error)) from None
