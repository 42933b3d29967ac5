"""Policy versions: distances between them over restarts."""

import numpy as np
import pytest

from slipstream.rollout.control.versions import Restart
from slipstream.rollout.ledger.recovery import renumber

CHECKPOINT = 4


def lag_after_two_restarts(version: int, epoch: int, begun: tuple[int, int]) -> int:
    """Return the lag of a token when the run is restored twice from the checkpoint of version 4.

    ``begun`` is the largest number that was begun before the first restart, and before the second one.
    """
    starts = [
        Restart(0, 0, 0),
        Restart(1, CHECKPOINT, begun[0] + 1),
        Restart(2, CHECKPOINT, begun[1] + 1),
    ]
    renumbered_T = renumber(np.array([version], np.int32), epoch, starts)
    return starts[-1].version - int(renumbered_T[0])


@pytest.mark.parametrize(("version", "lag"), [(7, 3), (6, 2), (3, 1), (1, 3)])
def test_two_restarts_from_one_checkpoint_make_no_token_fresher_than_it_is(version, lag):
    assert lag_after_two_restarts(version, epoch=0, begun=(8, 11)) == lag


def test_two_restarts_from_one_checkpoint_make_no_token_older_than_it_is():
    """A token of the second life, sampled from the checkpoint's own weights, has lag 0 in the third."""
    assert lag_after_two_restarts(9, epoch=1, begun=(8, 11)) == 0
