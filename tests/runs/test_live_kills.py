"""A driver is killed under live users. `make crash-live` makes a long sweep, with gateways.

tests/clients/test_restarts.py kills a gateway.
"""

from pathlib import Path

from tests.crash.live import LiveKill, LiveSweep

KILLS = (LiveKill(0, "driver", "under load", 0.5),)


def test_no_acknowledged_turn_is_lost_or_trained_twice(tmp_path: Path):
    sweep = LiveSweep(tmp_path, print)
    found = sweep.run(KILLS)
    assert found.is_clean, found
    assert sweep.hits.total() == len(KILLS)
    assert found.acknowledged > 60
    assert found.trained > 0
