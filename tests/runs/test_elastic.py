"""Whole runs whose engines come from outside and go, with real servers, while versions are published."""

import json
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.request import Request, urlopen

import pytest

from slipstream.backend.commands.audit import audit_run
from tests.runs.conftest import LaunchedRun, run_command
from tests.runs.test_run import Launch, finish, records, summary, wait_for_record, wait_for_step

NOTICED_S = 240.0
"""Time for an engine to start and join on a loaded machine."""


class Joined:
    """``slipstream engine join`` as a process, whose server ends with it."""

    def __init__(self, run: Path, log: Path) -> None:
        self.log = log
        with log.open("w") as output:
            self.process = subprocess.Popen(
                run_command("engine", "join", str(run)), stdout=output, stderr=subprocess.STDOUT
            )

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()


@pytest.fixture
def join(tmp_path: Path) -> Iterator[Callable[[LaunchedRun], Joined]]:
    started: list[Joined] = []

    def start(run: LaunchedRun) -> Joined:
        started.append(Joined(run.folder, tmp_path / f"joined-{len(started)}.out"))
        return started[-1]

    yield start
    for each in started:
        each.end()


def engines(run: LaunchedRun) -> list[dict]:
    """Ask the driver as any client may."""
    service = json.loads((run.folder / "engines.json").read_text())
    headers = {"Authorization": f"Bearer {service['key']}"}
    with urlopen(Request(f"{service['url']}/engines", headers=headers), timeout=60) as answer:
        return json.load(answer)


def until_serving(run: LaunchedRun, names: set[str]) -> None:
    deadline = time.monotonic() + NOTICED_S
    while {each["name"] for each in engines(run) if each["serves"]} != names:
        assert run.process.poll() is None, run.output()
        assert time.monotonic() < deadline, f"{engines(run)}\n{run.output()}"
        time.sleep(0.5)


def step_of(run: LaunchedRun) -> int:
    return max((record["step"] for record in records(run)), default=0)


@pytest.mark.timeout(1200)
def test_engines_join_a_run_and_are_lost_and_leave_while_it_goes_on(launch: Launch, join, tmp_path: Path):
    """1, 3, 2 and again 1 engines: one of them is killed, and one leaves."""
    bound = 2
    run = launch(
        "run.steps=5000",
        f"rollout.max_head_offpolicyness={bound}",
        "rollout.engine.max_count=3",
        "rollout.reward={path: tests.runs.untrained.Unhurried}",
    )
    wait_for_step(run, 1, 300)
    first, second = join(run), join(run)
    until_serving(run, {"engine-0", "joined-0", "joined-1"})
    begun = step_of(run)
    wait_for_record(run, lambda record: record["step"] >= begun + 3, 300)
    listed = subprocess.run(
        run_command("engine", "list", str(run.folder)), capture_output=True, text=True, check=False
    )
    assert listed.returncode == 0 and listed.stdout.count("serves") == 3, listed
    third = subprocess.run(
        run_command("engine", "join", str(run.folder)), capture_output=True, text=True, check=False
    )
    assert third.returncode == 2 and "rollout.engine.max_count" in third.stderr, third.stderr
    killed, left = (first, second) if "joined-0" in first.log.read_text() else (second, first)
    killed.process.kill()
    until_serving(run, {"engine-0", "joined-1"})
    begun = step_of(run)
    wait_for_record(run, lambda record: record["step"] >= begun + 3, 300)
    left.process.send_signal(signal.SIGTERM)
    assert left.process.wait(120) == 0, left.log.read_text()
    until_serving(run, {"engine-0"})
    refused = subprocess.run(
        run_command("engine", "remove", str(run.folder), "engine-0"),
        capture_output=True,
        text=True,
        check=False,
    )
    assert refused.returncode == 2 and "started by the run" in refused.stderr
    assert (run.folder / "engines.json").stat().st_mode & 0o077 == 0
    begun = step_of(run)
    wait_for_record(run, lambda record: record["step"] >= begun + 2, 300)
    run.process.send_signal(signal.SIGTERM)
    assert finish(run) == 3, run.output()
    found = summary(run)
    assert (found["exit"], found["groups"]["failed"], found["engine_restarts"]) == ("stopped", 0, 0)
    assert "joined-1 has left: it was asked to" in run.output()
    assert "joined-0 has left: " in run.output()
    logged = records(run)
    assert max(record["staleness/head_max"] for record in logged) <= bound
    assert max(record.get("mismatch/logprob_abs_max", 0.0) for record in logged) < 1e-3
    assert audit_run(run.folder, print).discrepancies == []
    assert not (run.folder / "engines.json").exists()
    run.assert_nothing_left()
