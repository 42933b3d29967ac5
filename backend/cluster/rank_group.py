"""All trainer ranks behind one proxy: a method of the rank is called by name, on every rank at once."""

import asyncio
import re
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from slipstream.backend.batch.train_batch import StalenessViolation
from slipstream.backend.checkpoint.checkpoint_errors import CheckpointError
from slipstream.backend.cluster.configured_ray import ray
from slipstream.backend.cluster.handles import TrainerActorHandle, kill, traceback_of
from slipstream.backend.cluster.stacks import ShownProcess, show_stacks
from slipstream.backend.cluster.trainer_failed import TrainerFailed
from slipstream.backend.cluster.waits import Timeout, within
from slipstream.rollout.engine.leftovers import ProcessIdentity, segments_of_torch, unlink
from slipstream.rollout.system.plugins import PluginFailed
from slipstream.rollout.system.stacks import FOLDER

T = TypeVar("T")


PASSED_ON = (CheckpointError, StalenessViolation, PluginFailed)
"""Errors of a rank that are raised as they are. After the first one the ranks are well. The others are faults
of the run and of the user's code, which no other trainer would mend."""

CONSEQUENCE = re.compile(
    r"connection (?:was )?(?:closed|reset|refused)|connection to peer|closed by (?:remote )?peer|broken pipe"
    r"|gloo|nccl|\bDist(?:Backend|Network|Store)?Error|process group|watchdog|socket",
    re.IGNORECASE,
)
"""Errors of a rank whose peer in a collective is gone. They may reach the driver before that peer's error."""

FAULT_S = 10.0
"""Longest wait for the rank at fault, after the first rank has failed for the sake of another one."""


class RankGroup:
    """The trainer's ranks. They meet in collectives, so that one call must end before the next begins.

    Killed ranks may be started again: ``kill``, ``create``, ``connect``.
    """

    def __init__(
        self, make_actors: Callable[[], Sequence[TrainerActorHandle]], *, timeout_s: float, logs: Path
    ) -> None:
        """``make_actors``: makes an actor for each rank. ``timeout_s``: longest time for one call. ``logs``:
        where the ranks' output is, for errors.
        """
        self._make_actors = make_actors
        self._timeout_s = timeout_s
        self._logs = logs
        self._actors: Sequence[TrainerActorHandle] = make_actors()
        self._processes: list[ProcessIdentity] = []
        self._shown: dict[int, ShownProcess] = {}
        """Where each rank writes its stacks."""
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
        self._processes = [process for process, _, _ in started]
        self.gpus = [gpus for _, gpus, _ in started]
        self._shown = {rank: shown for rank, (_, _, shown) in enumerate(started)}
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
        waiting, group = list(enumerate(self._actors)), self._actors
        while waiting:
            if self._actors is not group:
                raise TrainerFailed(f"{what} failed: the trainer was killed meanwhile")
            calls = {rank: actor.call.remote(verb) for rank, actor in waiting}
            done = await self._gathered(what, calls)
            waiting = [each for each, is_done in zip(waiting, done, strict=True) if not is_done]
            if waiting:
                await asyncio.sleep(every_s)

    def kill(self) -> None:
        """End every rank's process, and remove the shared memory that those of this node leave."""
        for actor in self._actors:
            kill(actor)
        for process in self._processes:
            unlink(segments_of_torch(process))
        self._actors, self._processes, self._shown = [], [], {}

    async def _answers(
        self, what: str, calls: Sequence[Awaitable[T]], timeout_s: float | None = None
    ) -> list[T]:
        since = time.strftime("%T")
        answers = {rank: asyncio.ensure_future(call) for rank, call in enumerate(calls)}
        try:
            return await within(timeout_s or self._timeout_s, what, self._gathered(what, answers))
        except Timeout as error:
            silent = [rank for rank, answer in answers.items() if answer.cancelled()]
            raise TrainerFailed(f"{error}: {await self._hang(silent, since)}") from error

    async def _hang(self, silent: Sequence[int], since: str) -> str:
        """Return who keeps a call waiting since when, once the stacks of all ranks are written."""
        missing = await show_stacks(self._shown, self._logs)
        who = f"rank {silent[0]} has" if len(silent) == 1 else f"ranks {', '.join(map(str, silent))} have"
        without = "".join(f"; rank {rank} {why}" for rank, why in sorted(missing.items()))
        return f"{who} not answered since {since}{without} (stacks of all ranks: {self._logs / FOLDER})"

    async def _gathered(self, what: str, calls: Mapping[int, Awaitable[T]]) -> list[T]:
        """Return the answers of the ranks. Raises the error of the first rank at fault."""
        answers = {rank: asyncio.ensure_future(call) for rank, call in calls.items()}
        try:
            await asyncio.wait(answers.values(), return_when=asyncio.FIRST_EXCEPTION)
            if any(_error_of(answer) for answer in answers.values()):
                raise await self._fault(what, answers)
            return [answer.result() for answer in answers.values()]
        finally:
            for answer in answers.values():
                answer.cancel()

    async def _fault(self, what: str, answers: "Mapping[int, asyncio.Future[T]]") -> BaseException:
        """Return the error of the first rank at fault, out of answers of which one at least has failed.

        A rank that has only lost its peer is not at fault, unless no other one turns out to be.
        """
        deadline = asyncio.get_running_loop().time() + FAULT_S
        while True:
            failed = {
                rank: error for rank, answer in answers.items() if (error := _error_of(answer)) is not None
            }
            at_fault = [rank for rank, error in failed.items() if not _is_consequence(error)]
            pending = [answer for answer in answers.values() if not answer.done()]
            left_s = deadline - asyncio.get_running_loop().time()
            if at_fault or not pending or left_s <= 0:
                rank = min(at_fault or failed)
                return self._failure(what, rank, failed[rank])
            await asyncio.wait(pending, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)

    def _failure(self, what: str, rank: int, error: BaseException) -> BaseException:
        """Return the error to raise for that of a rank."""
        log = self._logs / f"trainer-{rank}.log"
        if isinstance(error, ray.exceptions.RayTaskError):
            cause = error.cause or error
            if isinstance(cause, PASSED_ON):
                return cause
            reason = f"{what} failed on rank {rank}: {type(cause).__name__}: {cause} (log: {log})"
            return TrainerFailed(reason, traceback_of(error), type(cause).__name__)
        if isinstance(error, ray.exceptions.RayActorError):
            return TrainerFailed(f"the process of trainer rank {rank} ended during {what} (log: {log})")
        if isinstance(error, ray.exceptions.ActorUnschedulableError):
            return TrainerFailed(f"trainer rank {rank} has no node to run on during {what}: Ray has lost it")
        return error


def _error_of(answer: "asyncio.Future[T]") -> BaseException | None:
    """Return the error of an answer; None: it has none so far."""
    return answer.exception() if answer.done() and not answer.cancelled() else None


def _is_consequence(error: BaseException) -> bool:
    """True if a rank has failed because another one has."""
    if not isinstance(error, ray.exceptions.RayTaskError):
        return False
    cause = error.cause or error
    if isinstance(cause, PASSED_ON):
        return False
    return CONSEQUENCE.search(f"{type(cause).__name__}: {cause}") is not None
