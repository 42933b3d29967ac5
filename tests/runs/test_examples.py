"""The examples at work: one run with most plug-ins at once, a loop of one's own, and the notebook."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.environment import ROOT, environment
from tests.runs.conftest import LaunchedRun, RunProcess, run_command
from tests.runs.test_run import finish, records, summary

STEPS = 4


def of_inputs(inputs: Path, folder: Path) -> list[str]:
    """Return overrides of a recipe of ``examples``."""
    return [
        f"run.root={folder}",
        "run.name=run",
        f"run.steps={STEPS}",
        f"model.path={inputs / 'policy'}",
        f"eval.path={inputs / 'heldout.jsonl'}",
        "eval.max_prompts=20",
    ]


@pytest.fixture
def start(tmp_path: Path) -> Iterator:
    """Starts a command in the root of the repository, and ends what a failed test leaves."""
    runs: list[LaunchedRun] = []

    def started(command: list[str], **variables: str) -> LaunchedRun:
        with (tmp_path / "run.out").open("w") as out:
            process = RunProcess(command, out, cwd=ROOT, environment=environment(**variables))
        runs.append(LaunchedRun(process, tmp_path / "run"))
        return runs[-1]

    yield started
    for run in runs:
        run.end()


def test_a_run_with_most_plug_ins_at_once_trains_on_what_they_make(inputs: Path, tmp_path: Path, start):
    run = start(run_command("train", "examples/everything.yaml", *of_inputs(inputs, tmp_path)))
    assert finish(run) == 0, run.output()
    run.assert_nothing_left()
    steps = records(run)
    assert len(steps) == STEPS
    for step in steps:
        assert 0 < step["batch/distinct_fraction"] <= 1
        assert step["advantage/plugin_abs_mean"] >= 0 and "train/reference_kl" in step
        assert "reward/has_number" in step
    drawn = [json.loads(line) for line in (run.folder / "drawn-prompts.jsonl").read_text().splitlines()]
    from examples.data_source.sums import Sums

    made = Sums(seed=1, operands=4).prompts(0, len(drawn))
    assert [row["prompt"] for row in drawn] == [row["prompt"] for row in made]
    assert summary(run)["groups"]["trained"] == STEPS * 4
    assert subprocess.run(run_command("audit", str(run.folder)), timeout=120).returncode == 0


@pytest.mark.slow
def test_an_objective_that_returns_a_wrong_shape_ends_the_run_with_its_file_and_line(
    inputs: Path, tmp_path: Path, start
):
    objective = "actor.objective={type: plugin, path: tests.wrong_inputs.their_plugins.Scalar}"
    run = start(run_command("train", "examples/everything.yaml", *of_inputs(inputs, tmp_path), objective))
    assert finish(run) == 1, run.output()
    run.assert_nothing_left()
    [line] = [line for line in run.output().splitlines() if "PluginFailed" in line]
    assert "actor.objective: tests.wrong_inputs.their_plugins.Scalar.loss" in line
    assert "tests/wrong_inputs/their_plugins.py:" in line and "of shape []" in line
    assert "started again" not in run.output(), "no other trainer would mend it"


@pytest.mark.slow
def test_a_loop_of_ones_own_trains_publishes_and_evaluates(inputs: Path, tmp_path: Path, start):
    data = f"data.path={inputs / 'train.jsonl'}"
    sizes = ["rollout.batch_size=4", "rollout.n_samples_per_prompt=4", data]
    command = [sys.executable, "-m", "examples.own_loop.own_loop", *of_inputs(inputs, tmp_path), *sizes]
    run = start(command)
    assert finish(run) == 0, run.output()
    run.assert_nothing_left()
    assert [f"version {number}: reward" in run.output() for number in range(1, STEPS + 1)] == [True] * STEPS
    assert len(records(run)) == STEPS
    assert list((run.folder / "checkpoint-hf").glob("*.safetensors"))


@pytest.mark.slow
def test_an_error_in_a_loop_of_ones_own_ends_everything(inputs: Path, tmp_path: Path, start):
    script = tmp_path / "failing.py"
    script.write_text(
        "import sys, slipstream\n"
        "recipe = slipstream.load_recipe('examples/own_loop/recipe.yaml', sys.argv[1:])\n"
        "with slipstream.OwnRun(recipe) as run:\n"
        "    run.step(run.batch())\n"
        "    raise ValueError('a mistake of mine')\n"
    )
    data = f"data.path={inputs / 'train.jsonl'}"
    run = start([sys.executable, str(script), *of_inputs(inputs, tmp_path), data])
    assert finish(run) == 1
    run.assert_nothing_left()
    assert "a mistake of mine" in run.output()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_notebook_runs(inputs: Path, tmp_path: Path, start):
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs/.quickstart-inputs").symlink_to(inputs)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    with (tmp_path / "run.out").open("w") as out:
        command = [sys.executable, "-m", "tests.runs.notebook", "examples/quickstart.ipynb"]
        process = RunProcess(command, out, cwd=tmp_path, environment=environment(STEPS=str(STEPS)))
    run = LaunchedRun(process, tmp_path / "run")
    try:
        assert finish(run, 500) == 0, run.output()
        run.assert_nothing_left()
    finally:
        run.end()
    result = json.loads(run.output().splitlines()[-1])
    assert [version for version, *_ in result["history"]] == list(range(1, STEPS + 1))
    assert 0 <= result["evaluated"] <= 1
