"""Calls of slime's functions for whole batches and evaluations: in a thread, one at a time."""

import asyncio
import sys
import threading
import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager, AsyncExitStack, suppress
from dataclasses import dataclass
from typing import Any, Protocol

from slipstream.rollout.compat.slime.addresses import address, prepare_requests
from slipstream.rollout.compat.slime.arguments import SlimeArguments
from slipstream.rollout.compat.slime.leased_groups import LeasedGroups
from slipstream.rollout.system.plugins import resolve
from slipstream.rollout.workflow.endpoint import EndedEpisode, OpenEndpoint, PolicyEndpoint


class FunctionFailed(RuntimeError):
    """A function has raised something."""


class EpisodeLimit(Protocol):
    """The time limit of episodes: ``rollout.collection.collector.time_limit.TimeLimit``."""

    def __call__(self) -> AbstractContextManager[object]: ...
    def suspended(self) -> AbstractContextManager[None]: ...


@dataclass(frozen=True)
class CallSurroundings:
    """The parts of a collector that calls use."""

    endpoint: PolicyEndpoint
    """Serves rollout functions; its completions are trained."""
    greedy: PolicyEndpoint
    """Serves evaluations."""
    limit: EpisodeLimit
    version: Callable[[], int]
    """Returns the policy version that the engines serve."""
    give_up: Callable[[str], None]
    """Ends the process, given the reason: a function cannot be ended otherwise."""


class FunctionCalls:
    """Calls functions. Single event loop. ``close`` it.

    All calls have one namespace and one address, as in slime's own process: what slime's functions share is
    made with those of the first call.
    """

    def __init__(
        self, arguments: SlimeArguments, groups: LeasedGroups, surroundings: CallSurroundings
    ) -> None:
        """``groups``: the data source of the functions. Raises PluginError."""
        self.args = arguments
        self.around = surroundings
        self.turn = asyncio.Lock()
        """Held around a call and all that belongs to it."""
        self._groups = groups
        self._call_function: Callable[..., Any] = resolve("slime.rollout.base_types.call_rollout_fn")
        self._stack = AsyncExitStack()
        self._opened: OpenEndpoint | None = None

    async def call(self, path: str, rollout_id: int, *, evaluation: bool) -> tuple[Any, EndedEpisode]:
        """Return slime's output of the function at ``path``, and what the engines have sampled meanwhile.

        The caller has the turn. Raises FunctionFailed, PluginError and NoEngine. Ends the process if the
        function takes longer than an episode may.
        """
        function, opened = resolve(path), await self._open()
        opened.renew(self.around.greedy if evaluation else self.around.endpoint)
        running = _InThread(
            lambda: self._call_function(function, self.args, rollout_id, self._groups, evaluation=evaluation),
            path,
        )
        try:
            with self.around.limit():
                output = await opened.run(running.result)
        except TimeoutError:
            if not running.has_ended:
                self.around.give_up(
                    f"{path} has not returned within rollout.episode_timeout_s:\n{running.traceback()}"
                )
            raise
        finally:
            ended = opened.renew(self.around.endpoint)
        return output, ended

    async def close(self) -> None:
        """Refuse all further requests of functions."""
        self._groups.close()
        await self._stack.aclose()

    async def _open(self) -> OpenEndpoint:
        if self._opened is None:
            prepare_requests(self.args)
            self._opened = await self._stack.enter_async_context(self.around.endpoint.open())
            address(self.args, self._opened)
        return self._opened


class _InThread:
    """A call of user code in a thread of its own, which ends with the process at the latest."""

    def __init__(self, call: Callable[[], object], path: str) -> None:
        self._call = call
        self._path = path
        self._loop = asyncio.get_running_loop()
        self.result: asyncio.Future[Any] = self._loop.create_future()
        self.has_ended = False
        self._thread = threading.Thread(target=self._run, name="rollout function", daemon=True)
        self._thread.start()

    def traceback(self) -> str:
        """Return where the code is now, and the tracebacks of all other threads of hooks."""
        frames = sys._current_frames()  # pyright: ignore[reportPrivateUsage]
        here = threading.get_ident()
        return "".join(
            f"thread {thread.name}:\n{''.join(traceback.format_stack(frames[thread.ident]))}"
            for thread in threading.enumerate()
            if thread.ident in frames and thread.ident != here
        )

    def _run(self) -> None:
        try:
            value, failure = self._call(), None
        except BaseException as error:  # user code
            traceback.print_exc()
            value, failure = None, FunctionFailed(f"{self._path} raised {type(error).__name__}: {error}")
        self.has_ended = True
        with suppress(RuntimeError):  # the loop is closed: nobody waits any more
            self._loop.call_soon_threadsafe(self._set, value, failure)

    def _set(self, value: object, failure: Exception | None) -> None:
        if self.result.done():
            return
        if failure is None:
            self.result.set_result(value)
        else:
            self.result.set_exception(failure)
