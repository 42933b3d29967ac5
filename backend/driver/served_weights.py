"""The trainer's weights and the engines that serve them, moved together.

    train ──► publish ──► version v+1 ──► verdict on what the engines hold, while the next step trains
                │                            │
                └─ failed engine: condemned  └─ wrong engine: condemned, its doubted tokens are sampled again

What an engine samples from weights that are still to be verified is held back in the collectors. A good
verdict releases it into completions.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Generic

from slipstream.backend.batch.skipped import SkippedUpdate
from slipstream.backend.batch.train_batch import EncodedBatch
from slipstream.backend.driver.devices import Devices, Turn
from slipstream.backend.driver.ports import ClientT, ServingEngines, Trainer, VersionOwner
from slipstream.backend.driver.skipped import skipped_in
from slipstream.backend.driver.verification import Verifier, WeightsMismatch
from slipstream.bridge.publish.report import PublishReport
from slipstream.rollout.engine.client import EngineAddress


@dataclass(frozen=True)
class Advance:
    """One training step and the publication of its weights."""

    version: int
    metrics: Mapping[str, float]
    skipped: Sequence[SkippedUpdate]
    """Optimizer updates that the step has skipped."""
    report: PublishReport
    train_s: float


class ServedWeights(Generic[ClientT]):
    """Moves weights, one move at a time: no engine starts to serve between a step and its publication."""

    def __init__(
        self,
        trainer: Trainer,
        roster: ServingEngines[ClientT],
        devices: Devices,
        owner: VersionOwner,
        *,
        verifier: Verifier | None = None,
    ) -> None:
        self._trainer = trainer
        self._roster = roster
        self._devices = devices
        self._owner = owner
        self._verifier = verifier
        self._moving = asyncio.Lock()
        self._verdict: asyncio.Task[None] | None = None

    @asynccontextmanager
    async def starting(self) -> AsyncIterator[None]:
        """Start the trainer inside the block. Engines that are ready meanwhile wait for its end."""
        async with self._moving, self._devices.training():
            yield

    async def advance(self, batch: EncodedBatch, version: int) -> Advance:
        """Train one step and bring every serving engine to its result, ``version``.

        Engines that missed it are condemned; the report names them.
        """
        async with self._moving:
            async with self.trainers_turn() as turn:
                began = time.monotonic()
                metrics = await self._trainer.train(batch)
                train_s = time.monotonic() - began
                skipped = await skipped_in(self._trainer, metrics)
                await self.settled()
                verifier = self._verifier if self._verifier and self._verifier.due(version) else None
                if verifier is not None:
                    await self._roster.doubt(version)
                async with self._devices.publishing():
                    report = await self._publish(version)
                expected = await self._trainer.logprobs(verifier.text) if verifier is not None else []
            report.stall_s += turn.stood_s
            if verifier is not None:
                verifying = self._verify(verifier, version, expected)
                self._verdict = asyncio.create_task(verifying, name=f"verdict on version {version}")
            return Advance(version, metrics, skipped, report, train_s)

    @asynccontextmanager
    async def trainers_turn(self, *newcomers: EngineAddress) -> AsyncIterator[Turn]:
        """Let the trainer compute inside the block. ``newcomers`` run, and are not in the roster yet."""
        if self._devices.shared:
            await self.settled()  # an engine that stands still gives no verdict
        async with self._devices.training(*newcomers) as turn:
            yield turn

    async def settled(self) -> None:
        """Wait for the verdict on the last version. Raises what the verification has raised."""
        if (verdict := self._verdict) is not None:
            await asyncio.wait({verdict})
            if self._verdict is verdict:
                self._verdict = None
            verdict.result()

    async def cancel(self) -> None:
        """Give up a verdict that is pending."""
        if self._verdict is not None:
            self._verdict.cancel()
            await asyncio.wait({self._verdict})

    async def bring_up_to_date(self, engine: EngineAddress, admit: Callable[[], None]) -> str | None:
        """Bring an engine that holds the initial weights to the current version, then ``admit`` it.

        Return None, or why it was not admitted. Raises WeightsMismatch when trainer and engine compute
        different log-probs from the initial weights.
        """
        async with self._moving:
            version = self._owner.version
            expected: list[float] = []
            async with self.trainers_turn(engine):
                if version > 0:
                    async with self._devices.publishing():
                        report = await self._send(version, [engine])
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
            admit()
            return None

    async def _publish(self, version: int) -> PublishReport:
        report = await self._send(version, [client.address for client in self._roster.clients])
        for client in list(self._roster.clients):
            if client.name in report.failed:
                self._roster.condemn(client, report.failed[client.name])
        self._owner.published(version)
        self._roster.announce()
        return report

    async def _send(self, version: int, engines: Sequence[EngineAddress]) -> PublishReport:
        """Send the weights, once more to engines whose transfer another engine's failure cut short."""
        report = await self._trainer.publish(version, engines)
        if not report.interrupted:
            return report
        interrupted = [engine for engine in engines if engine.name in report.interrupted]
        return report.merged(await self._trainer.publish(version, interrupted))

    async def _verify(self, verifier: Verifier, version: int, expected: list[float]) -> None:
        clients = list(self._roster.clients)
        try:
            wrong = await verifier.wrong(version, expected, [client.address for client in clients])
        except Exception as error:  # without a verdict, completions would be held back for ever
            wrong = {client.name: f"verifying version {version} failed: {error!r}" for client in clients}
        for client in clients:
            if client.name in wrong:
                self._roster.condemn(client, wrong[client.name])
            else:
                self._roster.trust(client)
