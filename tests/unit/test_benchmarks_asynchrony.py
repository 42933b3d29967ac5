"""The benchmark of asynchrony: times to an accuracy, speed-ups, and the settings of its runs."""

import subprocess
from pathlib import Path

import pytest

from benchmarks.asynchrony.__main__ import rows_of
from benchmarks.asynchrony.run import Outcome, Point, overrides, train
from slipstream.configs.load import load_recipe


def outcome(eta: int, seed: int, step_s: float, accuracies: list[float]) -> Outcome:
    points = tuple(Point(8 * n, 8 * n * step_s, accuracy) for n, accuracy in enumerate(accuracies))
    return Outcome(eta, seed, step_s, step_s, 0.5, 0.4, float(eta), points, 0)


def test_the_time_to_an_accuracy_is_that_of_the_first_crossing():
    run = outcome(0, 0, 1.0, [0.3, 0.7, 0.9, 0.8, 0.95])
    assert run.seconds_to(0.8) == pytest.approx(12)
    assert run.seconds_to(0.3) == 0
    assert run.seconds_to(0.96) is None


def test_a_speed_up_is_paired_by_seed_and_leaves_out_runs_that_never_arrive():
    runs = [
        outcome(0, 0, 2.0, [0.3, 0.9]),
        outcome(0, 1, 3.0, [0.3, 0.9]),
        outcome(4, 0, 1.0, [0.3, 0.9]),
        outcome(4, 1, 1.0, [0.3, 0.4]),
    ]
    [(_, _, base, _), (eta, _, to_target, of_a_step)] = rows_of(runs, 0.85)
    assert base == [1, 1]
    assert eta == 4 and to_target == [2] and of_a_step == [2, 3]


def test_a_root_that_does_not_exist_is_made_and_a_run_that_fails_shows_its_output(tmp_path, monkeypatch):
    def fails(command, stdout, **options):
        stdout.write("no engine\n")
        return subprocess.CompletedProcess(command, 3)

    monkeypatch.setattr(subprocess, "run", fails)
    root = tmp_path / "not" / "there"
    with pytest.raises(RuntimeError, match="ended with 3:\nno engine"):
        train(root, 2, 0, 8)
    assert [path.name for path in root.iterdir()] == ["eta-2-seed-0.out"]


def test_the_runs_settings_are_those_of_the_quickstart_but_for_what_is_named(tmp_path):
    (tmp_path / ".inputs-3").mkdir()
    settings = [*overrides(tmp_path, 2, 3, 10), "prepare=slipstream.backend.simulate.only_simulated"]
    config = load_recipe(Path("quickstart"), settings)
    assert config.rollout.max_head_offpolicyness == 2 and config.run.seed == 3 and config.eval is None
