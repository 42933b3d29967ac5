"""Weight updates that go wrong, in whole runs: these go on, train nothing wrong, and name the cause."""

import os
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from slipstream.backend.commands.audit import audit_run
from tests.runs.conftest import LaunchedRun
from tests.runs.test_run import finish, records, summary, wait_for_step

Launch = Callable[..., LaunchedRun]

STEPS = 40
SETTINGS = (
    f"run.steps={STEPS}",
    "rollout.max_head_offpolicyness=2",
    "rollout.engine.count=2",
    "weights.transport.type=shards",
    "checkpoint.every=0",
)


def largest_mismatch(run: LaunchedRun) -> float:
    """Between engine and trainer, over the trained tokens of the version that a step starts from."""
    key = "mismatch/logprob_abs_max"
    return max(record[key] for record in records(run) if key in record)


def engines(run: LaunchedRun) -> list[list[int]]:
    """The processes of each server."""
    found: dict[int, list[int]] = {}
    for pid in run.descendants():
        group = os.getpgid(pid)
        found.setdefault(group, []).append(pid)
    return [found[pid] for pid in run.pids_of("slipstream.rollout.engine.launch") if pid in found]


def wait_for(path: Path, timeout_s: float = 240) -> None:
    deadline = time.monotonic() + timeout_s
    while not path.exists():
        assert time.monotonic() < deadline, f"{path} was not there in {timeout_s} s"
        time.sleep(0.01)


def send(pids: list[int], number: signal.Signals) -> None:
    for pid in pids:
        os.kill(pid, number)


@pytest.mark.slow  # test_driver_verification.py has the comparison, test_resume.py an engine that is killed
@pytest.mark.timeout(600)
def test_a_corrupted_version_and_an_engine_killed_inside_an_update(launch: Launch, tmp_path: Path):
    """First both engines get a version with noise in it: they agree with each other, not with the trainer.
    Later one of them is killed while it receives, which costs the other one nothing.
    """
    held = tmp_path / "held"
    steps = 10
    run = launch(*SETTINGS, f"run.steps={steps}", fault=f"corrupt:2,hold:7:{held}")
    wait_for(held)
    assert len(re.findall(r"engine-\d+ is started again", run.output())) == 2, (
        "both engines were started again"
    )
    send(engines(run)[0], signal.SIGKILL)
    time.sleep(0.5)
    held.unlink()
    assert finish(run) == 0, run.output()
    found = summary(run)
    assert (found["steps"], found["groups"]["failed"], found["engine_restarts"]) == (steps, 0, 3)
    # What the engines said of every trained token is what the trainer computes for the version they name.
    assert largest_mismatch(run) < 1e-3
    assert audit_run(run.folder, print).discrepancies == []
    for engine in ("engine-0", "engine-1"):
        assert f"{engine} is started again: it does not hold version" in run.output()
    assert "its log-probs differ from the trainer's" in run.output()
    assert "dropped out: receive for version" in (run.folder / "logs/trainer-0.log").read_text()
    run.assert_nothing_left()


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["inside an update", "between updates"])
def test_an_engine_that_does_not_answer_for_a_minute_holds_up_nobody(
    launch: Launch, tmp_path: Path, moment: str
):
    held = tmp_path / "held"
    fault = {"fault": f"hold:5:{held}"} if moment == "inside an update" else {}
    run = launch(*SETTINGS, "weights.answer_timeout_s=5", **fault)
    if fault:
        wait_for(held)
    else:
        wait_for_step(run, 3)
    silent = engines(run)[0]
    began = time.monotonic()
    send(silent, signal.SIGSTOP)
    if fault:
        held.unlink()
    before = len(records(run))
    wait_for_step(run, before + 3, timeout_s=60)
    assert run.process.poll() is None
    time.sleep(max(0.0, began + 60 - time.monotonic()))
    for pid in silent:
        if Path(f"/proc/{pid}").exists():
            send([pid], signal.SIGCONT)
    assert finish(run) == 0, run.output()
    assert summary(run)["engine_restarts"] == 1
    assert largest_mismatch(run) < 1e-3
    assert "no answer" in run.output()
    stopped = (
        r"engine-0 is started again: .*\(process \d+\) is stopped by a signal on .*stacks/engine-0\.txt\)"
    )
    assert re.search(stopped, run.output()), run.output()
    run.assert_nothing_left()
