"""Policy versions over the whole life of a run, restarts included. Pure.

A version number is used once. A run that is restored from the checkpoint of version f serves those weights
under a new number o, larger than every number that the run has ever begun to publish. The weights that were
trained after f are lost, and their numbers with them.

    0 1 2 3 4 5 6              killed while 6 was being published; the newest checkpoint is that of version 4
              \\
               7 8 9 ...       restored=4 version=7: 7 has the weights of 4; 5 and 6 have no descendants

Tokens from before the restart can still be trained: they carry the log-probs of the policy that sampled them.
The policy of version v lies |v - f| updates away from the restored one, no matter on which side of f. So
these tokens are renumbered as version o - |v - f|, which keeps their distance: a lag is a plain difference of
versions again.
"""

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Restart:
    """One start of the run's driver, which begins an epoch. The first restores version 0 as version 0."""

    epoch: int
    restored: int
    """Version whose weights were restored."""
    version: int
    """Number under which they are served in this epoch."""

    def renumbered(self, version: int) -> int:
        """Return the number in this epoch of a version of the epoch before."""
        return self.version - abs(version - self.restored)


def survives(version: int, epoch: int, restarts: Iterable[Restart]) -> bool:
    """Return whether the weights published as ``version`` in ``epoch`` are ancestors of today's."""
    return all(version <= restart.restored for restart in restarts if restart.epoch > epoch)
