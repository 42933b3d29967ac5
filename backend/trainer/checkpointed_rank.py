"""The part of a trainer rank that saves and loads checkpoints."""

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from slipstream.backend.megatron.checkpoint import RankCheckpoints


class CheckpointedRank:
    """A rank that can be saved and restored. All calls but ``checkpoint_done`` go to all ranks together."""

    _checkpoints: "RankCheckpoints"
    step = 0
    """Training steps done. Learning rates and the draw of mini-batches follow it."""

    def begin_checkpoint(self, folder: Path) -> None:
        """Copy the state, and start to write it in the background into ``folder``, which all ranks see."""
        self._checkpoints.begin(folder, step=self.step)

    def checkpoint_done(self) -> bool:
        """True if this rank has ended writing, successfully or not. Needs no other rank."""
        return self._checkpoints.written

    def finish_checkpoint(self) -> None:
        """Wait for the writing and make the checkpoint readable.

        Raises CheckpointError on every rank if writing failed on any. Training can go on all the same.
        """
        self._checkpoints.finish()

    def restore(self, folder: Path) -> int:
        """Take over the state of a checkpoint. Return the number of training steps it had done."""
        self.step = self._checkpoints.load(folder)
        return self.step
