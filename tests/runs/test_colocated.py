"""Trainer and engines on the same devices in turn: whole runs, with real engines that stand aside."""

import os
import signal

import pytest

from tests.runs.test_run import Launch, finish, records, summary, wait_for_record, wait_for_step

COLOCATED = ("rollout.engine.colocated=true", "weights.transport.type=tensor")


def test_partial_answers_go_on_behind_the_trainers_turns_and_a_signal_ends_behind_a_checkpoint(
    launch: Launch,
):
    run = launch(
        "run.steps=1000",
        "rollout.max_head_offpolicyness=2",
        "checkpoint.every=500",
        "actor.advantage=[{type: reward, estimator: gae}]",
        "critic={}",
        *COLOCATED,
    )
    wait_for_step(run, 4)
    wait_for_record(run, lambda record: record["rollout/multi_version_fraction"] > 0)
    run.process.send_signal(signal.SIGTERM)
    assert finish(run, 60) == 3
    found = summary(run)
    assert (found["exit"], found["engine_restarts"]) == ("stopped", 0)
    assert found["groups"]["trained"] == 4 * found["steps"]
    assert found["multi_version_fraction"] > 0
    assert found["head_lag_max"] <= 2
    [checkpoint] = run.folder.glob("checkpoints/v????????")
    assert int(checkpoint.name[1:]) == found["versions"]
    for record in records(run):
        assert record.get("mismatch/logprob_abs_max", 0.0) < 1e-3  # unless no token was of lag 0
        # Engines stand still for the whole of the trainer's turn, and so do they for nothing else.
        assert record["perf/weight_update_stall_s"] > record["perf/train_s"]
    run.assert_nothing_left()


@pytest.mark.slow
def test_a_killed_engine_is_started_while_the_trainer_rests(launch: Launch):
    run = launch("run.steps=12", "rollout.max_head_offpolicyness=2", "rollout.engine.count=2", *COLOCATED)
    wait_for_step(run, 3)
    os.kill(run.pids_of("slipstream.rollout.engine.launch")[0], signal.SIGKILL)
    assert finish(run) == 0, run.output()
    found = summary(run)
    assert (found["engine_restarts"], found["steps"], found["groups"]["failed"]) == (1, 12, 0)
    run.assert_nothing_left()
