"""Whole runs whose trainer is killed: they go on to their end, with a clean audit, on the same engines."""

import os
import re
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from slipstream.backend.commands.audit import audit_run
from slipstream.rollout.ledger.reading.history import history_of
from tests.runs.conftest import LaunchedRun
from tests.runs.test_bad_updates import wait_for
from tests.runs.test_run import finish, records, summary, wait_for_record, wait_for_step

Launch = Callable[..., LaunchedRun]

STEPS = 14
SETTINGS = (
    f"run.steps={STEPS}",
    "rollout.max_head_offpolicyness=2",
    "checkpoint.every=2",
    "checkpoint.keep_last=2",
)


def engine_processes(run: LaunchedRun) -> set[int]:
    return set(run.pids_of("slipstream.rollout.engine.launch"))


def collectors(run: LaunchedRun) -> set[int]:
    return set(run.pids_of("ray::CollectorActor"))


def kill_a_rank(run: LaunchedRun, *, last: bool = False) -> None:
    ranks = run.pids_of("ray::TrainerActor")
    assert ranks
    os.kill(ranks[-1 if last else 0], signal.SIGKILL)


def goes_on_to_its_end(run: LaunchedRun, engines: set[int], restarts: int = 1) -> None:
    """See the run through. Its engines have never ended, and its account is right."""
    assert finish(run) == 0, run.output()
    found = summary(run)
    assert (found["exit"], found["resumed"]) == ("done", 0)
    assert (found["trainer_restarts"], found["engine_restarts"]) == (restarts, 0), run.output()
    assert len(re.findall(r"the trainer is started again from", run.output())) == restarts
    assert engines and not [pid for pid in engines if Path(f"/proc/{pid}").exists()]
    audit = audit_run(run.folder, print)
    assert audit.discrepancies == []
    assert (audit.steps, audit.starts) == (STEPS, restarts + 1)
    assert audit.groups["trained"] == STEPS * 4
    assert (audit.max_head_lag or 0) <= 2
    versions = [record["step"] for record in records(run)]
    assert versions == sorted(set(versions)), "a version number was used twice, or went back"
    run.assert_nothing_left()


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [(), ("actor.parallel.tensor=2",), ("actor.parallel.tensor=2", "checkpoint.local_dir={}")],
    ids=["one rank", "one of two ranks", "one of two ranks, whose node has checkpoints"],
)
def test_a_rank_killed_in_training_costs_the_steps_since_the_checkpoint(
    launch: Launch, tmp_path: Path, settings: Sequence[str]
):
    disk = tmp_path / "disk"
    disk.mkdir()
    run = launch(*SETTINGS, *(setting.format(disk) for setting in settings))
    wait_for_step(run, 5)
    engines, collecting = engine_processes(run), collectors(run)
    kill_a_rank(run, last=True)
    wait_for_step(run, 8)
    assert engine_processes(run) == engines and collectors(run) == collecting
    goes_on_to_its_end(run, engines)
    source = "what its nodes hold" if len(settings) == 2 else "version "
    assert f"the trainer is started again from {source}" in run.output()
    assert not list(disk.iterdir()), "left on the node's disk after an orderly end"


@pytest.mark.slow  # test_control_schedules.py has the numbers, test_resume.py a trainer that is killed
def test_a_trainer_restored_farther_back_than_the_bound_is_published_under_a_new_number(launch: Launch):
    """It begins with the initial weights, and nothing that the engines sample can be trained any more."""
    run = launch(*SETTINGS, "rollout.max_head_offpolicyness=1", "checkpoint.every=0")
    wait_for_step(run, 5)
    engines = engine_processes(run)
    kill_a_rank(run)
    goes_on_to_its_end(run, engines)
    history = history_of(run.folder)
    (copy,) = history.copies
    assert copy > 5 and history.parents[copy] == 0 and history.is_on_line(copy)


@pytest.mark.slow
def test_a_rank_killed_while_a_checkpoint_is_written(launch: Launch):
    run = launch(*SETTINGS)
    wait_for_step(run, 3)
    engines = engine_processes(run)
    deadline = time.monotonic() + 120
    while not list(run.folder.glob("checkpoints/*.partial")):
        assert time.monotonic() < deadline and run.process.poll() is None, run.output()
        time.sleep(0.001)
    kill_a_rank(run)
    goes_on_to_its_end(run, engines)
    assert not list(run.folder.glob("checkpoints/*.partial"))


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["shards", "tensor", "disk", "delta"])
def test_a_rank_killed_in_a_publication(launch: Launch, tmp_path: Path, transport: str):
    """With ``shards``, some weights have reached both engines: they wait for the next version."""
    held = tmp_path / "held"
    is_held = transport == "shards"
    run = launch(
        *SETTINGS,
        "rollout.engine.count=2",
        f"weights.transport.type={transport}",
        *([] if is_held else ["weights.transport.bucket_mb=1"]),
        **({"fault": f"hold:5:{held}"} if is_held else {}),
    )
    if is_held:
        wait_for(held)
    else:
        wait_for_step(run, 3)
        log = run.folder / "logs" / "engine-0.log"
        start = log.stat().st_size
        deadline = time.monotonic() + 60
        while b"/pause_generation" not in log.read_bytes()[start:]:
            assert time.monotonic() < deadline, run.output()
            time.sleep(0.001)
    engines = engine_processes(run)
    assert len(engines) == 2
    kill_a_rank(run)
    if is_held:
        held.unlink()
    goes_on_to_its_end(run, engines)
    if is_held:
        assert "engine-0 waits for the next version" in run.output()
        assert "engine-1 waits for the next version" in run.output()


@pytest.mark.slow
def test_a_trainer_killed_again_and_again_ends_the_run_with_the_reason(launch: Launch):
    run = launch(*SETTINGS, "run.trainer_restarts=1", "checkpoint.every=0")
    wait_for_step(run, 1)
    kill_a_rank(run)
    # What was done again has a new number where the engines serve what was lost.
    wait_for_record(run, lambda record: record["step"] > 1 and "the trainer goes on" in run.output())
    kill_a_rank(run)
    assert finish(run, 120) == 1
    assert "run.trainer_restarts allows 1 restart in that time" in run.output()
    assert summary(run)["exit"] == "failed"
    assert audit_run(run.folder, print).discrepancies == []
    run.assert_nothing_left()


@pytest.mark.slow
def test_a_trainer_that_runs_out_of_memory_in_each_step_ends_at_the_second_one_with_the_settings(
    launch: Launch,
):
    """On the second of two ranks, at the allocator of the CPU. No step is ever trained."""
    run = launch(*SETTINGS, "actor.parallel.tensor=2", fault="exhaust:1")
    assert finish(run, 120) == 1
    output = run.output()
    assert len(re.findall(r"the trainer is started again from", output)) == 1
    assert "the trainer has failed twice in the same way, and no training step was committed" in output
    assert "failed on rank 1: RuntimeError" in output and "on rank 0" not in output
    assert "Traceback (most recent call last):" in output and "in replacement" in output
    assert "memory: the memory of a machine has run out. The memory plan has for a rank" in output
    assert re.search(r"memory: actor\.microbatch_tokens=\d+ \(now \d+\) frees", output)
    assert audit_run(run.folder, print).discrepancies == []
    run.assert_nothing_left()


@pytest.mark.slow
def test_a_run_is_stopped_while_its_trainer_is_restarted_and_can_be_resumed(launch: Launch):
    run = launch(*SETTINGS)
    wait_for_step(run, 5)
    kill_a_rank(run)
    deadline = time.monotonic() + 60
    while "the trainer is started again" not in run.output():
        assert time.monotonic() < deadline, run.output()
        time.sleep(0.01)
    run.process.send_signal(signal.SIGINT)
    assert finish(run, 60) == 1
    assert summary(run)["exit"] == "stopped"
    assert audit_run(run.folder, print).discrepancies == []
    run.assert_nothing_left()
    run.end()
    again = launch(*SETTINGS, resume=True)
    assert finish(again) == 0, again.output()
    assert audit_run(again.folder, print).discrepancies == []


@pytest.mark.slow
def test_engines_on_the_trainers_devices_go_on_without_it(launch: Launch):
    """On CPUs the turns are taken by the same steps, with the weights kept on the host."""
    run = launch(*SETTINGS, "rollout.engine.colocated=true", "weights.transport.type=tensor")
    wait_for_step(run, 5)
    engines = engine_processes(run)
    kill_a_rank(run)
    goes_on_to_its_end(run, engines)
