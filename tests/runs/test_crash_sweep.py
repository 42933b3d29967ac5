"""Short crash sweeps. `make crash-sweep` makes a long one; runs of test_resume.py lose processes too."""

from pathlib import Path

import pytest

from tests.crash.sweep import Kill, Sweep

KILLS = {
    "a trainer that commits": Kill(0, "trainer", "commit", 0.0),
    "an engine in a weight update": Kill(1, "engine", "weight update", 0.01),
    "a collector in a weight update": Kill(2, "collector", "weight update", 0.01),
    "a judge": Kill(3, "judge", "any time", 1.0),
}


@pytest.mark.slow
@pytest.mark.parametrize("killed", KILLS)
def test_a_killed_run_is_audited_and_goes_on_to_its_end(inputs: Path, tmp_path: Path, killed: str):
    Sweep(inputs, tmp_path, print).run((KILLS[killed],))
