"""The benchmark of small tasks: the settings of its runs, its last line and its figure."""

import pytest

from benchmarks.tasks.__main__ import figures
from benchmarks.tasks.figure import draw
from benchmarks.tasks.run import TASKS, Outcome, cpu_seconds, overrides
from slipstream.configs.load import load_recipe
from tests.environment import ROOT


def outcome(task: str, seed: int, before: float, after: float) -> Outcome:
    return Outcome(task, seed, ((0, before), (5, 0.5), (10, after)), 60.0, 2.0, 2, 0)


@pytest.mark.parametrize("task", TASKS)
def test_the_recipe_of_a_run_is_valid_and_every_seed_has_inputs_of_its_own(task):
    configs = [load_recipe(ROOT / TASKS[task], overrides(task, seed)) for seed in (0, 1)]
    paths = {path for config in configs for path in (config.model.path, config.data.path, config.eval.path)}
    assert len(paths) == 6
    assert [(config.run.name, config.run.seed) for config in configs] == [(f"{task}-0", 0), (f"{task}-1", 1)]
    assert configs[0].eval.every > 0


def test_the_last_line_has_start_and_end_of_each_seed():
    line = figures([outcome("a", 0, 0.25, 0.9), outcome("a", 1, 0.3, 0.95), outcome("b", 0, 0.5, 1.0)])
    assert line == {
        "a": [[25.0, 90.0], [30.0, 95.0]],
        "b": [[50.0, 100.0]],
        "minutes": 6.0,
        "discrepancies": 0,
    }


def test_the_cpu_time_of_a_step_is_that_of_all_groups_of_processes():
    step = {"perf/step_s": 2.0, "process/driver_cpu_cores": 0.25, "process/trainer_cpu_cores": 1.0}
    assert cpu_seconds({**step, "process/trainer_memory_gib": 7.0}) == 2.5


def test_the_figure_is_a_picture():
    assert draw([outcome(task, seed, 0.3, 0.9) for task in "abcd" for seed in (0, 1)])[:4] == b"\x89PNG"
