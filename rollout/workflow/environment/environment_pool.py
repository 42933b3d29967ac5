"""Environments that are kept between episodes, no more of them than a limit.

lease ──► an idle one, or a new one below the limit ──► reset, with a time-out and attempts ──► episode
return ─► idle again; closed if the episode failed, or if it is not reusable
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager

from slipstream.rollout.tokens.trajectory import Messages, Prompt
from slipstream.rollout.workflow.environment.contract import Environment

log = logging.getLogger(__name__)

CLOSE_TIMEOUT_S = 30.0
"""Seconds that an environment may take to close. Nobody waits for it longer."""


class ResetFailed(RuntimeError):
    """An environment has failed to begin an episode as often as is allowed."""


class EnvironmentPool:
    """The environments of one collector. Single event loop."""

    def __init__(
        self,
        make: Callable[[], Environment],
        *,
        limit: int | None = None,
        reset_timeout_s: float = 60.0,
        reset_attempts: int = 3,
        name: str = "the environment",
    ) -> None:
        """``limit``: largest number of environments at a time; None: as many as there are episodes.
        ``reset_timeout_s``: seconds for each of ``reset_attempts`` attempts at a reset, each of which has a
        new environment. ``name``: the environment, as messages name it.
        """
        self._name = name
        self._make = make
        self._room = None if limit is None else asyncio.Semaphore(limit)
        self._reset_timeout_s = reset_timeout_s
        self._reset_attempts = reset_attempts
        self._idle: list[Environment] = []

    @asynccontextmanager
    async def begun(self, prompt: Prompt) -> AsyncGenerator[tuple[Environment, Messages]]:
        """Lend an environment in which an episode has begun, and its first messages.

        Raises ResetFailed after the last attempt.
        """
        if self._room is None:
            async with self._lent(prompt) as lent:
                yield lent
        else:
            async with self._room, self._lent(prompt) as lent:
                yield lent

    @asynccontextmanager
    async def _lent(self, prompt: Prompt) -> AsyncGenerator[tuple[Environment, Messages]]:
        environment, messages = await self._reset(prompt)
        is_sound = False
        try:
            yield environment, messages
            is_sound = True
        finally:
            if is_sound and getattr(environment, "is_reusable", True):
                self._idle.append(environment)
            else:
                await _closed(environment)

    async def _reset(self, prompt: Prompt) -> tuple[Environment, Messages]:
        failure: Exception | None = None
        for _ in range(self._reset_attempts):
            environment = self._idle.pop() if self._idle else self._make()
            try:
                async with asyncio.timeout(self._reset_timeout_s):
                    return environment, await environment.reset(prompt)
            except Exception as error:
                failure = error
                await _closed(environment)
            except BaseException:  # the episode is given up
                await _closed(environment)
                raise
        is_late = isinstance(failure, TimeoutError)
        reason = "took too long" if is_late else f"{type(failure).__name__}: {failure}"
        raise ResetFailed(
            f"{self._name} could not be reset in {self._reset_attempts} attempts of "
            f"{self._reset_timeout_s:g} s; the last one: {reason}"
        ) from failure

    async def close(self) -> None:
        """Close all environments that no episode has."""
        idle, self._idle = self._idle, []
        await asyncio.gather(*map(_closed, idle))


async def _closed(environment: Environment) -> None:
    """Close an environment, even if the caller is cancelled meanwhile. A failure to close is only logged."""
    closing = asyncio.ensure_future(environment.close())
    try:
        async with asyncio.timeout(CLOSE_TIMEOUT_S):
            await asyncio.shield(closing)
    except asyncio.CancelledError:
        closing.add_done_callback(_note)
        raise
    except Exception as error:
        log.warning("an environment cannot be closed: %s: %s", type(error).__name__, error)


def _note(closing: "asyncio.Future[None]") -> None:
    if not closing.cancelled() and (error := closing.exception()) is not None:
        log.warning("an environment cannot be closed: %s: %s", type(error).__name__, error)
