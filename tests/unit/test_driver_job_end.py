"""A run begins to end before its Slurm job does."""

import pytest

from slipstream.backend.driver.loops.job_end import CLEAN_UP_S, lead_s, seconds_left, stop_after_s
from slipstream.configs.schema import RunConfig
from tests.unit.test_rollout_gpu_environment import VALID


def recipe(step_s: float, checkpoint_s: float, type_: str = "slurm") -> RunConfig:
    return RunConfig.model_validate(
        {
            **VALID,
            "run": {**VALID["run"], "step_timeout_s": step_s},
            "checkpoint": {"timeout_s": checkpoint_s},
            "cluster": {"type": type_},
        }
    )


def test_the_lead_covers_the_longest_step_and_the_longest_checkpoint():
    assert lead_s(recipe(1800.0, 600.0), 86_400.0) == 2400 + CLEAN_UP_S


@pytest.mark.parametrize("left_s", [240.0, 1800.0, 4000.0])
def test_a_short_job_keeps_three_quarters_of_its_time_but_for_the_end(left_s: float):
    assert lead_s(recipe(1800.0, 600.0), left_s) == left_s / 4 + CLEAN_UP_S


@pytest.mark.parametrize(
    ("variables", "left"),
    [
        ({"SLURM_JOB_END_TIME": "1500"}, 500.0),
        ({"SLURM_JOB_END_TIME": "900"}, -100.0),
        ({"SLURM_JOB_END_TIME": "0"}, None),
        ({"SLURM_JOB_END_TIME": ""}, None),
        ({"SLURM_JOB_END_TIME": "NONE"}, None),
        ({}, None),
    ],
)
def test_the_time_that_is_left_is_known_where_slurm_says_when_the_job_ends(variables, left):
    assert seconds_left(variables, 1000.0) == left


def test_a_run_begins_to_end_the_lead_before_the_end_of_its_job():
    config = recipe(100.0, 40.0)
    assert stop_after_s(config, {"SLURM_JOB_END_TIME": "2000"}, 1000.0) == 1000 - 140 - CLEAN_UP_S
    assert stop_after_s(config, {"SLURM_JOB_END_TIME": "1001"}, 1000.0) == 0
    assert stop_after_s(config, {"SLURM_JOB_END_TIME": "1400"}, 1000.0) == 300 - CLEAN_UP_S
    assert stop_after_s(config, {}, 1000.0) is None
    assert stop_after_s(recipe(100.0, 40.0, "local"), {"SLURM_JOB_END_TIME": "2000"}, 1000.0) is None
