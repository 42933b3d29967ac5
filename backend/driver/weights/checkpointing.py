"""Takes checkpoints when they are due: written beside training, committed by one rename.

step done ──► copy the trainer's state (training waits) ──► ranks write ──► ledger flushed ──► rename
                                                              └ first to disks of nodes, if the recipe says so

Restarted ranks find out which versions are whole on the disks of nodes: the driver knows only what was begun.
"""

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, suppress
from dataclasses import asdict

from slipstream.backend.checkpoint.checkpoint_errors import CheckpointError
from slipstream.backend.checkpoint.folder import CheckpointFolder, FoundCheckpoint
from slipstream.backend.checkpoint.manifest import CheckpointRecord, record_digest
from slipstream.backend.cluster.trainer_failed import TrainerFailed
from slipstream.backend.driver.ports import CheckpointListener, RunHistory, RunPosition, RunTrainer
from slipstream.backend.driver.start.feedback import Feedback
from slipstream.configs.schema import CheckpointConfig


class NoHistory:
    """The history of a run without a ledger."""

    def __init__(self, epoch: int = 0, fence: Callable[[], None] = lambda: None) -> None:
        """``fence``: raises when this process may no longer write into the run folder."""
        self.epoch = epoch
        self._fence = fence

    def watermark(self) -> None:
        """Return None: there is nothing to compare with."""

    def checkpointed(self, version: int, digest: str) -> None:
        """Do nothing."""

    async def flushed(self) -> None:
        """Return at once, if a checkpoint may be committed."""
        self._fence()

    def release(self, version: int) -> None:
        """Do nothing."""


TrainersTurn = Callable[[], AbstractAsyncContextManager[object]]
"""Lets the trainer compute inside the block: ``ServedWeights.trainers_turn``."""


class TrainerCheckpoints:
    """Checkpoints of the trainer and of where the ledger stands, one at a time.

    Training waits only while the ranks copy their state. A checkpoint that falls due while another one is
    written is taken after the next step. A checkpoint that fails is noted, and the run goes on. When the
    trainer fails meanwhile, ``step_done`` and ``last`` raise TrainerFailed.
    """

    def __init__(
        self,
        config: CheckpointConfig,
        folder: CheckpointFolder,
        trainer: RunTrainer,
        turn: TrainersTurn,
        history: RunHistory,
        listener: CheckpointListener,
        last_step: int = 0,
        feedback: Feedback | None = None,
        *,
        on_nodes: bool = False,
    ) -> None:
        """``last_step``: step of the checkpoint that the run was restored from. ``feedback``: None in a
        supervised run. ``on_nodes``: the disks of nodes have shares (``checkpoint.local_dir``)."""
        self._config = config
        self._folder = folder
        self._trainer = trainer
        self._turn = turn
        self._history = history
        self._listener = listener
        self._last_step = self._committed_step = last_step
        self._committed = 0
        """Newest version that was committed here. The ledger may not be able to go back to an older one."""
        self._feedback = feedback
        self._writing: asyncio.Task[None] | None = None
        self._uses_nodes = on_nodes
        self._on_nodes: dict[int, str] = {}
        """Digest of the record of each version that the disks of nodes may have, oldest first."""
        self._has_told = False
        """The user knows that the disks of nodes fail."""

    async def step_done(self, run: RunPosition) -> None:
        """Take a checkpoint if ``checkpoint.every`` steps have passed since the last one."""
        every = self._config.every
        if self._writing is not None and self._writing.done():
            self._writing.result()
            self._writing = None
        if every and self._writing is None and run.step - self._last_step >= every:
            self._writing = await self._begin(run)

    async def last(self, run: RunPosition) -> None:
        """Take the checkpoint of a run's end. Returns when it is committed."""
        if self._writing is not None:
            await self._writing
        due = self._config.every and run.step > self._last_step
        self._writing = await self._begin(run) if due else None
        if self._writing is not None:
            await self._writing
        if self._uses_nodes:
            self._on_nodes.clear()
            await self._trainer.forget_on_nodes()

    async def cancel(self) -> None:
        """Give up the checkpoint that is being written. Nothing half-written is ever read."""
        if self._writing is not None:
            self._writing.cancel()
            await asyncio.wait({self._writing})

    async def settled(self) -> None:
        """Wait for the end of a checkpoint that is being written, after the ranks were killed.

        It is committed if they had written all of it, and otherwise given up with a note.
        """
        writing, self._writing = self._writing, None
        if writing is not None:
            await asyncio.wait({writing})
            if not isinstance(error := writing.exception(), TrainerFailed | None):
                raise error

    async def newest(self, is_behind: Callable[[int], bool]) -> FoundCheckpoint | None:
        """Return the newest sound checkpoint that the run can go on from; None if there is none at all.

        ``is_behind``: returns True if the present weights are those of a version or descend from them. Raises
        CheckpointError when damage leaves no checkpoint.
        """

        def reject(record: CheckpointRecord) -> str | None:
            return None if is_behind(record.version) else "the present weights do not descend from it"

        return await asyncio.to_thread(self._folder.latest, reject)

    def on_nodes(self) -> Mapping[int, str]:
        """Return the tokens of versions that may be whole on the disks of nodes: the newest one that the run
        folder has, and newer ones.
        """
        return {version: token for version, token in self._on_nodes.items() if version >= self._committed}

    def forget_on_nodes(self) -> None:
        """Do not count on the disks of nodes until the next checkpoint."""
        self._on_nodes.clear()

    def restored(self, step: int) -> None:
        """Count the steps until the next checkpoint from here: the trainer was restored to ``step``.

        If the run folder has no checkpoint of it yet, the next one is due sooner.
        """
        self._last_step = min(step, self._committed_step)

    async def _begin(self, run: RunPosition) -> asyncio.Task[None] | None:
        """Begin a checkpoint. Return the task that writes it; None when it could not be begun."""
        record = CheckpointRecord(
            version=run.version,
            step=run.step,
            epoch=self._history.epoch,
            data_position=run.position,
            counts=asdict(run.counts),
            ledger=self._history.watermark(),
            feedback=None if self._feedback is None else self._feedback.state(),
        )
        # A driver whose run was taken over must not delete what the new one has begun to write.
        await self._history.flushed()
        began = time.monotonic()
        try:
            path = await asyncio.to_thread(self._folder.begin, record.version)
            async with self._turn():
                await self._trainer.begin_checkpoint(path, self._kept_on_nodes(record))
        except CheckpointError as error:
            self._on_nodes.pop(record.version, None)
            await self._failed(record, error)
            return None
        except TrainerFailed:
            await asyncio.to_thread(self._folder.discard, record.version)
            raise
        self._listener.checkpoint_taken(time.monotonic() - began)
        self._last_step = record.step
        return asyncio.create_task(self._finish(record, began), name=f"checkpoint of {record.version}")

    def _kept_on_nodes(self, record: CheckpointRecord) -> Mapping[int, str] | None:
        """Return what the disks of nodes keep from now on, with this version; None: nothing."""
        if not self._uses_nodes:
            return None
        before = list(self.on_nodes().items())[-self._config.keep_last :]
        self._on_nodes = dict(before) | {record.version: record_digest(record)}
        return self._on_nodes

    def _tell(self, problems: Sequence[str]) -> None:
        """Tell the user, once, what fails on the disks of nodes. The run folder has all checkpoints."""
        if problems and not self._has_told:
            self._has_told = True
            self._listener.note(
                f"checkpoint.local_dir: {'; '.join(problems)}. Such checkpoints are in the run folder alone"
            )

    async def _finish(self, record: CheckpointRecord, began: float) -> None:
        try:
            with suppress(TimeoutError):  # finish_checkpoint then gives it up, with the reason
                await asyncio.wait_for(self._trainer.checkpoint_written(), self._config.timeout_s)
            self._tell(await self._trainer.finish_checkpoint())
            # What the weights have learned must be in the ledger before a resume can start from them.
            await self._history.flushed()
            await asyncio.to_thread(self._folder.commit, record)
            self._committed, self._committed_step = record.version, record.step
            self._history.checkpointed(record.version, record_digest(record))
            await asyncio.to_thread(self._folder.prune)
            versions = await asyncio.to_thread(self._folder.versions)
        except CheckpointError as error:
            await self._failed(record, error)
        except TrainerFailed as error:
            await self._failed(record, error)
            raise
        else:
            self._listener.checkpoint_committed(record.step, time.monotonic() - began)
            newest = versions[-self._config.keep_last :]
            if len(newest) == self._config.keep_last:
                self._history.release(newest[0])

    async def _failed(self, record: CheckpointRecord, error: CheckpointError | TrainerFailed) -> None:
        self._listener.note(f"no checkpoint of version {record.version}: {error}")
        await asyncio.to_thread(self._folder.discard, record.version)
