"""A run that was killed, resumed as a user resumes it: real Megatron, SGLang and Ray."""

import json
import os
import shutil
import signal
import sqlite3
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from rollout.ledger.database import LedgerError, open_for_reading
from rollout.ledger.records import decode_completion, decode_trajectory
from rollout.ledger.writer import SAMPLES
from tests.integration.conftest import LaunchedRun, run_command, start_run

BATCH_SIZE = 4
SETTINGS = (
    "rollout.max_head_offpolicyness=2",
    "checkpoint.every=2",
    "rollout.engine.stream_interval=4",
)


def audit(folder: Path) -> dict:
    """What ``slipstream audit --json`` says; its exit code says the same."""
    result = subprocess.run(
        run_command("audit", str(folder), "--json"), capture_output=True, text=True, timeout=120
    )
    found = json.loads(result.stdout)
    assert found["clean"] == (result.returncode == 0)
    return found


def refused(*arguments: str) -> str:
    """The message of a command that ends with exit code 2."""
    result = subprocess.run(run_command(*arguments), capture_output=True, text=True, timeout=120)
    assert result.returncode == 2, result.stdout + result.stderr
    return result.stderr


def wait_for(what: str, condition, run: LaunchedRun, timeout_s: float = 180) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert run.process.poll() is None, run.output()
        assert time.monotonic() < deadline, f"{what} has not come in {timeout_s} s:\n{run.output()}"
        time.sleep(0.05)


def kill(run: LaunchedRun) -> None:
    """kill -9 of the driver; returns when its guard has ended the rest."""
    run.process.kill()
    run.process.wait()
    deadline = time.monotonic() + 30
    while run.descendants() and time.monotonic() < deadline:
        time.sleep(0.1)
    run.assert_nothing_left()


def end(run: LaunchedRun) -> None:
    for pid in [*run.descendants(), run.process.pid]:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    run.process.wait()


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("resume")


@pytest.fixture(scope="module")
def story(inputs: Path, root: Path) -> Iterator[dict[str, str]]:
    """A run that another one tries to take over, and that is killed behind its second checkpoint."""
    run = start_run(inputs, root, "run", *SETTINGS, "run.steps=10000")
    try:
        wait_for("a checkpoint", lambda: len(list(run.folder.glob("checkpoints/v????????"))) >= 2, run)
        overrides = [f"run.root={root}", "run.name=run", *given(inputs)]
        said = {
            "resumed while running": refused("train", "quickstart", *overrides, "--resume"),
            "started while running": refused("train", "quickstart", *overrides),
            "audited while running": refused("audit", str(run.folder)),
        }
        kill(run)
        yield said
    finally:
        end(run)


def given(inputs: Path) -> list[str]:
    return [
        f"model.path={inputs / 'policy'}",
        f"data.path={inputs / 'train.jsonl'}",
        f"eval.path={inputs / 'heldout.jsonl'}",
        "rollout.batch_size=4",
        "rollout.n_samples_per_prompt=4",
    ]


def test_a_run_cannot_be_taken_over_or_audited_while_it_is_running(story: dict[str, str]):
    for said in story.values():
        assert "another process is running this run" in said


def test_a_killed_run_has_a_clean_audit(story, root: Path):
    found = audit(root / "run")
    assert found["clean"] and found["starts"] == 1 and found["groups"]["trained"] > 0


def test_a_resume_with_another_seed_is_refused_and_changes_nothing(story, inputs: Path, root: Path):
    before = audit(root / "run")
    overrides = [f"run.root={root}", "run.name=run", *given(inputs), "run.seed=5"]
    said = refused("train", "quickstart", *overrides, "--resume")
    assert "run.seed: 5, but the run was started with" in said
    assert audit(root / "run") == before


def test_a_killed_run_is_resumed_from_the_newest_sound_checkpoint_and_finishes(
    story, inputs: Path, root: Path
):
    folder = root / "run"
    before = audit(folder)
    *_, older, newest = sorted(folder.glob("checkpoints/v????????"))
    shard = max(newest.glob("*.distcp"), key=lambda path: path.stat().st_size)
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)

    # Fewer steps than were asked for first: what was begun for later ones is left over.
    steps = before["steps"] + 4
    run = start_run(inputs, root, "run", *SETTINGS, f"run.steps={steps}", resume=True)
    try:
        assert run.process.wait(240) == 0, run.output()
    finally:
        end(run)
    assert f"checkpoint {newest.name} is damaged: {shard.name} has a wrong checksum" in run.output()
    assert f"resumed from version {int(older.name[1:])}" in run.output()
    found = audit(folder)
    assert found["clean"], found
    assert found["groups"]["trained"] == steps * BATCH_SIZE
    assert (found["starts"], found["steps"]) == (2, steps)
    assert found["steps_lost"] >= before["steps"] - int(older.name[1:])
    summary = json.loads((folder / "summary.json").read_text())
    assert (summary["exit"], summary["resumed"]) == ("done", 1)
    versions = [
        json.loads(line)["step"]
        for line in (folder / "metrics.jsonl").read_text().splitlines()
        if '"reward/mean"' in line
    ]
    assert versions == sorted(set(versions)), "a version number was used twice"


def test_partial_answers_are_gone_on_with_after_a_restart(inputs: Path, root: Path):
    """Answers of 400 tokens whatever the policy says: the kill finds every one of them half generated."""
    settings = (
        "run.steps=2",
        "rollout.max_head_offpolicyness=1",
        "rollout.sampling.max_new_tokens=400",
        "rollout.engine.stream_interval=4",
        """rollout.engine.args.preferred_sampling_params='{"ignore_eos": true}'""",
        "checkpoint.every=0",
    )
    folder = root / "partial"
    run = start_run(inputs, root, "partial", *settings)
    try:
        wait_for("partial answers", lambda: stored(folder, "partials", decode_completion), run)
        kill(run)
        partials = stored(folder, "partials", decode_completion)
        assert all(0 < len(partial.tokens) < 400 for partial in partials.values())
        run = start_run(inputs, root, "partial", *settings, resume=True)
        assert run.process.wait(240) == 0, run.output()
    finally:
        end(run)
    assert f"0 groups ready, {len({key // SAMPLES for key in partials})} continued" in run.output()
    trajectories = stored(folder, "trajectories", decode_trajectory)
    for key, partial in partials.items():
        answer = trajectories[key].tokens_T[-400:].tolist()
        assert tuple(answer[: len(partial.tokens)]) == partial.tokens
    generated = json.loads((folder / "summary.json").read_text())["tokens_generated"]
    saved = sum(len(partial.tokens) for partial in partials.values())
    assert generated == 2 * BATCH_SIZE * 4 * 400 - saved
    assert audit(folder)["clean"]


def stored(folder: Path, table: str, decode: Callable[[bytes], Any]) -> dict[int, Any]:
    """What a kill at this moment would leave in a table, by key; nothing while it cannot be read."""
    with tempfile.TemporaryDirectory() as scratch:
        for file in folder.glob("ledger.sqlite*"):
            shutil.copy(file, scratch)
        with suppress(LedgerError, sqlite3.Error):
            rows = open_for_reading(Path(scratch) / "ledger.sqlite").execute(
                f"SELECT key, payload FROM {table}"
            )
            return {key: decode(payload) for key, payload in rows}
    return {}
