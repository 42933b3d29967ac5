"""When checkpoints are taken, and how they end: written beside training, committed by one rename."""

import asyncio
import time
from contextlib import suppress
from dataclasses import asdict
from typing import Protocol

from backend.checkpoints import CheckpointError, CheckpointFolder, CheckpointRecord
from backend.recorder import Recorder
from backend.remote import Trainer
from backend.served_weights import ServedWeights
from configs.schema import CheckpointConfig
from rollout.control.gate import AdmissionGate
from rollout.ledger.writer import Ledger


class Checkpoints(Protocol):
    """What the training loop asks for."""

    async def step_done(self, gate: AdmissionGate) -> None:
        """A version was published: the place for a checkpoint of it, if one is due."""
        ...


class TrainerCheckpoints:
    """Checkpoints of the trainer and of the ledger's state, one at a time.

    Training waits only while the ranks copy their state; a checkpoint that falls due while one is being
    written is taken after the next step. One that fails is told to the user, and the run goes on.
    """

    def __init__(
        self,
        config: CheckpointConfig,
        folder: CheckpointFolder,
        trainer: Trainer,
        weights: ServedWeights,
        ledger: Ledger,
        recorder: Recorder,
        last_step: int = 0,
    ) -> None:
        """``last_step``: of the checkpoint that the run was restored from."""
        self._config = config
        self._folder = folder
        self._trainer = trainer
        self._weights = weights
        self._ledger = ledger
        self._recorder = recorder
        self._last_step = last_step
        self._writing: asyncio.Task[None] | None = None

    async def step_done(self, gate: AdmissionGate) -> None:
        every = self._config.every
        if self._writing is not None and self._writing.done():
            self._writing.result()
            self._writing = None
        if every and self._writing is None and gate.step - self._last_step >= every:
            await self._begin(gate)

    async def last(self, gate: AdmissionGate) -> None:
        """The checkpoint of a run's end; returns when it is committed."""
        if self._writing is not None:
            await self._writing
            self._writing = None
        if self._config.every and gate.step > self._last_step:
            await self._begin(gate)
        if self._writing is not None:
            await self._writing

    async def cancel(self) -> None:
        """Give up what is being written: the run ends. Nothing half-written will ever be read."""
        if self._writing is not None:
            self._writing.cancel()
            await asyncio.wait({self._writing})

    async def _begin(self, gate: AdmissionGate) -> None:
        record = CheckpointRecord(
            version=gate.version,
            step=gate.step,
            epoch=self._ledger.epoch,
            data_position=gate.position,
            counts=asdict(gate.counts),
        )
        began = time.monotonic()
        try:
            path = await asyncio.to_thread(self._folder.begin, record.version)
            await self._weights.begin_checkpoint(path)
        except CheckpointError as error:
            self._failed(record, error)
            return
        self._recorder.checkpoint_taken(time.monotonic() - began)
        self._last_step = record.step
        self._writing = asyncio.create_task(self._finish(record), name=f"checkpoint of {record.version}")

    async def _finish(self, record: CheckpointRecord) -> None:
        try:
            with suppress(TimeoutError):  # then finish_checkpoint gives it up, and says so
                await asyncio.wait_for(self._trainer.checkpoint_written(), self._config.timeout_s)
            await self._trainer.finish_checkpoint()
            # What the weights have learned must be in the ledger before a resume can start from them.
            await self._ledger.flushed()
            await asyncio.to_thread(self._folder.commit, record)
            await asyncio.to_thread(self._folder.prune)
        except CheckpointError as error:
            self._failed(record, error)
        else:
            newest = self._folder.versions()[-self._config.keep_last :]
            if len(newest) == self._config.keep_last:
                self._ledger.release(newest[0])

    def _failed(self, record: CheckpointRecord, error: CheckpointError) -> None:
        self._recorder.note(f"no checkpoint of version {record.version}: {error}")
        self._folder.discard(record.version)
