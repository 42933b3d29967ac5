"""The trainer of a simulated run, seen by the loops as ``backend.remote.Trainer`` is."""

import asyncio
from collections.abc import Sequence
from typing import Literal

from backend.batching import TrainBatch
from backend.simulate.engine import Engine
from backend.simulate.pool import SimulatedPool
from backend.trainer_result import StepResult
from bridge.report import PublishReport
from configs.schema.simulate import SimulateConfig

Interrupt = Literal["retract", "in_place", "abort", "drain"]
"""What becomes of running requests when a version is published."""


class SimulatedTrainer:
    """Takes as long as the model says to train a batch and to publish a version."""

    def __init__(self, model: SimulateConfig, gpus: int, pool: SimulatedPool, interrupt: Interrupt) -> None:
        self._model = model
        self._gpus = gpus
        self._pool = pool
        self._interrupt = interrupt
        self._version = 0
        self.training: list[tuple[float, float]] = []
        """From when to when each step was trained."""
        self.pauses: list[tuple[float, float]] = []
        """From when to when the serving engines were paused for each version."""

    async def train(self, batch: TrainBatch) -> StepResult:
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
        self._version = batch.version + 1
        trained = sum(t.response_length for t in batch.trajectories)
        return StepResult(self._version, {"train/tokens": float(trained)})

    async def publish(self, engines: Sequence[Engine]) -> PublishReport:
        model, mode = self._model.transfer, self._interrupt
        loop = asyncio.get_running_loop()
        began = loop.time()
        await asyncio.sleep(model.prepare_s)
        if mode == "drain":
            await self._pool.drained(engines)
        paused = loop.time()
        for engine in engines:
            engine.pause()
        await asyncio.sleep(model.pause_s + model.total_bytes / model.bytes_per_s)
        for engine in engines:
            engine.resume(self._version, reprefill=mode in ("retract", "abort"), resend=mode == "abort")
        now = loop.time()
        if len(self.pauses) < self._version:  # else a restarted engine is brought up to date
            self.pauses.append((paused, now))
        return PublishReport(
            self._version,
            [engine.name for engine in engines],
            bytes_sent=model.total_bytes,
            stall_s=now - paused,
            total_s=now - began,
        )

    def _slow_down(self, factor: float) -> None:
        if self._model.engine.slowdown != 1.0:
            self._pool.slow_down(factor)
