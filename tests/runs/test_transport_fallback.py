"""Whole runs whose first publication by `shards` is broken: they go on with the next transport.

They are synchronous, and their rewards lie below zero.
"""

import json

import pytest

from slipstream.backend.commands.audit import audit_run
from tests.runs.conftest import LaunchedRun
from tests.runs.test_run import Launch, finish, records, summary

BOUND = "rollout.max_head_offpolicyness=0"
BELOW_ZERO = "rollout.reward=tests.runs.many_turns.Signed"
GIVEN_UP = "perf/weight_transports_given_up"


SETTINGS = (BOUND, BELOW_ZERO, "actor.parallel.tensor=2", "checkpoint.every=2")


def assert_went_on_with_tensor(run: LaunchedRun, steps: int) -> None:
    found = summary(run)
    assert run.output().count("gives up weights.transport shards and goes on with tensor") == 1
    assert json.loads((run.folder / "transports.json").read_text())["proven"] == ["tensor"]
    logged = records(run)
    assert [record["step"] for record in logged] == list(range(1, steps + 1))
    assert {record[GIVEN_UP] for record in logged} == {1}
    assert (found["steps"], found["engine_restarts"], found["groups"]["failed"]) == (steps, 0, 0)
    assert all(record["staleness/head_max"] == 0 for record in logged)
    assert max(record.get("mismatch/logprob_abs_max", 0.0) for record in logged) < 1e-3
    assert audit_run(run.folder, print).discrepancies == []
    run.assert_nothing_left()


def test_a_run_whose_shards_do_not_arrive_goes_on_with_tensor(launch: Launch):
    run = launch("run.steps=4", *SETTINGS, fault="break:1")
    assert finish(run) == 0, run.output()
    assert_went_on_with_tensor(run, 4)
    found = summary(run)
    assert (found["exit"], found["versions"], found["reward_is_accuracy"]) == ("done", 4, False)
    assert found["multi_version_fraction"] == 0
    assert found["groups"]["trained"] == found["groups"]["admitted"] == 16
    assert -3 <= found["reward_after"] < 0
    assert "accuracy" not in run.output()
    lines = (run.folder / "metrics.jsonl").read_text().splitlines()
    evaluations = [record for record in map(json.loads, lines) if "eval/reward" in record]
    assert evaluations[-1]["eval/reward"] == found["reward_after"]
    assert not any("eval/accuracy" in record for record in evaluations)


@pytest.mark.slow  # test_driver_transports.py has what a resume reads
def test_a_resume_begins_with_the_transport_that_has_worked(launch: Launch):
    settings = (*SETTINGS, "rollout.engine.count=2")
    assert finish(launch("run.steps=4", *settings, fault="break:1")) == 0
    run = launch("run.steps=6", *settings, resume=True)
    assert finish(run) == 0, run.output()
    assert_went_on_with_tensor(run, 6)


@pytest.mark.slow
def test_a_trainer_that_the_first_publication_ends_comes_back_with_the_next_transport(launch: Launch):
    run = launch("run.steps=3", BOUND, "checkpoint.every=1", fault="abort:1")
    assert finish(run, 500) == 0, run.output()
    assert run.output().count("gives up weights.transport shards") == 1
    assert (summary(run)["trainer_restarts"], records(run)[-1][GIVEN_UP]) == (1, 1)
    assert audit_run(run.folder, print).discrepancies == []
    run.assert_nothing_left()


@pytest.mark.slow
def test_a_recipe_can_refuse_another_transport(launch: Launch):
    run = launch("run.steps=2", BOUND, "weights.fall_back=false", fault="break:1")
    assert finish(run) == 1
    assert "gives up" not in run.output() and "engine-0 has failed twice in the same way" in run.output()
    run.assert_nothing_left()
