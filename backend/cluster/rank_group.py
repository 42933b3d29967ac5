"""All trainer ranks behind one proxy: a method of the rank is called by name, on every rank at once."""

import asyncio
from collections.abc import Awaitable, Sequence
from pathlib import Path
from typing import TypeVar

from slipstream.backend.checkpoint.errors import CheckpointError
from slipstream.backend.cluster.configured_ray import ray
from slipstream.backend.cluster.errors import TrainerFailed
from slipstream.backend.cluster.handles import RankActor, kill
from slipstream.backend.cluster.waits import within
from slipstream.rollout.engine.leftovers import ProcessIdentity, segments_of_torch, unlink

T = TypeVar("T")


class RankGroup:
    """The trainer's ranks. They meet in collectives, so that one call must end before the next begins."""

    def __init__(self, actors: Sequence[RankActor], *, timeout_s: float, logs: Path) -> None:
        """``timeout_s``: longest time for one call. ``logs``: where the ranks' output is, for errors."""
        self._actors = actors
        self._timeout_s = timeout_s
        self._logs = logs
        self._processes: list[tuple[ProcessIdentity, list[str]]] = []

    @property
    def gpus(self) -> list[list[str]]:
        """Ids that Ray has for the GPUs of each rank. Empty before the ranks are connected."""
        return [gpus for _, gpus in self._processes]

    async def connect(self) -> None:
        """Start every rank's process, then build the model on all of them."""
        first = self._actors[0].meeting_point.remote()
        meeting_point = await self._answers("starting the first trainer rank", [first])
        starting = [actor.process.remote() for actor in self._actors]
        self._processes = await self._answers("starting the trainer", starting)
        connecting = [actor.connect.remote(*meeting_point[0]) for actor in self._actors]
        await self._answers("building the model", connecting)

    async def call(
        self, what: str, verb: str, *arguments: object, timeout_s: float | None = None
    ) -> list[object]:
        """Call method ``verb`` on every rank. Return the results in rank order.

        ``what`` names the call in errors. Raises TrainerFailed, Timeout, and CheckpointError as it is.
        """
        calls = [actor.call.remote(verb, *arguments) for actor in self._actors]
        return await self._answers(what, calls, timeout_s)

    async def wait_until(self, what: str, verb: str, *, every_s: float) -> None:
        """Ask every rank by method ``verb`` until each has said True once. The time-out is the caller's.

        An actor runs one call at a time, so a call that waited on a rank would hold up training. A question
        takes its turn behind the calls that came before it and is answered at once.
        """
        waiting = list(self._actors)
        while waiting:
            done = await self._gathered(what, [actor.call.remote(verb) for actor in waiting])
            waiting = [actor for actor, is_done in zip(waiting, done, strict=True) if not is_done]
            if waiting:
                await asyncio.sleep(every_s)

    def kill(self) -> None:
        """End every rank's process, and remove the shared memory that those of this node leave."""
        for actor in self._actors:
            kill(actor)
        for process, _ in self._processes:
            unlink(segments_of_torch(process))

    async def _answers(
        self, what: str, calls: Sequence[Awaitable[T]], timeout_s: float | None = None
    ) -> list[T]:
        return await within(timeout_s or self._timeout_s, what, self._gathered(what, calls))

    async def _gathered(self, what: str, calls: Sequence[Awaitable[T]]) -> list[T]:
        try:
            return await asyncio.gather(*calls)
        except ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, CheckpointError):
                raise error.cause from None
            raise TrainerFailed(f"{what} failed: {error.cause or error} (logs: {self._logs})") from error
        except ray.exceptions.RayActorError as error:
            raise TrainerFailed(f"a trainer process ended during {what} (logs: {self._logs})") from error
