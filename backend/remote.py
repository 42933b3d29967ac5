"""The driver's side of the Ray actors: the trainer's ranks as one trainer, an engine actor as a handle."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from backend.batching import TrainBatch
from backend.configured_ray import ray
from backend.trainer_result import StepResult
from bridge.report import PublishReport
from rollout.engine.client import EngineAddress

T = TypeVar("T")


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
    """All trainer ranks. One call at a time: the ranks meet in collectives."""

    def __init__(self, ranks: Sequence[Any], *, step_timeout_s: float, logs: Path) -> None:
        self._ranks = ranks
        self._timeout_s = step_timeout_s
        self._logs = logs

    async def connect(self) -> None:
        address, port = await within(
            self._timeout_s, "the first trainer rank", self._ranks[0].meeting_point.remote()
        )
        await self._all("building the model", "connect", address, port)

    async def train(self, batch: TrainBatch) -> StepResult:
        return self._only(await self._all(f"training step {batch.version + 1}", "train", ray.put(batch)))

    async def publish(self, engines: Sequence[EngineAddress]) -> PublishReport:
        return self._only(await self._all("publishing the weights", "publish", list(engines)))

    async def export_hf(self, folder: Path) -> None:
        await self._all("writing the HF checkpoint", "export_hf", str(folder))

    def kill(self) -> None:
        for rank in self._ranks:
            ray.kill(rank)

    async def _all(self, what: str, method: str, *args: Any) -> list[Any]:
        calls = [getattr(rank, method).remote(*args) for rank in self._ranks]
        try:
            return await within(self._timeout_s, what, asyncio.gather(*calls))
        except ray.exceptions.RayTaskError as error:
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
    ) -> None:
        self.name = name
        self._create = create
        self._address = address
        self._timeout_s = timeout_s
        self._actor: Any = None

    async def start(self) -> EngineAddress:
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
