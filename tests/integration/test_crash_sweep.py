"""A short crash sweep; `make crash-sweep` makes a long one."""

from pathlib import Path

from tests.crash.sweep import Kill, Sweep

KILLS = (
    Kill(0, "engine", "weight update", 0.01),
    Kill(1, "trainer", "commit", 0.0),
)


def test_killed_runs_are_audited_and_go_on_to_their_end(inputs: Path, tmp_path: Path):
    Sweep(inputs, tmp_path, print).run(KILLS)
