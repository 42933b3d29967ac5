"""The quickstart, but for its last steps: from nothing to a policy that has learnt, as the README claims.

While it trains, nothing of it can be reached by other users of the machine, or from other machines.
"""

import json
import re
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from slipstream.backend.commands.report import report
from slipstream.backend.quickstart.policy import greedy_accuracy
from slipstream.backend.quickstart.task import Problem
from slipstream.rollout.ledger.episode_log.files import episode_files, read_rows
from tests.runs.conftest import RunProcess, run_command
from tests.runs.exposure import (
    beyond_loopback,
    command_lines,
    is_private,
    listening,
    unix_sockets,
    variables,
)

TIMEOUT_S = 600
"""The job takes about two minutes on two free cores."""

RUN = "runs/quickstart"


@dataclass
class Seen:
    """What there was to see of the run while it trained."""

    sockets: list[str]
    open_sockets: list[Path]
    """Unix sockets that others could connect to."""
    shared: list[str]
    """Files in shared memory that others could open."""
    tokens: set[str]
    """Ray's token."""
    command_lines: str


def look_at(process: RunProcess) -> Seen:
    pids = [process.pid, *process.descendants()]
    memory = process.shared_memory_folder
    return Seen(
        listening(pids),
        [path for path in unix_sockets(pids) if not is_private(path)],
        [name for name in process.shared_memory() if not is_private(memory / name)],
        variables(pids, "RAY_AUTH_TOKEN"),
        command_lines(pids),
    )


@pytest.fixture(scope="module")
def quickstart(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Seen]:
    """The folder in which the quickstart has run to its end, and what was seen of it after two steps."""
    folder = tmp_path_factory.mktemp("quickstart")
    with (folder / "out").open("w") as out:
        process = RunProcess(
            run_command("train", "quickstart", "run.steps=20", "eval.every=0"), out, cwd=folder
        )
    try:
        deadline = time.monotonic() + TIMEOUT_S
        metrics = folder / RUN / "metrics.jsonl"
        while not (metrics.exists() and '"step": 2, ' in metrics.read_text()):
            assert process.poll() is None and time.monotonic() < deadline, (folder / "out").read_text()
            time.sleep(0.2)
        seen = look_at(process)
        assert process.wait(TIMEOUT_S) == 0, (folder / "out").read_text()
        assert not process.descendants() and not process.shared_memory()
    finally:
        process.end()
    return folder, seen


@pytest.mark.timeout(TIMEOUT_S + 30)
def test_the_quickstart_learns_within_its_staleness_bound_and_exports_what_it_served(quickstart):
    folder, _ = quickstart
    run = folder / RUN
    summary = json.loads((run / "summary.json").read_text())

    assert 0.2 <= summary["reward_before"] <= 0.4
    assert summary["reward_is_accuracy"]
    # 0.8 on a quiet machine. On a busy one all batches are as old as the bound allows.
    assert summary["reward_after"] >= 1.6 * summary["reward_before"]
    assert 0 < summary["head_lag_max"] <= 4
    assert summary["trainer_wait_fraction"] < 0.75
    if summary["trainer_wait_fraction"] > 0.25:
        # Answers that the trainer waits for have begun before its update. On a busy machine it never waits.
        assert summary["multi_version_fraction"] > 0
    groups = summary["groups"]
    assert groups["trained"] == 16 * summary["steps"]
    assert groups["filtered"] == groups["expired"] == groups["failed"] == 0

    exported = run / "checkpoint-hf"
    model = AutoModelForCausalLM.from_pretrained(exported)
    tokenizer = AutoTokenizer.from_pretrained(exported)
    lines = (folder / "runs/.quickstart-inputs/heldout.jsonl").read_text().splitlines()
    problems = [Problem(**json.loads(line)) for line in lines]
    assert abs(greedy_accuracy(model, tokenizer, problems) - summary["reward_after"]) <= 0.02


@pytest.mark.timeout(TIMEOUT_S + 30)
def test_every_socket_of_a_run_on_one_machine_is_on_loopback_or_in_a_private_folder(quickstart):
    _, seen = quickstart
    programs = " ".join(seen.sockets)
    for program in (
        "gcs_server",
        "raylet",
        "ray::Trainer",
        "ray::Collector",
        "ray::Engine",
        "sglang::schedul",
    ):
        assert program in programs
    assert len(seen.sockets) > 20
    assert beyond_loopback(seen.sockets) == []
    assert seen.open_sockets == []
    assert "raylet" in seen.command_lines
    assert "dashboard/dashboard.py" not in seen.command_lines and "log_monitor" not in seen.command_lines


@pytest.mark.timeout(TIMEOUT_S + 30)
def test_nobody_else_can_read_what_a_run_writes(quickstart):
    folder, seen = quickstart
    below = [folder / RUN, *(folder / RUN).rglob("*")]
    assert len(below) > 20
    assert [path for path in below if path.stat().st_mode & 0o077] == []
    assert seen.shared == []


@pytest.mark.timeout(TIMEOUT_S + 30)
def test_rays_token_stands_on_no_command_line_and_in_no_file_of_the_run(quickstart):
    folder, seen = quickstart
    [token] = seen.tokens
    assert len(token) == 64
    assert token not in seen.command_lines
    files = [path for path in (folder / RUN).rglob("*") if path.is_file()]
    assert [path for path in files if token.encode() in path.read_bytes()] == []


@pytest.mark.timeout(TIMEOUT_S + 30)
def test_every_trained_episode_is_logged_once_and_the_run_is_one_page(quickstart):
    folder, _ = quickstart
    run = folder / RUN
    steps = json.loads((run / "summary.json").read_text())["steps"]
    logged = [row for path in episode_files(run) for row in read_rows(path)]
    rows = [row for row in logged if row["end"] == "trained"]
    evaluated = Counter(row["step"] for row in logged if row["end"] == "evaluated")
    assert set(evaluated) == {0, steps} and len(rows) + evaluated.total() == len(logged)
    assert len({(row["step"], row["group"], row["episode"]) for row in rows}) == len(rows) == 128 * steps
    assert all(row["lags"] and max(lag for lag, _ in row["lags"]) == row["head_lag"] <= 4 for row in rows)
    assert all("".join(row["tokens"]["text"]) == row["response"] for row in rows)
    assert any(row["advantage"] > 0 for row in rows)
    page = report([run], folder / "report.html", audit=True)
    assert page.stat().st_size < 5e6
    [island] = re.findall(r'id="data">(.*?)</script>', page.read_text(), re.DOTALL)
    [shown] = json.loads(island)["runs"]
    assert shown["audit"]["state"] == "clean" and len(shown["timeline"]["steps"]) == steps
    assert f"step {steps}/{steps}" in (run / "driver.log").read_text()
