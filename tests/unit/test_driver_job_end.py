"""A run begins to end before its Slurm job does, by what its steps and checkpoints take."""

import json
from pathlib import Path

import pytest

from slipstream.backend.driver.loops.job_end import (
    CLEAN_UP_S,
    MARGIN,
    RECENT,
    JobEnd,
    earlier_steps,
    job_end,
    seconds_left,
)
from slipstream.backend.driver.loops.stop import Stop
from slipstream.configs.schema import RunConfig
from tests.unit.test_rollout_gpu_environment import VALID


def recipe(step_s: float, checkpoint_s: float, type_: str = "slurm", every: int = 10) -> RunConfig:
    return RunConfig.model_validate(
        {
            **VALID,
            "run": {**VALID["run"], "step_timeout_s": step_s},
            "checkpoint": {"timeout_s": checkpoint_s, "every": every},
            "cluster": {"type": type_},
        }
    )


def end(left_s: float, step_s: float = 1800.0, checkpoint_s: float = 600.0) -> JobEnd:
    return JobEnd(left_s, step_s, checkpoint_s, clock=lambda: 0.0)


def test_before_anything_is_measured_the_lead_covers_the_longest_step_and_the_longest_checkpoint():
    assert end(86_400.0).lead_s == 2400 + CLEAN_UP_S


@pytest.mark.parametrize("left_s", [240.0, 1800.0, 4000.0])
def test_a_short_job_keeps_three_quarters_of_its_time_but_for_the_end(left_s: float):
    assert end(left_s).lead_s == left_s / 4 + CLEAN_UP_S


def test_the_lead_follows_what_steps_and_checkpoints_take():
    job = end(86_400.0)
    job.step_done(40.0)
    assert job.lead_s == MARGIN * 40 + 600 + CLEAN_UP_S
    job.checkpoint_done(20.0)
    assert job.lead_s == MARGIN * 40 + 2 * MARGIN * 20 + CLEAN_UP_S
    job.step_done(100.0)
    assert job.lead_s == MARGIN * 100 + 2 * MARGIN * 20 + CLEAN_UP_S
    for _ in range(RECENT):
        job.step_done(10.0)
    assert job.lead_s == MARGIN * 10 + 2 * MARGIN * 20 + CLEAN_UP_S, "an old step counts for nothing"


def test_a_job_that_goes_on_with_a_run_knows_what_its_last_steps_took(tmp_path: Path):
    records = [{"step": n, "perf/step_s": 100.0 - n, "perf/trainer_wait_s": 1.0} for n in range(RECENT + 5)]
    lines = "".join(json.dumps(record) + "\n" for record in [{"step": 0, "run/recipe": ""}, *records])
    (tmp_path / "metrics.jsonl").write_text(lines)
    assert earlier_steps(tmp_path) == [99.0 - n for n in range(5, RECENT + 5)]
    assert earlier_steps(tmp_path / "none") == []
    job = end(86_400.0)
    stop = Stop(None, job)  # type: ignore[arg-type]
    stop.goes_on(tmp_path)
    assert job.lead_s == MARGIN * 94 + 600 + CLEAN_UP_S


def test_no_step_gets_more_time_than_the_recipe_allows_and_a_measured_one_more_than_a_quarter_of_the_job():
    job = end(1000.0, step_s=600.0, checkpoint_s=50.0)
    job.step_done(500.0)
    job.checkpoint_done(49.0)
    assert job.lead_s == 600 + 2 * 50 + CLEAN_UP_S
    assert job.left_s == 1000 - job.lead_s


def test_the_time_that_is_left_ends_at_zero():
    now = [0.0]
    job = JobEnd(1000.0, 10.0, 10.0, clock=lambda: now[0])
    assert job.left_s == 1000 - 20 - CLEAN_UP_S
    now[0] = 990.0
    assert job.left_s == 0


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


def test_a_run_has_an_end_where_its_job_has_one():
    variables = {"SLURM_JOB_END_TIME": "2000"}
    job = job_end(recipe(100.0, 40.0), variables, 1000.0)
    assert job is not None and job.lead_s == 140 + CLEAN_UP_S
    without = job_end(recipe(100.0, 40.0, every=0), variables, 1000.0)
    assert without is not None and without.lead_s == 100 + CLEAN_UP_S, "no checkpoint is written"
    assert job_end(recipe(100.0, 40.0), {}, 1000.0) is None
    assert job_end(recipe(100.0, 40.0, "local"), variables, 1000.0) is None
