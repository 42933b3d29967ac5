"""Trainer and engines on the same devices in turn: whole runs, with real engines that stand aside."""

import os
import signal

import pytest

from tests.integration.test_run import Launch, finish, records, summary, wait_for_step

COLOCATED = ("rollout.engine.colocated=true", "weights.transport.type=tensor")


def test_a_colocated_run_goes_on_with_partial_answers_of_before_the_trainers_turn(launch: Launch):
    run = launch(
        "run.steps=4",
        "rollout.max_head_offpolicyness=2",
        "actor.parallel.tensor=2",
        "checkpoint.every=2",
        "actor.advantage=gae",
        "critic={}",
        *COLOCATED,
    )
    assert finish(run) == 0, run.output()
    found = summary(run)
    assert (found["exit"], found["steps"], found["groups"]["trained"]) == ("done", 4, 16)
    assert found["engine_restarts"] == 0
    assert found["multi_version_fraction"] > 0
    assert found["head_lag_max"] <= 2
    assert sorted(path.name for path in run.folder.glob("checkpoints/v????????")) == [
        "v00000002",
        "v00000004",
    ]
    for record in records(run):
        assert record.get("mismatch/logprob_abs_max", 0.0) < 1e-3  # unless no token was of lag 0
        # Engines stand still for the whole of the trainer's turn, and so do they for nothing else.
        assert record["perf/weight_update_stall_s"] > record["perf/train_s"]
    run.assert_nothing_left()


@pytest.mark.slow
def test_a_killed_engine_is_started_while_the_trainer_rests(launch: Launch):
    run = launch("run.steps=12", "rollout.max_head_offpolicyness=2", "rollout.engine.count=2", *COLOCATED)
    wait_for_step(run, 3)
    os.kill(run.pids_of("rollout.engine.launch")[0], signal.SIGKILL)
    assert finish(run) == 0, run.output()
    found = summary(run)
    assert (found["engine_restarts"], found["steps"], found["groups"]["failed"]) == (1, 12, 0)
    run.assert_nothing_left()
