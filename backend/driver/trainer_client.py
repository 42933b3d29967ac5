"""The driver's side of the Ray actors: the trainer's ranks as one trainer, an engine actor as a handle."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from pathlib import Path
from typing import Any, TypeVar

from slipstream.backend.batch.train_batch import TrainBatch
from slipstream.backend.checkpoint.errors import CheckpointError
from slipstream.backend.cluster.configured_ray import ray
from slipstream.bridge.report import PublishReport
from slipstream.rollout.engine.client import EngineAddress
from slipstream.rollout.engine.leftovers import segments_of_torch, unlink

T = TypeVar("T")

POLL_S = 1.0
"""Between two questions whether a checkpoint is written: short against the minutes between checkpoints."""


class TrainerFailed(RuntimeError):
    """A trainer rank raised or is gone. The trainer holds the only copy of the policy, so the run is over."""


class Timeout(TimeoutError):
    """A wait that took too long; the message says what was waited for."""


async def within(seconds: float, what: str, work: Awaitable[T]) -> T:
    """``work``, or Timeout naming ``what`` after ``seconds``."""
    try:
        return await asyncio.wait_for(work, seconds)
    except TimeoutError:
        raise Timeout(f"{what} took more than {seconds:.0f} s") from None


class Trainer:
    """All trainer ranks. One call at a time: the ranks meet in collectives.

    ``checkpoint_written`` is the exception. It may be awaited beside any other call.
    """

    def __init__(self, ranks: Sequence[Any], *, step_timeout_s: float, logs: Path) -> None:
        self._ranks = ranks
        self._timeout_s = step_timeout_s
        self._logs = logs
        self._pids: list[int] = []
        """Of ranks on this machine or others: shared memory is only used between processes of one."""
        self.gpus: list[list[str]] = []
        """Of each rank, once it is connected: the ids that Ray has for its GPUs."""

    async def connect(self) -> None:
        address, port = await within(
            self._timeout_s, "the first trainer rank", self._ranks[0].meeting_point.remote()
        )
        starting = [rank.process.remote() for rank in self._ranks]
        processes = await self._within("starting the trainer", starting)
        self._pids, self.gpus = [pid for pid, _ in processes], [gpus for _, gpus in processes]
        connecting = [rank.connect.remote(address, port) for rank in self._ranks]
        await self._within("building the model", connecting)

    async def train(self, batch: TrainBatch) -> dict[str, float]:
        return self._only(await self._all(f"training step {batch.version + 1}", "train", ray.put(batch)))

    async def publish(self, version: int, engines: Sequence[EngineAddress]) -> PublishReport:
        return self._only(await self._all(f"publishing version {version}", "publish", version, list(engines)))

    async def logprobs(self, ids: Sequence[int]) -> list[float]:
        """Log-probs of ids[1:] given what precedes them, at temperature 1, under the present weights."""
        return self._only(await self._all("computing log-probs", "logprobs", list(ids)))

    async def rest(self, *, keep_weights: bool = False) -> None:
        """Have the ranks give up their GPUs' memory, all of it or but for the weights."""
        await self._all("moving the trainer to host memory", "rest", keep_weights)

    async def wake(self) -> None:
        await self._all("moving the trainer back to the GPUs", "wake")

    async def export_hf(self, folder: Path) -> None:
        await self._all("writing the HF checkpoint", "export_hf", folder.absolute())

    async def begin_checkpoint(self, folder: Path) -> None:
        """Have the ranks start to write their state into ``folder``. Training may go on when this returns.

        Raises CheckpointError when a rank cannot write there.
        """
        await self._all("starting a checkpoint", "begin_checkpoint", folder.absolute())

    async def checkpoint_written(self) -> None:
        """Wait until no rank is writing any more; only ``finish_checkpoint`` says whether it has gone well.

        An actor runs one call at a time, so a call that waited on a rank would hold up training. The ranks
        are asked every ``POLL_S`` instead; a question takes its turn behind the calls that came before it,
        has its answer at once, and needs no other rank. The time-out is the caller's, who knows how long a
        checkpoint may take (``checkpoint.timeout_s``).
        """
        writing = self._ranks
        while writing:
            calls = [rank.call.remote("checkpoint_done") for rank in writing]
            done = await self._answers("writing a checkpoint", calls)
            writing = [rank for rank, is_done in zip(writing, done, strict=True) if not is_done]
            if writing:
                await asyncio.sleep(POLL_S)

    async def finish_checkpoint(self) -> None:
        """Have the ranks make the checkpoint readable.

        Raises CheckpointError when it has failed, say for want of disk space. The trainer can go on training
        and write another one.
        """
        # It may have to wait for a training step that came before it.
        await self._all("finishing a checkpoint", "finish_checkpoint", timeout_s=2 * self._timeout_s)

    async def restore(self, folder: Path) -> int:
        """Load a checkpoint. Return the number of training steps it had done."""
        [step, *_] = await self._all("loading a checkpoint", "restore", folder.absolute())
        return step

    def kill(self) -> None:
        for rank in self._ranks:
            ray.kill(rank)
        for pid in self._pids:
            unlink(segments_of_torch(pid))

    async def _all(self, what: str, method: str, *args: Any, timeout_s: float | None = None) -> list[Any]:
        calls = [rank.call.remote(method, *args) for rank in self._ranks]
        return await self._within(what, calls, timeout_s)

    async def _within(
        self, what: str, calls: Sequence[Awaitable[Any]], timeout_s: float | None = None
    ) -> list[Any]:
        return await within(timeout_s or self._timeout_s, what, self._answers(what, calls))

    async def _answers(self, what: str, calls: Sequence[Awaitable[Any]]) -> list[Any]:
        try:
            return await asyncio.gather(*calls)
        except ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, CheckpointError):
                raise error.cause from None
            raise TrainerFailed(f"{what} failed: {error.cause or error} (logs: {self._logs})") from error
        except ray.exceptions.RayActorError as error:
            raise TrainerFailed(f"a trainer process ended during {what} (logs: {self._logs})") from error

    @staticmethod
    def _only(results: list[Any]) -> Any:
        """The result of the one rank that reports."""
        return next(result for result in results if result is not None)


class RayEngine:
    """An ``EngineHandle`` whose server is owned by a Ray actor. An actor that is gone is made anew."""

    def __init__(
        self,
        name: str,
        create: Callable[[], Any],
        address: Callable[[str, str], EngineAddress],
        timeout_s: float,
        *,
        turn: Callable[[], AbstractAsyncContextManager[None]] = nullcontext,
    ) -> None:
        """``turn``: while the server may be started."""
        self.name = name
        self._create = create
        self._address = address
        self._timeout_s = timeout_s
        self._turn = turn
        self._actor: Any = None

    async def start(self) -> EngineAddress:
        async with self._turn():
            return await self._start()

    async def _start(self) -> EngineAddress:
        if self._actor is None:
            self._actor = self._create()
        try:
            url = await within(self._timeout_s, f"starting {self.name}", self._actor.start.remote(0))
        except ray.exceptions.RayActorError:
            self._actor = self._create()
            url = await within(self._timeout_s, f"starting {self.name}", self._actor.start.remote(0))
        return self._address(self.name, url)

    async def wait_exit(self) -> int:
        try:
            return await self._actor.wait_exit.remote()
        except ray.exceptions.RayActorError:
            return -1

    async def stop(self) -> None:
        if self._actor is None:
            return
        try:
            await within(15, f"stopping {self.name}", self._actor.stop.remote())
        finally:
            ray.kill(self._actor)
