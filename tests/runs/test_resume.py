"""Runs that were killed, resumed as a user resumes them: real Megatron, SGLang and Ray.

Most tests read one run, which takes seconds to start: its trainer is killed while it commits a checkpoint, it
goes on, its driver is killed, it is resumed, its collector, judge and engine are killed, and it finishes.
tests/cluster/test_train_on_slurm.py resumes a run that was stopped.
"""

import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from slipstream.backend.quickstart import TRAIN_PROBLEMS
from slipstream.rollout.tokens.trajectory import Trajectory
from tests.crash.sweep import BOUND, START_TIMEOUT_S, Kill, Sweep
from tests.runs.conftest import LaunchedRun, run_command, start_run
from tests.runs.many_turns import TURNS
from tests.runs.stored import Answer, stored
from tests.runs.test_run import summary

BATCH_SIZE, SAMPLES = 4, 16
"""Groups and trajectories of a training step."""
STEPS = 3
SETTINGS = (
    "rollout.max_head_offpolicyness=2",
    "checkpoint.every=2",
    "rollout.engine.stream_interval=4",
)
NAME = "run-0"
"""The first one of a crash sweep."""


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
        time.sleep(0.1)


def kill(run: LaunchedRun) -> None:
    """Kill -9 the driver; return when its guard has ended the rest."""
    run.process.kill()
    run.process.wait()
    deadline = time.monotonic() + 120
    while run.descendants() and time.monotonic() < deadline:
        time.sleep(0.1)
    run.assert_nothing_left()
    run.end()


def checkpoints(folder: Path) -> set[str]:
    """Return the names of the committed checkpoints of a run."""
    return {path.name for path in folder.glob("checkpoints/v????????")}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("resume")


@dataclass(frozen=True)
class Story:
    """The run after both kills."""

    killed: str | None
    """What was killed first."""
    trained_before: int
    """Training steps logged when the trainer was killed."""
    trained: int
    """Training steps logged before the driver was killed."""
    refusals: dict[str, str]
    """Error messages of the commands that were run beside it."""


@pytest.fixture(scope="module")
def story(inputs: Path, root: Path) -> Iterator[Story]:
    """A run that loses its trainer in its first commit, goes on, and loses its driver then.

    The driver is killed behind two checkpoints. Before that, other commands try to take the run over.
    """
    sweep = Sweep(inputs, root, print, SETTINGS, steps=10000)
    run = sweep.start()
    try:
        killed = sweep.strike(run, Kill(0, "trainer", "commit", 0.0))
        before = sweep.steps_logged(run)
        sweep.wait(run, before + BOUND + 2, START_TIMEOUT_S)
        earlier = checkpoints(run.folder)
        wait_for("a checkpoint", lambda: len(checkpoints(run.folder) - earlier) >= 2, run)
        overrides = [f"run.root={root}", f"run.name={NAME}", *given(inputs)]
        commands = {
            "resumed while running": ("train", "quickstart", *overrides, "--resume"),
            "started while running": ("train", "quickstart", *overrides),
            "audited while running": ("audit", str(run.folder)),
        }
        # The driver goes on; what it waits for leaves the processor to the commands.
        for pid in [*run.pids_of("ray::TrainerActor"), *run.pids_of("sglang::scheduler")]:
            os.kill(pid, signal.SIGSTOP)
        with ThreadPoolExecutor() as pool:
            refusals = dict(
                zip(commands, pool.map(lambda command: refused(*command), commands.values()), strict=True)
            )
        kill(run)
        yield Story(killed, before, sweep.steps_logged(run), refusals)
    finally:
        sweep.life.end()


@pytest.fixture(scope="module")
def audited(story: Story, root: Path) -> dict:
    """The audit of the run after both kills."""
    return audit(root / NAME)


def given(inputs: Path) -> list[str]:
    return [
        f"model.path={inputs / 'policy'}",
        f"data.path={inputs / 'train.jsonl'}",
        f"eval.path={inputs / 'heldout.jsonl'}",
        "rollout.batch_size=4",
        "rollout.n_samples_per_prompt=4",
    ]


def test_a_run_whose_trainer_is_killed_in_a_commit_goes_on(story: Story):
    assert story.killed == "trainer"
    assert story.trained > story.trained_before > 0


def test_a_run_cannot_be_taken_over_or_audited_while_it_is_running(story: Story):
    for message in story.refusals.values():
        assert "another process is running this run" in message


def test_a_killed_run_has_a_clean_audit(audited: dict):
    assert audited["clean"] and audited["groups"]["trained"] > 0
    assert audited["starts"] == 2, "the run, its trainer"


def test_a_resume_with_another_seed_is_refused_and_changes_nothing(audited: dict, inputs: Path, root: Path):
    overrides = [f"run.root={root}", f"run.name={NAME}", *given(inputs), "run.seed=5"]
    message = refused("train", "quickstart", *overrides, "--resume")
    assert "run.seed: 5, but the run was started with" in message
    assert audit(root / NAME) == audited


def test_a_killed_run_is_resumed_from_the_newest_sound_checkpoint_and_finishes_although_others_die(
    audited: dict, inputs: Path, root: Path
):
    folder = root / NAME
    before = audited
    *_, older, newest = sorted(folder.glob("checkpoints/v????????"))
    shard = max(newest.glob("*.distcp"), key=lambda path: path.stat().st_size)
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)

    # Fewer steps than were asked for first: what was begun for later ones is left over.
    steps = before["steps"] + 6
    logged = len(records_in(folder))
    length = ["run.steps=null", f"run.epochs={steps * BATCH_SIZE / TRAIN_PROBLEMS}"]
    run = start_run(inputs, root, NAME, *SETTINGS, *length, resume=True)
    try:
        wait_for("a step", lambda: len(records_in(folder)) > logged, run)
        [collector] = run.pids_of("ray::CollectorActor")
        os.kill(collector, signal.SIGKILL)
        wait_for("another collector", lambda: "collector-0 is started again" in run.output(), run)
        wait_for("judges", run.judges, run)
        killed = run.judges()
        for pid in killed:
            os.kill(pid, signal.SIGKILL)
        wait_for("another judge", lambda: set(run.judges()) - set(killed), run)
        for pid in run.pids_of("sglang::scheduler"):
            os.kill(pid, signal.SIGKILL)
        assert run.process.wait(240) == 0, run.output()
        run.assert_nothing_left()
    finally:
        run.end()
    assert f"passes over 4,096 prompts are {steps} steps" in run.output()
    assert f"step {steps}/{steps} " in run.output()
    assert "collector-0 is started again: its process has ended" in run.output()
    assert "engine-0 is started again" in run.output()
    assert f"checkpoint {newest.name} is damaged: {shard.name} has a wrong checksum" in run.output()
    resumed = re.search(rf"resumed from version {int(older.name[1:])} \(step (\d+)\)", run.output())
    assert resumed, run.output()
    found = audit(folder)
    assert found["clean"], found
    assert found["groups"]["trained"] == steps * BATCH_SIZE
    assert (found["starts"], found["steps"]) == (3, steps)
    assert found["steps_lost"] >= before["steps"] - int(resumed[1]) > 0
    result = summary(run)
    assert (result["exit"], result["resumed"], result["engine_restarts"]) == ("done", 2, 1)
    versions = [record["step"] for record in records_in(folder)]
    assert versions == sorted(set(versions)), "a version number was used twice"


def records_in(folder: Path) -> list[dict]:
    """Return what was logged of each training step of a run, over all of its lives."""
    path = folder / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if '"reward/mean"' in line and line.endswith("\n")]


@dataclass(frozen=True)
class Unfinished:
    """A synchronous run that was killed before its first training step, and resumed.

    In its second life its judge is killed.
    """

    run: LaunchedRun
    answers: dict[tuple[int, int], Answer]
    """By episode and call: the answers, whole or in part, that were stored when it was killed."""


@pytest.fixture(scope="module")
def unfinished(inputs: Path, root: Path) -> Iterator[Unfinished]:
    settings = (
        f"run.steps={STEPS}",
        "rollout.max_head_offpolicyness=0",
        "rollout.workflow=tests.runs.many_turns.ManyTurns",
        "rollout.reward=tests.runs.many_turns.Signed",
        "actor.turns={}",
        "rollout.engine.stream_interval=2",
        "checkpoint.every=0",
    )
    folder = root / "unfinished"
    run = start_run(inputs, root, folder.name, *settings)
    try:
        wait_for("answers", lambda: len(stored(folder).answers) > 2 * SAMPLES, run)
        cut_off(run, lambda: bool(stored(folder).partial))
        kill(run)
        before = stored(folder)
        assert before.partial and not before.trajectories
        run = start_run(inputs, root, folder.name, *settings, resume=True)
        wait_for("a step", lambda: len(records_in(folder)) > 0, run)
        killed = run.judges()
        assert killed
        for pid in killed:
            os.kill(pid, signal.SIGKILL)
        wait_for("another judge", lambda: set(run.judges()) - set(killed), run)
        assert run.process.wait(240) == 0, run.output()
        yield Unfinished(run, before.answers)
    finally:
        run.end()


def cut_off(run: LaunchedRun, is_stored: Callable[[], bool]) -> None:
    """Stop the engine in the middle of answers whose beginnings are stored.

    A collector stores what there is of an answer when it grows again after two seconds.
    """
    engine = run.pids_of("sglang::scheduler")
    assert engine
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        for number, seconds in ((signal.SIGSTOP, 2.2), (signal.SIGCONT, 0.02), (signal.SIGSTOP, 1.0)):
            for pid in engine:
                os.kill(pid, number)
            time.sleep(seconds)
        if is_stored():
            return
        for pid in engine:
            os.kill(pid, signal.SIGCONT)
    pytest.fail(f"the beginning of no answer was stored:\n{run.output()}")


@pytest.mark.slow  # test_driver_resume.py has what is gone on with, test_collector_recording.py the answers
def test_unfinished_episodes_are_gone_on_with_after_a_restart(unfinished: Unfinished):
    """Nothing is asked twice of an engine, a part of an answer is continued, a lost judge costs no answer."""
    folder = unfinished.run.folder
    assert f"0 groups ready, {BATCH_SIZE} continued, 0 to be generated again" in unfinished.run.output()
    trajectories = stored(folder).trajectories
    assert len(trajectories) == STEPS * SAMPLES
    for (key, call), answer in unfinished.answers.items():
        turns = sampled_runs(trajectories[key])
        assert len(turns) == len(trajectories[key].turn_rewards) == TURNS
        assert tuple(turns[call][: len(answer.tokens)]) == answer.tokens
    generated = summary(unfinished.run)["tokens_generated"]
    saved = sum(len(answer.tokens) for answer in unfinished.answers.values())
    assert saved > 0
    assert generated == sum(t.sampled_length for t in trajectories.values()) - saved
    assert audit(folder)["clean"]


def sampled_runs(trajectory: Trajectory) -> list[list[int]]:
    """The tokens of each answer of an episode."""
    starts = np.flatnonzero(np.diff(trajectory.loss_mask_T.astype(int), prepend=0) == 1)
    ends = np.flatnonzero(np.diff(trajectory.loss_mask_T.astype(int), append=0) == -1) + 1
    return [trajectory.tokens_T[start:end].tolist() for start, end in zip(starts, ends, strict=True)]
