"""The part of a trainer rank that writes checkpoints and takes them over."""

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from slipstream.backend.megatron.checkpoint import RankCheckpoints


class CheckpointedRank:
    """All ranks are called together, except for ``checkpoint_done``."""

    _checkpoints: "RankCheckpoints"
    step = 0
    """Training steps done. Learning rates and the draw of mini-batches follow it."""

    def begin_checkpoint(self, folder: Path) -> None:
        """Copy the state and start to write it into ``folder``, which all ranks see, in the background."""
        self._checkpoints.begin(folder, step=self.step)

    def checkpoint_done(self) -> bool:
        """Return whether this rank has ended writing, well or not. Neither waits nor needs another rank."""
        return self._checkpoints.written

    def finish_checkpoint(self) -> None:
        """Wait for the writing and make the checkpoint readable.

        Raises CheckpointError on every rank when writing failed on any. Training can go on all the same.
        """
        self._checkpoints.finish()

    def restore(self, folder: Path) -> int:
        """Take over the state of a checkpoint. Return the number of training steps it had done."""
        self.step = self._checkpoints.load(folder)
        return self.step
