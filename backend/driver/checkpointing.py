"""When checkpoints are taken, and how they end: written beside training, committed by one rename."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Protocol

from slipstream.backend.checkpoint.errors import CheckpointError
from slipstream.backend.checkpoint.folder import CheckpointFolder
from slipstream.backend.checkpoint.manifest import CheckpointRecord
from slipstream.backend.driver.trainer_client import Trainer
from slipstream.configs.schema import CheckpointConfig
from slipstream.rollout.control.core import GroupCounts


class Progressing(Protocol):
    """Where a run stands."""

    @property
    def version(self) -> int: ...
    @property
    def step(self) -> int: ...
    @property
    def position(self) -> int:
        """Prompts, or examples, drawn so far."""
        ...

    @property
    def counts(self) -> GroupCounts: ...


class Checkpoints(Protocol):
    """What the training loop asks for."""

    async def step_done(self, run: Progressing) -> None:
        """A version was published: the place for a checkpoint of it, if one is due."""
        ...


class History(Protocol):
    """What a run remembers besides its checkpoints: its ledger, if it has one."""

    epoch: int

    async def flushed(self) -> None: ...
    def release(self, version: int) -> None:
        """Nobody will go back behind ``version``."""
        ...


class NoHistory:
    def __init__(self, epoch: int = 0) -> None:
        self.epoch = epoch

    async def flushed(self) -> None:
        """There is nothing to wait for."""

    def release(self, version: int) -> None:
        """There is nothing to forget."""


class Told(Protocol):
    def checkpoint_taken(self, stall_s: float) -> None: ...
    def note(self, text: str) -> None: ...


Snapshot = Callable[[Path], Awaitable[None]]
"""``Trainer.begin_checkpoint``"""


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
        begin: Snapshot,
        history: History,
        told: Told,
        last_step: int = 0,
    ) -> None:
        """``last_step``: of the checkpoint that the run was restored from."""
        self._config = config
        self._folder = folder
        self._trainer = trainer
        self._begin_writing = begin
        self._history = history
        self._told = told
        self._last_step = last_step
        self._writing: asyncio.Task[None] | None = None

    async def step_done(self, run: Progressing) -> None:
        every = self._config.every
        if self._writing is not None and self._writing.done():
            self._writing.result()
            self._writing = None
        if every and self._writing is None and run.step - self._last_step >= every:
            await self._begin(run)

    async def last(self, run: Progressing) -> None:
        """The checkpoint of a run's end; returns when it is committed."""
        if self._writing is not None:
            await self._writing
            self._writing = None
        if self._config.every and run.step > self._last_step:
            await self._begin(run)
        if self._writing is not None:
            await self._writing

    async def cancel(self) -> None:
        """Give up what is being written: the run ends. Nothing half-written will ever be read."""
        if self._writing is not None:
            self._writing.cancel()
            await asyncio.wait({self._writing})

    async def _begin(self, run: Progressing) -> None:
        record = CheckpointRecord(
            version=run.version,
            step=run.step,
            epoch=self._history.epoch,
            data_position=run.position,
            counts=asdict(run.counts),
        )
        began = time.monotonic()
        try:
            path = await asyncio.to_thread(self._folder.begin, record.version)
            await self._begin_writing(path)
        except CheckpointError as error:
            self._failed(record, error)
            return
        self._told.checkpoint_taken(time.monotonic() - began)
        self._last_step = record.step
        self._writing = asyncio.create_task(self._finish(record), name=f"checkpoint of {record.version}")

    async def _finish(self, record: CheckpointRecord) -> None:
        try:
            with suppress(TimeoutError):  # then finish_checkpoint gives it up, and says so
                await asyncio.wait_for(self._trainer.checkpoint_written(), self._config.timeout_s)
            await self._trainer.finish_checkpoint()
            # What the weights have learned must be in the ledger before a resume can start from them.
            await self._history.flushed()
            await asyncio.to_thread(self._folder.commit, record)
            await asyncio.to_thread(self._folder.prune)
        except CheckpointError as error:
            self._failed(record, error)
        else:
            newest = self._folder.versions()[-self._config.keep_last :]
            if len(newest) == self._config.keep_last:
                self._history.release(newest[0])

    def _failed(self, record: CheckpointRecord, error: CheckpointError) -> None:
        self._told.note(f"no checkpoint of version {record.version}: {error}")
        self._folder.discard(record.version)
