"""A trainer that dies is started again in place, while the engines and the collectors go on.

    lost ──► all ranks killed ──► new ranks start ────────────────────────► restored ──► published ──► alive
                  │                                                            ▲         under a new number
                  └► checkpoint under way settled ──► newest sound checkpoint ─┤ (or one of nodes' disks)
                                                              │                │
                     episodes called off ──► ledger, control core, assignments go back

docs/recovery.md has the states of this and what holds in each.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Generic

from slipstream.backend.checkpoint.checkpoint_errors import CheckpointError
from slipstream.backend.checkpoint.folder import FoundCheckpoint
from slipstream.backend.cluster.trainer_failed import TrainerFailed
from slipstream.backend.driver.ports import ClientT, RestartableTrainer, RestorableCheckpoints
from slipstream.backend.driver.weights.rewind import Rewind
from slipstream.backend.driver.weights.served_weights import ServedWeights
from slipstream.rollout.system.restarts import Restarts

WATCH_S = 5.0
"""Seconds between two questions to the trainer while no other call runs. Ray reports the end of an actor only
to the callers of its methods."""


async def _in_place() -> None:
    """Leave the ranks where they are."""


class TrainerGone(RuntimeError):
    """The trainer must not be started again (``Restarts``), or cannot be restored."""


class Revival(Generic[ClientT]):
    """Single event loop. ``run`` for as long as the trainer is needed."""

    def __init__(
        self,
        trainer: RestartableTrainer,
        weights: ServedWeights[ClientT],
        checkpoints: RestorableCheckpoints,
        rewind: Rewind,
        *,
        step: Callable[[], int],
        restarts: Restarts,
        note: Callable[[str], None],
        place: Callable[[], Awaitable[None]] = _in_place,
    ) -> None:
        """``step``: returns the number of training steps that led to the present weights. ``place``: finds
        nodes for ranks whose own are lost. Raises TrainerFailed if there are none.
        """
        self._trainer = trainer
        self._weights = weights
        self._life = weights.life
        self._checkpoints = checkpoints
        self._rewind = rewind
        self._step = step
        self._began = step()
        """Step from which the present trainer has trained."""
        self._restarts = restarts
        self._note = note
        self._place = place

    @property
    def restarts(self) -> int:
        """Number of restarts so far."""
        return self._restarts.count

    async def run(self) -> None:
        """Restore the trainer whenever it has failed. Ends by cancellation only.

        Raises, in an ExceptionGroup, TrainerGone, and what the ledger raises.
        """
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._watch(), name="watching the trainer")
            while True:
                error = await self._life.lost()
                await self._revive(error)
                self._life.restored()

    async def _watch(self) -> None:
        """Notice the end of a trainer that nobody calls."""
        while True:
            await self._life.alive()
            incarnation = self._life.incarnation
            try:
                await self._trainer.respond()
            except TrainerFailed as error:
                if self._life.incarnation == incarnation:
                    self._life.fail(error)
            else:
                await asyncio.sleep(WATCH_S)

    async def _revive(self, error: Exception) -> None:
        """Start the trainer until it has the state of a checkpoint. Raises TrainerGone."""
        while True:
            try:
                await self._attempt(error)
            except (TrainerFailed, CheckpointError) as failure:
                error = failure
            else:
                return

    async def _attempt(self, error: Exception) -> None:
        self._trainer.kill()
        await self._checkpoints.settled()
        on_nodes = self._on_nodes()
        checkpoint = None if on_nodes else await self._newest(error)
        version = checkpoint.record.version if checkpoint else 0
        self._count("what its nodes hold" if on_nodes else _described(version), error)
        await self._place()
        async with self._weights.starting():
            self._trainer.create()
            with _beside(asyncio.ensure_future(self._trainer.connect())) as connecting:
                if on_nodes:
                    await connecting  # only the ranks know what their nodes hold
                    version, checkpoint = await self._from_nodes(on_nodes, error)
                await self._rewind.to(version)
                self._began = self._step()
                self._checkpoints.restored(self._rewind.step)
                await connecting
            if checkpoint is not None:
                await self._trainer.restore(checkpoint.path)
        if (copy := await self._rewind.copy_begins()) is not None:
            await self._weights.publish_copy(copy)

    def _on_nodes(self) -> dict[int, str]:
        """Return the tokens of versions that the trainer may be restored to from the disks of its nodes."""
        tokens = self._checkpoints.on_nodes()
        return {version: tokens[version] for version in tokens if self._rewind.is_possible(version)}

    async def _from_nodes(
        self, tokens: Mapping[int, str], error: Exception
    ) -> tuple[int, FoundCheckpoint | None]:
        """Restore the trainer from the disks of its nodes, if one of the versions is whole there.

        Return the version, and the checkpoint to restore if there is none.
        """
        try:
            version, notes = await self._trainer.restore_from_nodes(tokens)
        except (CheckpointError, TrainerFailed):
            self._checkpoints.forget_on_nodes()  # the next attempt needs another source
            raise
        for note in notes:
            self._note(note)
        if version is not None:
            return version, None
        checkpoint = await self._newest(error)
        return checkpoint.record.version if checkpoint else 0, checkpoint

    async def _newest(self, error: Exception) -> FoundCheckpoint | None:
        """Return the checkpoint to restore; None for the initial weights. Raises TrainerGone."""
        try:
            checkpoint = await self._checkpoints.newest(self._rewind.is_possible)
        except CheckpointError as damage:
            raise TrainerGone(f"the trainer cannot be restored: {damage}. It has failed: {error}") from error
        for warning in checkpoint.warnings if checkpoint else ():
            self._note(warning)
        return checkpoint

    def _count(self, source: str, error: Exception) -> None:
        """Count a failure before the trainer is restored from ``source``. Raises TrainerGone."""
        if self._step() > self._began:
            self._restarts.progressed()
        self._began = self._step()
        failure = error.described if isinstance(error, TrainerFailed) else str(error)
        if (reason := self._restarts.refused(failure)) is not None:
            raise TrainerGone(f"the trainer {reason}") from error
        self._note(f"the trainer is started again from {source}: {error}")


def _described(version: int) -> str:
    return f"version {version}" if version else "the initial weights"


@contextmanager
def _beside(task: "asyncio.Future[None]") -> Iterator["asyncio.Future[None]"]:
    """Cancel ``task`` when the block ends before it."""
    try:
        yield task
    finally:
        task.cancel()
