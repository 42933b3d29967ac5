"""All trainer ranks behind one proxy: a method of the rank is called by name, on every rank at once."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import TypeVar

from slipstream.backend.batch.train_batch import StalenessViolation
from slipstream.backend.checkpoint.checkpoint_errors import CheckpointError
from slipstream.backend.cluster.configured_ray import ray
from slipstream.backend.cluster.handles import RankActor, kill
from slipstream.backend.cluster.trainer_failed import TrainerFailed
from slipstream.backend.cluster.waits import Timeout, within
from slipstream.rollout.engine.leftovers import ProcessIdentity, segments_of_torch, unlink
from slipstream.rollout.system.plugins import PluginFailed

T = TypeVar("T")


PASSED_ON = (CheckpointError, StalenessViolation, PluginFailed)
"""Errors of a rank that are raised as they are. After the first one the ranks are well. The others are faults
of the run and of the user's code, which no other trainer would mend."""


class RankGroup:
    """The trainer's ranks. They meet in collectives, so that one call must end before the next begins.

    Killed ranks may be started again: ``kill``, ``create``, ``connect``.
    """

    def __init__(
        self, make_actors: Callable[[], Sequence[RankActor]], *, timeout_s: float, logs: Path
    ) -> None:
        """``make_actors``: makes an actor for each rank. ``timeout_s``: longest time for one call. ``logs``:
        where the ranks' output is, for errors.
        """
        self._make_actors = make_actors
        self._timeout_s = timeout_s
        self._logs = logs
        self._actors: Sequence[RankActor] = make_actors()
        self._processes: list[ProcessIdentity] = []
        self.gpus: list[list[str]] = []
        """Ids that Ray has for the GPUs of each rank, also those of ranks that were killed. Empty before the
        ranks are connected for the first time."""

    def create(self) -> None:
        """Make new actors in place of the killed ones."""
        self._actors = self._make_actors()

    async def connect(self) -> None:
        """Start every rank's process, then build the model on all of them. Raises TrainerFailed."""
        first = self._actors[0].meeting_point.remote()
        meeting_point = await self._answers("starting the first trainer rank", [first])
        starting = [actor.process.remote() for actor in self._actors]
        started = await self._answers("starting the trainer", starting)
        self._processes = [process for process, _ in started]
        self.gpus = [gpus for _, gpus in started]
        connecting = [actor.connect.remote(*meeting_point[0]) for actor in self._actors]
        await self._answers("building the model", connecting)

    async def call(
        self, what: str, verb: str, *arguments: object, timeout_s: float | None = None
    ) -> list[object]:
        """Call method ``verb`` on every rank. Return the results in rank order.

        ``what`` names the call in errors. Raises TrainerFailed, and the errors of ``PASSED_ON`` as they are.
        """
        if not self._actors:
            raise TrainerFailed(f"{what} failed: no trainer is running")
        calls = [actor.call.remote(verb, *arguments) for actor in self._actors]
        return await self._answers(what, calls, timeout_s)

    async def wait_until(self, what: str, verb: str, *, every_s: float) -> None:
        """Ask every rank by method ``verb`` until each has said True once. The time-out is the caller's.

        An actor runs one call at a time, so a call that waited on a rank would hold up training. A question
        takes its turn after the earlier calls and is answered at once.
        """
        waiting, group = list(self._actors), self._actors
        while waiting:
            if self._actors is not group:
                raise TrainerFailed(f"{what} failed: the trainer was killed meanwhile")
            done = await self._gathered(what, [actor.call.remote(verb) for actor in waiting])
            waiting = [actor for actor, is_done in zip(waiting, done, strict=True) if not is_done]
            if waiting:
                await asyncio.sleep(every_s)

    def kill(self) -> None:
        """End every rank's process, and remove the shared memory that those of this node leave."""
        for actor in self._actors:
            kill(actor)
        for process in self._processes:
            unlink(segments_of_torch(process))
        self._actors, self._processes = [], []

    async def _answers(
        self, what: str, calls: Sequence[Awaitable[T]], timeout_s: float | None = None
    ) -> list[T]:
        try:
            return await within(timeout_s or self._timeout_s, what, self._gathered(what, calls))
        except Timeout as error:
            raise TrainerFailed(str(error)) from error

    async def _gathered(self, what: str, calls: Sequence[Awaitable[T]]) -> list[T]:
        try:
            return await asyncio.gather(*calls)
        except ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, PASSED_ON):
                raise error.cause from None
            raise TrainerFailed(f"{what} failed: {error.cause or error} (logs: {self._logs})") from error
        except ray.exceptions.RayActorError as error:
            raise TrainerFailed(f"a trainer process ended during {what} (logs: {self._logs})") from error
