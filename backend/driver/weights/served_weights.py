"""The trainer's weights and the engines that serve them, moved together.

    train ──► publish ──► version v+1 ──► verdict on what the engines hold, while the next step trains
                │                            │
                └─ failed engine: condemned  └─ wrong engine: condemned, its doubted tokens are sampled again

What an engine samples from weights that are still to be verified is held back in the collectors. A good
verdict releases it into completions.

A trainer that dies leaves the engines with the version that they serve. Restored from an older version, it
gets no engine back to that number: the engines get a copy of its weights as the next version. Engines that
start meanwhile, or whose weights were cut off, wait for it.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Generic

from slipstream.backend.batch.skipped import SkippedUpdate
from slipstream.backend.batch.train_batch import EncodedBatch, TrainBatch
from slipstream.backend.cluster.trainer_failed import TrainerFailed
from slipstream.backend.driver.ports import ClientT, ServingEngines, Trainer
from slipstream.backend.driver.processes.devices import Devices, TrainerTurn
from slipstream.backend.driver.weights.interrupted import InterruptedUpdates
from slipstream.backend.driver.weights.skipped import skipped_in
from slipstream.backend.driver.weights.transports import Transports
from slipstream.backend.driver.weights.verification import Verifier, WeightsMismatch
from slipstream.bridge.publish.report import PublishReport
from slipstream.rollout.collection.driver.batches import Batches
from slipstream.rollout.engine.client import EngineAddress
from slipstream.rollout.system.changes import Changes


class TrainerLife:
    """Tells whether the trainer lives to all parts that have to know it. Single event loop.

    its callers ──fail──► LOST ──► revival: killed, started again, restored ──restored──► ALIVE
                           │                                                     │
                           └──── training, engines to be brought up to date: wait ┘
    """

    def __init__(self) -> None:
        self._error: TrainerFailed | None = None
        self.incarnation = 0
        """Number of times that the trainer was restored."""
        self._changes = Changes()

    @property
    def is_alive(self) -> bool:
        """True unless the trainer has failed and was not restored since."""
        return self._error is None

    def fail(self, error: TrainerFailed) -> None:
        """Note that the trainer has failed. Of several reasons, the first one counts."""
        if self._error is None:
            self._error = error
            self._changes.notify()

    def restored(self) -> None:
        """Note that a new trainer has the state of a checkpoint, which the engines serve, too."""
        self._error = None
        self.incarnation += 1
        self._changes.notify()

    async def lost(self) -> TrainerFailed:
        """Wait until the trainer has failed. Return the reason."""
        return await self._changes.first(lambda: self._error)

    async def alive(self) -> None:
        """Wait until the trainer is alive. Its restart has time-outs."""
        await self._changes.first(lambda: self.is_alive or None)


log = logging.getLogger(__name__)

ROOM_RETRY_S = 10.0
"""Seconds after which a version is sent again for which there was no room. Somebody has to make it."""


class TrainedWeights:
    """One training step, whose weights are to be published."""

    def __init__(
        self,
        version: int,
        metrics: Mapping[str, float],
        skipped: Sequence[SkippedUpdate],
        train_s: float,
        publish: Callable[[], Awaitable[PublishReport]],
    ) -> None:
        """``version``: that of the new weights. ``skipped``: optimizer updates that the step has skipped."""
        self.version = version
        self.metrics = metrics
        self.skipped = skipped
        self.train_s = train_s
        self._publish = publish
        self.report: PublishReport | None = None
        """None until the weights are published."""

    async def publish(self) -> PublishReport:
        """Bring every serving engine to these weights. Raises TrainerFailed.

        Engines that missed them are condemned; the report names them.
        """
        self.report = await self._publish()
        return self.report


@dataclass(eq=False)
class _Newcomer:
    """An engine that is to get the current version."""

    engine: EngineAddress
    admit: Callable[[], None]
    is_settled: bool = False
    refused: str | None = None
    """Why it is not admitted."""
    mismatch: str = ""
    """Difference between trainer and engine with the initial weights."""


class ServedWeights(Generic[ClientT]):
    """Moves weights, one move at a time: no engine starts to serve between a step and its publication."""

    def __init__(
        self,
        trainer: Trainer,
        roster: ServingEngines[ClientT],
        devices: Devices,
        batches: Batches,
        *,
        verifier: Verifier | None = None,
        interrupted: InterruptedUpdates | None = None,
        transports: Transports | None = None,
        starts_served: bool = True,
        note: Callable[[str], None] = log.warning,
    ) -> None:
        """``interrupted``: ends updates that a dead trainer has left; None where no trainer dies.

        ``transports``: decide which transport a version leaves by; None: always the recipe's.
        ``starts_served``: an engine that has started holds the trainer's initial weights already. ``note``:
        hears what somebody has to do something about.
        """
        self._trainer = trainer
        self._roster = roster
        self._devices = devices
        self._batches = batches
        self._verifier = verifier
        self._interrupted = interrupted
        self._transports = transports
        self._starts_served = starts_served
        self._newcomers: list[_Newcomer] = []
        self._cut_off: set[EngineAddress] = set()
        """Engines that may hold a mixture of two versions since a trainer died. They stand still."""
        self._note = note
        self.life = TrainerLife()
        self._moving = asyncio.Lock()
        self._verdict: asyncio.Task[None] | None = None

    @property
    def transports_given_up(self) -> int:
        """Number of transports that have failed before the one that versions take now."""
        return 0 if self._transports is None else self._transports.given_up

    @asynccontextmanager
    async def starting(self) -> AsyncIterator[None]:
        """Start the trainer inside the block, for the first time or after it was killed.

        Engines that are ready meanwhile wait for its end.
        """
        async with self._moving:
            self._devices.trainer_gone()
            async with self._devices.training():
                yield

    @asynccontextmanager
    async def trained(
        self, batch: EncodedBatch | TrainBatch, version: int
    ) -> AsyncIterator["TrainedWeights"]:
        """Train one step before the block, which publishes its result as ``version`` (``publish``).

        No engine starts to serve before the block has ended. Raises TrainerFailed; the version is published
        nevertheless if the run has moved to it.
        """
        async with self._moving:
            async with AsyncExitStack() as verification, self.trainers_turn() as turn:
                began = time.monotonic()
                metrics = await self._trainer.train(batch)
                train_s = time.monotonic() - began
                skipped = await skipped_in(self._trainer, metrics)
                publish = partial(self._publish_verified, version, verification)
                weights = TrainedWeights(version, metrics, skipped, train_s, publish)
                yield weights
            if weights.report is not None:
                weights.report.stall_s += turn.stood_s

    async def publish_copy(self, version: int) -> None:
        """Bring every serving engine to the weights that the trainer holds, as ``version``.

        Engines that missed it are condemned. Raises TrainerFailed.
        """
        async with self._moving, AsyncExitStack() as verification, self.trainers_turn():
            await self._publish_verified(version, verification)

    async def _publish_verified(self, version: int, verification: AsyncExitStack) -> PublishReport:
        """Publish ``version``. At the end of ``verification`` another task begins to wait for its verdict."""
        await self.settled()
        if self._verifier is not None and self._verifier.due(version):
            # The version can be verified even if the trainer does not survive its publication.
            expected = await self._trainer.logprobs(self._verifier.text)
            await verification.enter_async_context(self._verified(self._verifier, version, expected))
        async with self._devices.publishing():
            return await self._publish(version)

    @asynccontextmanager
    async def _verified(self, verifier: Verifier, version: int, expected: list[float]) -> AsyncIterator[None]:
        """Verify ``version``, which is published inside the block, after the block.

        What the engines sample from the version is held back until the verdict.
        """
        await self._roster.doubt(version)
        try:
            yield
        finally:
            if self._batches.core.sampled_version == version:
                verifying = self._verify(verifier, version, expected)
                self._verdict = asyncio.create_task(verifying, name=f"verdict on version {version}")
            else:
                for client in self._roster.clients:  # they never had it, or are not asked any more
                    self._roster.trust(client)

    @asynccontextmanager
    async def trainers_turn(self, *newcomers: EngineAddress) -> AsyncIterator[TrainerTurn]:
        """Give the devices to the trainer inside the block. ``newcomers``: engines not in the roster yet."""
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

        Engines that come together get it together: a thousand sends one after the other would keep the
        trainer waiting for half an hour. Return None, or why the engine was not admitted. Waits while there
        is no trainer. Raises WeightsMismatch when trainer and engine compute different log-probs from the
        initial weights.
        """
        newcomer = _Newcomer(engine, admit)
        self._newcomers.append(newcomer)
        try:
            while not newcomer.is_settled:
                if not self.life.is_alive:
                    with self._roster.awaited():
                        await self.life.alive()
                await self._bring_up_newcomers()
        finally:
            self._newcomers.remove(newcomer)
        if newcomer.mismatch:
            raise WeightsMismatch(newcomer.mismatch)
        return newcomer.refused

    async def _bring_up_newcomers(self) -> None:
        """Bring up all engines that wait for it, unless another caller has done so meanwhile."""
        engines: list[EngineAddress] = []
        try:
            async with self._moving:
                waiting = [each for each in self._newcomers if not each.is_settled]
                engines = [each.engine for each in waiting]
                if self.life.is_alive and waiting:
                    await self._bring_up_to_date(waiting)
        except TrainerFailed as error:
            self._trainer.kill()
            self.life.fail(error)
            if self._interrupted is not None:  # else their next update could not begin
                stock = await self._interrupted.ended(self._batches.core.version, engines)
                self._cut_off |= {engine for engine in engines if engine.name in stock.outdated}

    async def _bring_up_to_date(self, newcomers: "Sequence[_Newcomer]") -> None:
        version = self._batches.core.version
        engines = [each.engine for each in newcomers]
        expected: list[float] = []
        failed: dict[str, str] = {}
        async with self.trainers_turn(*engines):
            stale = [
                each for each in engines if version > 0 or not self._starts_served or each in self._cut_off
            ]
            if stale:
                async with self._devices.publishing():
                    failed = dict((await self._send(version, stale)).failed)
                self._cut_off.difference_update(each for each in stale if each.name not in failed)
            held = [each for each in engines if each.name not in failed]
            if self._verifier is not None and held:
                expected = await self._trainer.logprobs(self._verifier.text)
        wrong: Mapping[str, str] = {}
        if self._verifier is not None and held:
            wrong = await self._verifier.wrong(version, expected, held)
        for each in newcomers:
            name = each.engine.name
            each.is_settled = True
            each.refused = failed.get(name) or wrong.get(name)
            if name in wrong and version == 0:
                each.mismatch = f"{name}: {wrong[name]}"
            elif each.refused is None and each in self._newcomers:  # else its caller was cancelled
                each.admit()

    async def _publish(self, version: int) -> PublishReport:
        addresses = [client.address for client in self._roster.clients]
        try:
            report = await self._send(version, addresses)
        except TrainerFailed:
            self._trainer.kill()
            await self._take_stock(addresses)
            raise
        for client in list(self._roster.clients):
            if client.name in report.failed:
                self._roster.condemn(client, report.failed[client.name])
        self._batches.published(version)
        self._roster.announce()
        return report

    async def _take_stock(self, addresses: Sequence[EngineAddress]) -> None:
        """Find out what the engines hold after a publication that the trainer has not survived.

        Intact engines go on; the others serve again with the next version.
        """
        if self._interrupted is None:
            return
        stock = await self._interrupted.ended(self._batches.core.sampled_version, addresses)
        for client in list(self._roster.clients):
            if client.name in stock.failed:
                self._roster.condemn(client, stock.failed[client.name])
            elif client.name in stock.outdated:
                self._cut_off.add(client.address)
                self._roster.withdraw(client, stock.outdated[client.name])

    async def _send(self, version: int, engines: Sequence[EngineAddress]) -> PublishReport:
        """Send the weights, by another transport if the first one does not work. The engines go on meanwhile.

        Raises WeightsMismatch when no engine of this run can get them.
        """
        report = await self._sent(version, engines)
        while self._transports is not None and await self._transports.published(report):
            served = self._batches.core.sampled_version
            engines, lost = await self._transports.standing(served, engines, report)
            report, earlier = await self._sent(version, engines), report
            report.add_earlier(earlier, lost)
        if (reason := report.unservable or report.unsuited) is not None:
            raise WeightsMismatch(reason)
        return report

    async def _sent(self, version: int, engines: Sequence[EngineAddress]) -> PublishReport:
        """Send the weights by the present transport, as soon as there is room for them."""
        report = await self._sent_once(version, engines)
        if report.no_room is not None:
            self._note(
                f"version {version} waits for room, and the engines go on without it: {report.no_room}"
            )
        while report.no_room is not None:
            await asyncio.sleep(ROOM_RETRY_S)
            report = await self._sent_once(version, engines)
        return report

    async def _sent_once(self, version: int, engines: Sequence[EngineAddress]) -> PublishReport:
        if self._transports is None:
            return await self._trainer.publish(version, engines)
        try:
            return await self._trainer.publish(version, engines, self._transports.current)
        except TrainerFailed as error:
            if engines:
                await self._transports.trainer_failed(error)
            raise

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
