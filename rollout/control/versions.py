"""Policy versions over the whole life of a run, restarts included. Pure.

A version number is given once and never again. A run that is restored from the checkpoint of version f serves
those weights under a new number o, one above every number that the run has ever begun to publish; what was
trained after f is lost, and its numbers with it.

    0 1 2 3 4 5 6              killed while 6 was on its way; the last checkpoint is that of version 4
              \\
               7 8 9 ...       restored=4 version=7: 7 has the weights of 4, and 5 and 6 are nobody's
               ancestors

Tokens of before are still good for training: they carry the log-probs of the policy that sampled them. How
far that policy is from the restored one is the number of updates between them, |v - f|, no matter on which
side of f it lies. So the tokens keep their distance if they are numbered o - |v - f| from then on, and a lag
is a plain difference again.
"""

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Restart:
    """A beginning of the run; each one is an epoch. The first one restores version 0 as version 0."""

    epoch: int
    restored: int
    """The version whose weights were restored."""
    version: int
    """The number under which they are served."""

    def renumbered(self, version: int) -> int:
        """What a version of the epoch before counts as in this one."""
        return self.version - abs(version - self.restored)


def survives(version: int, epoch: int, restarts: Iterable[Restart]) -> bool:
    """Whether the weights that a step of ``epoch`` published as ``version`` are ancestors of today's."""
    return all(version <= restart.restored for restart in restarts if restart.epoch > epoch)
