"""The part of a trainer rank that saves and loads checkpoints."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from slipstream.backend.megatron.checkpoint import RankCheckpoints


class CheckpointedRank:
    """A rank that can be saved and restored. All calls but ``checkpoint_done`` go to all ranks together."""

    _checkpoints: "RankCheckpoints"
    step = 0
    """Training steps done. Learning rates and the draw of mini-batches follow it."""

    def begin_checkpoint(self, folder: Path, tokens: Mapping[int, str] | None = None) -> None:
        """Copy the state, and start to write it in the background into ``folder``, which all ranks see.

        ``tokens``: of the versions that are kept on the disks of nodes, of which the newest is this one.
        """
        self._checkpoints.begin(folder, step=self.step, tokens=tokens)

    def checkpoint_done(self) -> bool:
        """True if this rank has ended writing, successfully or not. Needs no other rank."""
        return self._checkpoints.written

    def finish_checkpoint(self) -> Sequence[str]:
        """Wait for the writing and make the checkpoint readable. Return what has failed on disks of nodes.

        Raises CheckpointError on every rank if writing failed on any. Training can go on all the same.
        """
        return self._checkpoints.finish()

    def restore(self, folder: Path) -> int:
        """Take over the state of a checkpoint. Return the number of training steps it had done."""
        self.step = self._checkpoints.load(folder)
        return self.step

    def restore_from_nodes(self, tokens: Mapping[int, str]) -> tuple[int | None, Sequence[str]]:
        """Take over the newest version that is whole on the disks of nodes.

        Return it, or None, and why newer ones were passed over. ``tokens``: of the versions that may be used.
        Raises CheckpointError on every rank.
        """
        version, step, notes = self._checkpoints.load_from_nodes(tokens)
        if version is not None:
            self.step = step
        return version, notes

    def forget_on_nodes(self) -> None:
        """Delete what the disk of this node has of the run's checkpoints."""
        self._checkpoints.forget_on_nodes()
