"""Whole runs whose episodes are hooks written for slime."""

import json
import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from slipstream.rollout.ledger.rows.samples import SAMPLES
from tests.environment import ROOT, environment
from tests.runs.conftest import LaunchedRun, run_command
from tests.runs.stored import stored
from tests.runs.test_run import finish, records, summary, wait_for_step

STEADY_DRAWS = ROOT / "tests" / "steady_draws"

LEARNING_RATE, TOLERANCE = 0.1, 1e-6
COMPARED = ("train/loss", "reward/mean", "train/tokens")

HOOKS = {
    "custom_generate_function": "tests.runs.slime_hooks.generate",
    "custom_rm": "tests.runs.slime_hooks.reward",
    "rollout_sample_hook": "[tests.runs.slime_hooks.mark]",
    "dynamic_sampling_filter": "tests.runs.slime_hooks.keep_mixed",
    "rollout_sample_filter": "tests.runs.slime_hooks.remove_first",
    "rollout_all_samples_process": "tests.runs.slime_hooks.see_all",
}


@pytest.mark.slow  # tests/agents has hooks at an engine; `make test-slime` runs this
def test_a_run_of_hooks_trains_what_the_engines_have_sampled(
    launch: Callable[..., LaunchedRun], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    seen = tmp_path / "seen.jsonl"
    monkeypatch.setenv("PYTHONPATH", environment()["PYTHONPATH"])
    monkeypatch.setenv("SLIME_HOOKS_SEEN", str(seen))
    run = launch(
        "run.steps=5",
        "eval.every=5",
        "eval.max_prompts=4",
        "rollout.max_head_offpolicyness=1",
        "rollout.sampling.max_new_tokens=12",
        "rollout.reward=null",
        "rollout.reward_key=score",
        *(f"rollout.hooks.{name}={value}" for name, value in HOOKS.items()),
    )
    assert finish(run) == 0, run.output()
    groups = summary(run)["groups"]
    assert (groups["trained"], groups["failed"]) == (20, 0), run.output()
    audit = subprocess.run(
        run_command("audit", str(run.folder), "--json"), capture_output=True, text=True, timeout=120
    )
    assert json.loads(audit.stdout)["clean"], audit.stdout + audit.stderr
    run.assert_nothing_left()
    notes = [json.loads(line) for line in seen.read_text().splitlines()]
    assert {note["matched"] for note in notes if note["kind"] == "stopped"} == {"5", "#"}
    groups_seen = [note["samples"] for note in notes if note["kind"] == "group"]
    assert len(groups_seen) >= 20 and {1, 2} == {size for sizes in groups_seen for size in sizes}
    removed = set()
    for key, trajectory in stored(run.folder).trajectories.items():
        assert trajectory.sampled_length < len(trajectory.tokens_T)
        if not trajectory.split()[0].response_length:
            removed.add(key)
    assert len(removed) >= 20 and all(key % SAMPLES == 0 for key in removed)
    steps = records(run)
    assert [record["reward/turns"] for record in steps] and all("reward/agents" in record for record in steps)


FUNCTIONS = {
    "rollout_function": "tests.runs.slime_hooks.collect",
    "data_source": "tests.runs.slime_hooks.Numbered",
    "buffer_filter": "tests.runs.slime_hooks.take_last",
    "eval_function": "tests.runs.slime_hooks.evaluate",
    "custom_eval_rollout_log_function": "tests.runs.slime_hooks.log_evaluation",
}


@pytest.mark.slow  # test_slime_rollout_calls.py has them without engines
def test_functions_for_whole_batches_collect_and_evaluate_although_their_collector_is_killed(
    launch: Callable[..., LaunchedRun], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    seen = tmp_path / "seen.jsonl"
    monkeypatch.setenv("PYTHONPATH", environment()["PYTHONPATH"])
    monkeypatch.setenv("SLIME_HOOKS_SEEN", str(seen))
    run = launch(
        "run.steps=5",
        "eval.every=5",
        "eval.max_prompts=4",
        "rollout.max_head_offpolicyness=1",
        "rollout.sampling.max_new_tokens=12",
        "rollout.reward={path: tests.runs.rewards.letters}",
        *(f"rollout.hooks.{name}={value}" for name, value in FUNCTIONS.items()),
    )

    def notes(kind: str) -> list[dict]:
        lines = seen.read_text().splitlines() if seen.exists() else []
        return [note for note in map(json.loads, lines) if note["kind"] == kind]

    wait_for_step(run, 2, 240)
    [collector] = run.pids_of("ray::CollectorActor")
    os.kill(collector, signal.SIGKILL)
    assert finish(run) == 0, run.output()
    groups = summary(run)["groups"]
    assert (groups["trained"], groups["failed"]) == (20, 0), run.output()
    audit = subprocess.run(
        run_command("audit", str(run.folder), "--json"), capture_output=True, text=True, timeout=120
    )
    assert json.loads(audit.stdout)["clean"], audit.stdout + audit.stderr
    run.assert_nothing_left()

    calls = notes("call")
    dropped = [number for call in calls for number in call["dropped"]]
    assert dropped and groups["filtered"] >= len(set(dropped)) - 4, "a lost call may have dropped some"
    given_back = [number for call in calls for number in call["given_back"]]
    assert given_back and {tuple(note["numbers"]) for note in notes("buffer")} >= {(given_back[0],)}
    assert [note["names"] for note in notes("logged")] == [["first", "second"]] * 2
    lines = (run.folder / "metrics.jsonl").read_text().splitlines()
    evaluated = [record for record in map(json.loads, lines) if "eval/reward" in record]
    assert [record["eval/reward_second"] for record in evaluated] == [0.5, 0.5]
    assert {record["episode/calls"] for record in records(run)} == {1.0}
    drawn = (run.folder / "drawn-prompts.jsonl").read_text().splitlines()
    assert [json.loads(line)["metadata"]["number"] for line in drawn] == list(range(len(drawn)))
    assert len(drawn) >= 20 + groups["filtered"]


def largest_change(run: LaunchedRun, inputs: Path) -> float:
    """Return the largest difference of a weight between the last version on the disk and the first policy."""
    *_, last = sorted((run.folder / "weights").glob("version-*"))
    before, after = (weights_in(folder) for folder in (inputs / "policy", last))
    return max(float(np.abs(after[name] - before[name]).max()) for name in before)


def weights_in(folder: Path) -> dict[str, np.ndarray]:
    return {name: value for file in folder.glob("*.safetensors") for name, value in load_file(file).items()}


@pytest.mark.slow
def test_slimes_own_generate_function_trains_as_without_hooks(
    launch: Callable[..., LaunchedRun], inputs: Path, monkeypatch: pytest.MonkeyPatch
):
    """At the recipe's temperature and learning rate. SGLang's random numbers on a CPU depend on the order in
    which requests arrive, so that engines draw with noise of their own (``tests/steady_draws``).
    """
    monkeypatch.setenv("PYTHONPATH", environment(STEADY_DRAWS)["PYTHONPATH"])
    monkeypatch.setenv("SLIPSTREAM_STEADY_DRAWS", "1")
    settings = (
        "run.steps=5",
        "eval=null",  # greedy requests beside the others make SGLang draw in another way
        "rollout.max_head_offpolicyness=0",
        "rollout.n_samples_per_prompt=2",
        "rollout.sampling.max_new_tokens=12",
        "rollout.reward={path: tests.runs.rewards.by_place}",
        "actor.advantage=[{type: reward, estimator: reward}]",
        f"actor.optimizer.lr={LEARNING_RATE}",
        "actor.optimizer.eps=1",
        "actor.optimizer.warmup_steps=0",
        "weights.transport.type=disk",
    )
    by_default, named = (
        launch(*settings, *hooks, name=name)
        for name, hooks in (
            ("default", ()),
            ("named", ("rollout.hooks.custom_generate_function=slime.rollout.sglang_rollout.generate",)),
        )
    )
    steps = []
    for run in (by_default, named):
        assert finish(run) == 0, run.output()
        assert largest_change(run, inputs) > 100 * TOLERANCE, "the policy is another one behind the run"
        steps.append([[record[name] for name in COMPARED] for record in records(run)])
    assert len({loss for loss, *_ in steps[0]}) == 5, "each step is another one"
    assert steps[1] == [pytest.approx(step, abs=TOLERANCE) for step in steps[0]]
