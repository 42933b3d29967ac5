"""The trainer of a simulated run and its GPUs, which implement the same ports as the real ones."""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext

from slipstream.backend.batch.skipped import SkippedUpdate
from slipstream.backend.batch.train_batch import EncodedBatch, TrainBatch
from slipstream.backend.driver.processes.devices import TrainerTurn
from slipstream.backend.simulate.simulated_engine import Engine
from slipstream.backend.simulate.simulated_pool import SimulatedPool
from slipstream.bridge.publish.endpoint import Interrupt
from slipstream.bridge.publish.report import PublishReport
from slipstream.configs.schema import TransportConfig
from slipstream.configs.schema.simulate import SimulateConfig
from slipstream.rollout.engine.client import EngineAddress


class SimulatedTrainer:
    """Takes as long as the model says to train a batch and to publish a version."""

    def __init__(
        self, model: SimulateConfig, gpus: int, pool: SimulatedPool, interrupt: Interrupt | None
    ) -> None:
        """``interrupt``: None where engines stand still already when they are published to."""
        self._model = model
        self._gpus = gpus
        self._pool = pool
        self._interrupt: Interrupt | None = interrupt
        self.published = 0
        """Newest version that was sent to an engine."""
        self.training: list[tuple[float, float]] = []
        """Begin and end of each training step, in seconds."""
        self.pauses: list[tuple[float, float]] = []
        """Begin and end of the pause of the serving engines for each version, in seconds."""

    async def train(self, batch: EncodedBatch | TrainBatch) -> Mapping[str, float]:
        assert isinstance(batch, EncodedBatch)  # only an own loop changes batches
        model = self._model.trainer
        tokens = sum(header.length for header in batch.headers)
        seconds = model.step_s + tokens / (model.tokens_per_s * self._gpus)
        if any(engine.running for engine in self._pool.engines):
            seconds *= model.slowdown
        loop = asyncio.get_running_loop()
        began = loop.time()
        self._slow_down(self._model.engine.slowdown)
        await asyncio.sleep(seconds)
        self._slow_down(1.0)
        self.training.append((began, loop.time()))
        return {"train/tokens": float(sum(header.response_length for header in batch.headers))}

    async def skipped_updates(self) -> Sequence[SkippedUpdate]:
        """Return no update: simulated training skips none."""
        return ()

    async def publish(
        self, version: int, engines: Sequence[EngineAddress], transport: TransportConfig | None = None
    ) -> PublishReport:
        model, mode = self._model.transfer, self._interrupt
        receivers = self._pool.named(address.name for address in engines)
        loop = asyncio.get_running_loop()
        began = loop.time()
        self.published = version
        await asyncio.sleep(model.prepare_s)
        paused = loop.time()
        if mode is not None:
            await stop(self._pool, receivers, mode)
            paused = loop.time()
        await asyncio.sleep(model.stall_s)
        if mode is not None:
            go_on(receivers, version, mode)
            if len(self.pauses) < version:  # else a restarted engine is brought up to date
                self.pauses.append((paused, loop.time()))
        return PublishReport(
            version,
            [engine.name for engine in receivers],
            bytes_sent=model.bytes,
            stall_s=loop.time() - paused if mode is not None else 0.0,
            total_s=loop.time() - began,
        )

    async def logprobs(self, ids: Sequence[int]) -> list[float]:
        """Raise: simulated weights are not verified."""
        raise AssertionError("a simulated trainer computes no log-probs")

    def kill(self) -> None:
        """Raise: a simulated trainer does not fail."""
        raise AssertionError("a simulated trainer cannot fail")

    def _slow_down(self, factor: float) -> None:
        if self._model.engine.slowdown != 1.0:
            self._pool.slow_down(factor)


async def stop(pool: SimulatedPool, engines: Sequence[Engine], interrupt: Interrupt) -> None:
    """Pause ``engines``, with ``drain`` once none of them runs a request."""
    if interrupt == "drain":
        await pool.drained(engines)
    for engine in engines:
        engine.pause()


def go_on(engines: Sequence[Engine], version: int, interrupt: Interrupt) -> None:
    """Resume ``engines``, which hold ``version`` now."""
    for engine in engines:
        engine.resume(version, reprefill=interrupt in ("retract", "abort"), resend=interrupt == "abort")


class TimeShared:
    """Trainer and engines take turns on the same GPUs."""

    shared = True

    def __init__(self, trainer: SimulatedTrainer, pool: SimulatedPool, interrupt: Interrupt) -> None:
        self._trainer = trainer
        self._pool = pool
        self._interrupt: Interrupt = interrupt

    def starting(self) -> AbstractAsyncContextManager[None]:
        return nullcontext()

    def trainer_gone(self) -> None:
        """Do nothing: a simulated trainer lives as long as its run."""

    @asynccontextmanager
    async def training(self, *newcomers: EngineAddress) -> AsyncIterator[TrainerTurn]:
        loop, turn = asyncio.get_running_loop(), TrainerTurn()
        restarted = self._pool.named(address.name for address in newcomers)
        await stop(self._pool, self._pool.clients, self._interrupt)
        for engine in restarted:
            engine.pause()
        began = loop.time()
        yield turn
        go_on([*self._pool.clients, *restarted], self._trainer.published, self._interrupt)
        turn.stood_s = loop.time() - began
        if not restarted:  # else a restarted engine is brought up to date
            self._trainer.pauses.append((began, loop.time()))

    def publishing(self) -> AbstractAsyncContextManager[None]:
        return nullcontext()
