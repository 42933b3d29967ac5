"""The part of a trainer's rank that writes checkpoints and takes them over."""

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from slipstream.backend.megatron.checkpoint import RankCheckpoints


class CheckpointedRank:
    """All ranks are called together, except for ``checkpoint_done``."""

    _checkpoints: "RankCheckpoints"
    step = 0
    """Training steps done. What is drawn or scheduled by time follows it."""
    version = 0
    """The number of the present weights. Never used twice, so it can jump where a run goes on."""

    def begin_checkpoint(self, folder: str) -> None:
        """Take a snapshot and start to write it into ``folder``, which all ranks see, in the background."""
        self._checkpoints.begin(Path(folder), step=self.step, version=self.version)

    def checkpoint_done(self) -> bool:
        """Has this rank's writing ended, well or not. Does not wait, and needs no other rank."""
        return self._checkpoints.written

    def finish_checkpoint(self) -> None:
        """Wait for the writing and make the checkpoint readable.

        Raises CheckpointError on every rank when it has failed on any; training can go on all the same.
        """
        self._checkpoints.finish()

    def restore(self, folder: str, version: int) -> int:
        """Take over the state of a checkpoint, as version ``version``; the training steps it had done."""
        self.step = self._checkpoints.load(Path(folder))
        self.version = version
        return self.step
