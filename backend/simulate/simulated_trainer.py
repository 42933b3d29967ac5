"""The trainer of a simulated run and its GPUs, which implement the same ports as the real ones."""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from pathlib import Path

from slipstream.backend.batch.skipped import SkippedUpdate
from slipstream.backend.batch.train_batch import EncodedBatch, TrainBatch
from slipstream.backend.driver.ports import TrainerFailed
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
        self._end: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        """The reason why the ranks have ended, once they have."""
        self._back_s = 0.0
        self.is_alive = True
        """False from a failure until the trainer is restored."""
        self._steps_s: list[float] = []
        """Seconds of each training step that the present weights are made of."""
        self.undone_s = 0.0
        """Seconds of training steps that were undone or cut off."""
        self.published = 0
        """Newest version that was sent to an engine."""
        self.training: list[tuple[float, float]] = []
        """Begin and end of each training step, in seconds."""
        self.pauses: list[tuple[float, float]] = []
        """Begin and end of the pause of the serving engines for each version, in seconds."""

    @property
    def useful_s(self) -> float:
        """Seconds of the training that the present weights are made of."""
        return sum(self._steps_s)

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
        try:
            await self._lasts(seconds, "training a step")
        except TrainerFailed:
            self.undone_s += loop.time() - began
            raise
        finally:
            self._slow_down(1.0)
        self.training.append((began, loop.time()))
        self._steps_s.append(seconds)
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
        await self._lasts(model.prepare_s, "preparing a publication")
        paused = loop.time()
        if mode is not None:
            await stop(self._pool, receivers, mode)
            paused = loop.time()
        try:
            await self._lasts(model.stall_s, "publishing a version")
        except TrainerFailed:
            if mode is not None:  # nothing whole has arrived: they go on with what they have
                for engine in receivers:
                    go_on([engine], engine.version, mode)
            raise
        self.published = version
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

    # ---- failures

    def fail(self, reason: str, back_s: float) -> None:
        """End the ranks. Started again, the trainer is restored after ``back_s`` seconds."""
        self._back_s = back_s
        self.is_alive = False
        self._end.set_result(reason)

    def kill(self) -> None:
        if not self._end.done():
            self.fail("it was killed", self._back_s)

    def create(self) -> None:
        self._end = asyncio.get_running_loop().create_future()

    async def connect(self) -> None:
        await self._lasts(self._back_s, "starting the trainer")
        self.is_alive = True

    async def respond(self) -> None:
        await self._lasts(0.0, "asking whether the trainer is alive")

    async def restore(self, folder: Path) -> int:
        return int(folder.name)

    async def restore_from_nodes(self, tokens: Mapping[int, str]) -> tuple[int | None, Sequence[str]]:
        return None, ()  # a simulated checkpoint is in the run folder alone

    def undone(self, step: int) -> None:
        """Note that the run has gone back to ``step``: what was trained since is to be trained again."""
        self.undone_s += sum(self._steps_s[step:])
        del self._steps_s[step:]

    async def _lasts(self, seconds: float, what: str) -> None:
        """Wait for the end of a call. Raises TrainerFailed if the ranks end before."""
        if not self._end.done() and seconds:
            await asyncio.wait({self._end}, timeout=seconds)
        if self._end.done():
            raise TrainerFailed(f"{what} failed: {self._end.result()}")

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
        """Do nothing: its next turn is like any other."""

    @asynccontextmanager
    async def training(self, *newcomers: EngineAddress) -> AsyncIterator[TrainerTurn]:
        loop, turn = asyncio.get_running_loop(), TrainerTurn()
        restarted = self._pool.named(address.name for address in newcomers)
        await stop(self._pool, self._pool.clients, self._interrupt)
        for engine in restarted:
            engine.pause()
        began = loop.time()
        try:
            yield turn
        finally:
            go_on([*self._pool.clients, *restarted], self._trainer.published, self._interrupt)
        turn.stood_s = loop.time() - began
        if not restarted:  # else a restarted engine is brought up to date
            self._trainer.pauses.append((began, loop.time()))

    def publishing(self) -> AbstractAsyncContextManager[None]:
        return nullcontext()
