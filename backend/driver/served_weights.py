"""The trainer's weights and the engines that serve them, moved together.

    train -> publish -> serve -> the verdict on what is served, while the next step trains

What engines sample from weights that are still to be verified is held back in the pool. It becomes part of
answers when the verdict is good; when it is not, it is sampled again elsewhere and the engine is given up.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from slipstream.backend.batch.train_batch import TrainBatch
from slipstream.backend.driver.devices import Devices, Turn
from slipstream.backend.driver.trainer_client import Trainer
from slipstream.backend.driver.verification import Verifier, WeightsMismatch
from slipstream.bridge.report import PublishReport
from slipstream.rollout.engine.client import EngineAddress
from slipstream.rollout.engine.pool import EnginePool


@dataclass(frozen=True)
class Advance:
    """One version further."""

    version: int
    metrics: dict[str, float]
    report: PublishReport
    train_s: float


class ServedWeights:
    """While weights change or travel, nobody else moves them: no engine starts to serve between the two."""

    def __init__(
        self,
        trainer: Trainer,
        pool: EnginePool,
        devices: Devices,
        *,
        verifier: Verifier | None = None,
    ) -> None:
        self._trainer = trainer
        self._pool = pool
        self._devices = devices
        self._verifier = verifier
        self._moving = asyncio.Lock()
        self._verdict: asyncio.Task[None] | None = None

    async def connect(self, checkpoint: Path | None) -> None:
        """Start the trainer, from a checkpoint if there is one."""
        async with self._moving, self._devices.training():
            await self._trainer.connect()
            if checkpoint is not None:
                await self._trainer.restore(checkpoint)

    async def advance(self, batch: TrainBatch) -> Advance:
        """Train one step and bring every serving engine to the new version.

        Engines that missed it are out of the pool; the report names them, and they are to be rebuilt.
        """
        async with self._moving:
            async with self._trainers_turn() as turn:
                began = time.monotonic()
                version, metrics = batch.version + 1, await self._trainer.train(batch)
                train_s = time.monotonic() - began
                await self.settled()
                doubted = self._verifier is not None and self._verifier.due(version)
                if doubted:
                    self._pool.doubt(version)
                async with self._devices.publishing():
                    report = await self._publish(version)
                expected = await self._trainer.logprobs(self._verifier.text) if doubted else []
            report.stall_s += turn.stood_s
            if doubted:
                verifying = self._verify(version, expected)
                self._verdict = asyncio.create_task(verifying, name=f"verdict on version {version}")
            return Advance(version, metrics, report, train_s)

    async def begin_checkpoint(self, folder: Path) -> None:
        """As ``Trainer.begin_checkpoint``."""
        async with self._trainers_turn():
            await self._trainer.begin_checkpoint(folder)

    async def export_hf(self, folder: Path) -> None:
        """As ``Trainer.export_hf``."""
        async with self._trainers_turn():
            await self._trainer.export_hf(folder)

    @asynccontextmanager
    async def _trainers_turn(self, *newcomers: EngineAddress) -> AsyncIterator[Turn]:
        if self._devices.shared:
            await self.settled()  # an engine that stands still gives no verdict
        async with self._devices.training(*newcomers) as turn:
            yield turn

    async def settled(self) -> None:
        """Wait for the verdict on the last version. Raises what asking for it has raised."""
        if (verdict := self._verdict) is not None:
            await asyncio.wait({verdict})
            if self._verdict is verdict:
                self._verdict = None
            verdict.result()

    async def cancel(self) -> None:
        """Without a verdict."""
        if self._verdict is not None:
            self._verdict.cancel()
            await asyncio.wait({self._verdict})

    async def _publish(self, version: int) -> PublishReport:
        report = await self._sent(version, [client.address for client in self._pool.clients])
        for client in self._pool.clients:
            if client.name in report.failed:
                await self._pool.remove(client)
        self._pool.version = version
        return report

    async def _sent(self, version: int, engines: Sequence[EngineAddress]) -> PublishReport:
        """Engines that have got a part because of another one are sent everything again, once."""
        report = await self._trainer.publish(version, engines)
        if not report.interrupted:
            return report
        again = [engine for engine in engines if engine.name in report.interrupted]
        return report.repeated(await self._trainer.publish(version, again))

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
            version, expected = self._pool.version, []
            async with self._trainers_turn(engine):
                if version > 0:
                    async with self._devices.publishing():
                        report = await self._sent(version, [engine])
                    if engine.name in report.failed:
                        return report.failed[engine.name]
                if self._verifier is not None:
                    expected = await self._trainer.logprobs(self._verifier.text)
            if self._verifier is not None:
                wrong = await self._verifier.wrong(version, expected, [engine])
                if wrong and version == 0:
                    raise WeightsMismatch(f"{engine.name}: {wrong[engine.name]}")
                if wrong:
                    return wrong[engine.name]
            await admit()
            return None
