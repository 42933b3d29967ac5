"""The trainer's weights and the engines that serve them, moved together.

    train -> publish -> serve -> the verdict on what is served, while the next step trains

What engines sample from weights that are still to be verified is held back in the pool. It becomes part of
answers when the verdict is good; when it is not, it is sampled again elsewhere and the engine is given up.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

from backend.batching import TrainBatch
from backend.remote import Trainer
from backend.trainer_result import StepResult
from backend.verification import Verifier, WeightsMismatch
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

    def __init__(
        self,
        trainer: Trainer,
        pool: EnginePool,
        *,
        drain_s: float | None = None,
        verifier: Verifier | None = None,
    ) -> None:
        """``drain_s``: wait so long for the running requests before a version is published."""
        self._trainer = trainer
        self._pool = pool
        self._drain_s = drain_s
        self._verifier = verifier
        self._moving = asyncio.Lock()
        self._verdict: asyncio.Task[None] | None = None

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
            await self.settled()
            doubted = self._verifier is not None and self._verifier.due(result.version)
            if doubted:
                self._pool.doubt(result.version)
            async with self._pool.drained(self._drain_s) if self._drain_s is not None else nullcontext():
                report = await self._publish(result.version)
            if doubted:
                verifying = self._verify(result.version, await self._trainer.logprobs(self._verifier.text))
                self._verdict = asyncio.create_task(verifying, name=f"verdict on version {result.version}")
            return Advance(result, report, train_s)

    async def settled(self) -> None:
        """Wait for the verdict on the last version. Raises what asking for it has raised."""
        if self._verdict is not None:
            verdict, self._verdict = self._verdict, None
            await verdict

    async def cancel(self) -> None:
        """Without a verdict."""
        if self._verdict is not None:
            self._verdict.cancel()
            await asyncio.wait({self._verdict})

    async def _publish(self, version: int) -> PublishReport:
        report = await self._sent([client.address for client in self._pool.clients])
        for client in self._pool.clients:
            if client.name in report.failed:
                await self._pool.remove(client)
        self._pool.version = version
        return report

    async def _sent(self, engines: Sequence[EngineAddress]) -> PublishReport:
        """Engines that have got a part because of another one are sent everything again, once."""
        report = await self._trainer.publish(engines)
        if not report.interrupted:
            return report
        again = [engine for engine in engines if engine.name in report.interrupted]
        return report.repeated(await self._trainer.publish(again))

    async def _verify(self, version: int, expected: list[float]) -> None:
        assert self._verifier is not None
        clients = self._pool.clients
        try:
            wrong = await self._verifier.wrong(version, expected, [client.address for client in clients])
        except Exception as error:  # without a verdict, answers would be held back for ever
            wrong = {client.name: f"verifying version {version} failed: {error!r}" for client in clients}
        for client in clients:
            if client.name in wrong:
                await self._pool.condemn(client, wrong[client.name])
            else:
                self._pool.trust(client)

    async def bring_up_to_date(
        self, engine: EngineAddress, admit: Callable[[], Awaitable[None]]
    ) -> str | None:
        """Bring an engine that holds version 0 to the current one, then ``admit`` it; else why it is not.

        Raises WeightsMismatch when it computes something else than the trainer from the initial weights.
        """
        async with self._moving:
            version = self._pool.version
            if version > 0:
                report = await self._sent([engine])
                if engine.name in report.failed:
                    return report.failed[engine.name]
            if self._verifier is not None:
                expected = await self._trainer.logprobs(self._verifier.text)
                wrong = await self._verifier.wrong(version, expected, [engine])
                if wrong and version == 0:
                    raise WeightsMismatch(f"{engine.name}: {wrong[engine.name]}")
                if wrong:
                    return wrong[engine.name]
            await admit()
            return None
