"""The trainer of a simulated run and its GPUs, seen by the loops as the real ones are."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext

from slipstream.backend.batch.train_batch import TrainBatch
from slipstream.backend.driver.devices import Turn
from slipstream.backend.simulate.engine import Engine
from slipstream.backend.simulate.pool import SimulatedPool
from slipstream.bridge.endpoint import Interrupt
from slipstream.bridge.report import PublishReport
from slipstream.configs.schema.simulate import SimulateConfig


class SimulatedTrainer:
    """Takes as long as the model says to train a batch and to publish a version."""

    def __init__(
        self, model: SimulateConfig, gpus: int, pool: SimulatedPool, interrupt: Interrupt | None
    ) -> None:
        """``interrupt``: None where engines stand still already when they are published to."""
        self._model = model
        self._gpus = gpus
        self._pool = pool
        self._interrupt = interrupt
        self.version = 0
        self.training: list[tuple[float, float]] = []
        """From when to when each step was trained."""
        self.pauses: list[tuple[float, float]] = []
        """From when to when the serving engines were paused for each version."""

    async def train(self, batch: TrainBatch) -> dict[str, float]:
        model = self._model.trainer
        tokens = sum(t.prompt_tokens + t.sampled_length for t in batch.trajectories)
        seconds = model.step_s + tokens / (model.tokens_per_s * self._gpus)
        if any(engine.running for engine in self._pool.engines):
            seconds *= model.slowdown
        loop = asyncio.get_running_loop()
        began = loop.time()
        self._slow_down(self._model.engine.slowdown)
        await asyncio.sleep(seconds)
        self._slow_down(1.0)
        self.training.append((began, loop.time()))
        trained = sum(t.response_length for t in batch.trajectories)
        return {"train/tokens": float(trained)}

    async def publish(self, version: int, engines: Sequence[Engine]) -> PublishReport:
        self.version = version
        model, mode = self._model.transfer, self._interrupt
        loop = asyncio.get_running_loop()
        began = loop.time()
        await asyncio.sleep(model.prepare_s)
        paused = loop.time()
        if mode is not None:
            await stop(self._pool, engines, mode)
            paused = loop.time()
        await asyncio.sleep(model.pause_s + model.total_bytes / model.bytes_per_s)
        if mode is not None:
            go_on(engines, self.version, mode)
            if len(self.pauses) < self.version:  # else a restarted engine is brought up to date
                self.pauses.append((paused, loop.time()))
        return PublishReport(
            self.version,
            [engine.name for engine in engines],
            bytes_sent=model.total_bytes,
            stall_s=loop.time() - paused if mode is not None else 0.0,
            total_s=loop.time() - began,
        )

    def _slow_down(self, factor: float) -> None:
        if self._model.engine.slowdown != 1.0:
            self._pool.slow_down(factor)


async def stop(pool: SimulatedPool, engines: Sequence[Engine], interrupt: Interrupt) -> None:
    if interrupt == "drain":
        await pool.drained(engines)
    for engine in engines:
        engine.pause()


def go_on(engines: Sequence[Engine], version: int, interrupt: Interrupt) -> None:
    for engine in engines:
        engine.resume(version, reprefill=interrupt in ("retract", "abort"), resend=interrupt == "abort")


class TimeShared:
    """The trainer's GPUs are the engines', which stand still while it has them."""

    shared = True

    def __init__(self, trainer: SimulatedTrainer, pool: SimulatedPool, interrupt: Interrupt) -> None:
        self._trainer = trainer
        self._pool = pool
        self._interrupt: Interrupt = interrupt

    def starting(self) -> AbstractAsyncContextManager[None]:
        return nullcontext()

    @asynccontextmanager
    async def training(self, *newcomers: Engine) -> AsyncIterator[Turn]:
        loop, turn = asyncio.get_running_loop(), Turn()
        await stop(self._pool, self._pool.clients, self._interrupt)
        for engine in newcomers:
            engine.pause()
        began = loop.time()
        yield turn
        go_on([*self._pool.clients, *newcomers], self._trainer.version, self._interrupt)
        turn.stood_s = loop.time() - began
        if not newcomers:  # else a restarted engine is brought up to date
            self._trainer.pauses.append((began, loop.time()))

    def publishing(self) -> AbstractAsyncContextManager[None]:
        return nullcontext()
