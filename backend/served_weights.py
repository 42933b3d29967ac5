"""The trainer's weights and the engines that serve them, moved together."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

from backend.batching import TrainBatch
from backend.remote import Trainer
from backend.trainer_result import StepResult
from bridge.report import PublishReport
from rollout.engine.client import EngineAddress
from rollout.engine.pool import EnginePool


@dataclass(frozen=True)
class Advance:
    """One version further."""

    result: StepResult
    report: PublishReport
    train_s: float


class ServedWeights:
    """While weights change or travel, nobody else moves them: no engine starts to serve between the two."""

    def __init__(self, trainer: Trainer, pool: EnginePool, drain_s: float | None = None) -> None:
        """``drain_s``: wait so long for the running requests before a version is published."""
        self._trainer = trainer
        self._pool = pool
        self._drain_s = drain_s
        self._moving = asyncio.Lock()

    async def connect(self, version: int, checkpoint: Path | None) -> None:
        """Start the trainer, from a checkpoint if there is one; its weights are ``version`` from now on."""
        async with self._moving:
            await self._trainer.connect()
            if checkpoint is not None:
                await self._trainer.restore(checkpoint, version)
            else:
                await self._trainer.renumber(version)

    async def advance(self, batch: TrainBatch) -> Advance:
        """Train one step and bring every serving engine to the new version.

        Engines that missed it are out of the pool; the report names them, and they are to be rebuilt.
        """
        async with self._moving:
            began = time.monotonic()
            result = await self._trainer.train(batch)
            train_s = time.monotonic() - began
            async with self._pool.drained(self._drain_s) if self._drain_s is not None else nullcontext():
                report = await self._publish(result.version)
            return Advance(result, report, train_s)

    async def _publish(self, version: int) -> PublishReport:
        report = await self._trainer.publish([client.address for client in self._pool.clients])
        for client in self._pool.clients:
            if client.name in report.failed:
                await self._pool.remove(client)
        self._pool.version = version
        return report

    async def bring_up_to_date(
        self, engine: EngineAddress, admit: Callable[[], Awaitable[None]]
    ) -> str | None:
        """Bring an engine that holds version 0 to the current one, then ``admit`` it; else why it is not."""
        async with self._moving:
            if self._pool.version > 0:
                report = await self._trainer.publish([engine])
                if engine.name in report.failed:
                    return report.failed[engine.name]
            await admit()
            return None
