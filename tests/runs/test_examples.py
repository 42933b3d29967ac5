"""The examples at work: one run with most plug-ins at once, a loop of one's own, and the notebook.

In the first one groups end in every way. Its episode log has every episode, with the counts of the audit.
"""

import json
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from examples.data_source.sums import Sums
from slipstream.rollout.ledger.episode_log.files import episode_files, read_rows
from tests.environment import ROOT, environment
from tests.runs.conftest import LaunchedRun, RunProcess, run_command, start_run
from tests.runs.test_run import finish, records, summary, wait_for_step

STEPS, SAMPLES, HELD_OUT = 4, 4, 20
IN_EVERY_WAY = (
    "eval.every=2",
    "rollout.judging={attempts: 1}",
    "rollout.reward={path: tests.runs.untrained.SometimesBroken}",
    "rollout.group_filter={path: tests.runs.untrained.NotEveryThird, args: {least: -1}}",
)
"""Overrides that let some groups fail and reject some."""


def of_inputs(inputs: Path, folder: Path) -> list[str]:
    """Return overrides of a recipe of ``examples``."""
    return [
        f"run.root={folder}",
        "run.name=run",
        f"run.steps={STEPS}",
        f"model.path={inputs / 'policy'}",
        f"eval.path={inputs / 'heldout.jsonl'}",
        f"eval.max_prompts={HELD_OUT}",
    ]


@contextmanager
def starts(folder: Path) -> Iterator:
    """Starts a command in the root of the repository, and ends what a failed test leaves."""
    runs: list[LaunchedRun] = []

    def started(command: list[str], **variables: str) -> LaunchedRun:
        with (folder / "run.out").open("w") as out:
            process = RunProcess(command, out, cwd=ROOT, environment=environment(**variables))
        runs.append(LaunchedRun(process, folder / "run"))
        return runs[-1]

    yield started
    for run in runs:
        run.end()


@pytest.fixture
def start(tmp_path: Path) -> Iterator:
    with starts(tmp_path) as started:
        yield started


@dataclass
class Logged:
    run: LaunchedRun
    rows: list[dict]
    audit: dict

    def of(self, end: str) -> list[dict]:
        return [row for row in self.rows if row["end"] == end]


def read_log(run: LaunchedRun) -> Logged:
    rows = [row for path in episode_files(run.folder) for row in read_rows(path)]
    audit = subprocess.run(
        run_command("audit", str(run.folder), "--json"), capture_output=True, text=True, timeout=120
    )
    return Logged(run, rows, json.loads(audit.stdout))


@pytest.fixture(scope="module")
def everything(inputs: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Logged]:
    """A run with most plug-ins at once, which has ended."""
    folder = tmp_path_factory.mktemp("everything")
    own = (*of_inputs(inputs, folder), *IN_EVERY_WAY, "rollout.over_sampling=1.5")
    with starts(folder) as started:
        run = started(run_command("train", "examples/everything.yaml", *own))
        assert finish(run) == 0, run.output()
        yield read_log(run)


def test_a_run_with_most_plug_ins_at_once_trains_on_what_they_make(everything: Logged):
    run = everything.run
    run.assert_nothing_left()
    steps = records(run)
    assert len(steps) == STEPS
    for step in steps:
        assert 0 < step["batch/distinct_fraction"] <= 1
        assert step["advantage/plugin_abs_mean"] >= 0 and "train/reference_kl" in step
        assert "reward/has_number" in step
    drawn = [json.loads(line) for line in (run.folder / "drawn-prompts.jsonl").read_text().splitlines()]
    made = Sums(seed=1, operands=4).prompts(0, len(drawn))
    assert [row["prompt"] for row in drawn] == [row["prompt"] for row in made]
    assert summary(run)["groups"]["trained"] == STEPS * 4


def groups_by_end(rows: list[dict]) -> dict[str, int]:
    return dict(Counter(end for end, _ in {(row["end"], row["group"]) for row in rows}))


def test_the_log_has_as_many_groups_of_each_end_as_the_audit(everything: Logged):
    counted = groups_by_end([row for row in everything.rows if row["end"] != "evaluated"])
    losses = everything.audit["losses"]
    assert everything.audit["clean"] and {"filtered", "failed"} <= set(losses)
    assert counted == {"trained": everything.audit["groups"]["trained"], **losses}
    assert sum(row["trained_tokens"] for row in everything.rows) == everything.audit["tokens"]["trained"]
    by_group = Counter((row["end"], row["group"]) for row in everything.rows if row["end"] != "evaluated")
    assert set(by_group.values()) == {SAMPLES}


def test_every_evaluation_is_in_the_log_once(everything: Logged):
    rows = everything.of("evaluated")
    assert Counter(row["step"] for row in rows) == dict.fromkeys(range(0, STEPS + 1, 2), HELD_OUT)
    assert all(row["response"] and row["reward"] is not None for row in rows)
    metrics = map(json.loads, (everything.run.folder / "metrics.jsonl").read_text().splitlines())
    for record in metrics:
        if (mean := record.get("eval/reward")) is not None:
            rewards = [row["reward"] for row in rows if row["version"] == record["step"]]
            assert sum(rewards) / len(rewards) == pytest.approx(mean, abs=1e-3)


def test_a_filtered_group_is_whole_and_a_failed_one_says_why(everything: Logged):
    for row in everything.of("filtered"):
        assert row["group"] % 3 == 1 and row["reward"] is not None and row["reason"] is None
        assert row["response_tokens"] == row["spans"][-1][2] > 0 and row["trained_tokens"] == 0
        assert row["head_lag"] is not None and row["advantage"] is None
        assert len(row["tokens"]["text"]) == len(row["tokens"]["logprob"]) == row["response_tokens"]
    failed = everything.of("failed")
    assert all("this prompt has no reward" in row["reason"] for row in failed)
    assert any(row["response"] for row in failed)


def test_the_page_shows_and_counts_all_ends(everything: Logged, tmp_path: Path):
    page = tmp_path / "report.html"
    subprocess.run(
        run_command("report", str(everything.run.folder), "-o", str(page), "--no-audit"),
        check=True,
        timeout=120,
    )
    text = page.read_text()
    data = json.loads(text.partition('type="application/json" id="data">')[2].partition("</script>")[0])
    [shown] = data["runs"]
    assert shown["recorded"] == len(everything.rows)
    assert {row["end"] for row in shown["episodes"]} == {row["end"] for row in everything.rows}


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


@pytest.mark.slow
@pytest.mark.timeout(500)
def test_a_killed_and_resumed_run_has_every_end_once(inputs: Path, tmp_path: Path):
    settings = (
        "run.steps=6",
        *IN_EVERY_WAY,
        f"eval.max_prompts={HELD_OUT}",
        "checkpoint.every=1",
        "rollout.max_head_offpolicyness=1",
    )
    run = start_run(inputs, tmp_path, "killed", *settings)
    try:
        wait_for_step(run, 3, 200)
    finally:
        run.end()
    run = start_run(inputs, tmp_path, "killed", *settings, resume=True)
    try:
        assert run.process.wait(240) == 0, run.output()
        logged = read_log(run)
    finally:
        run.end()
    assert logged.audit["clean"] and logged.audit["starts"] == 2
    by_group = Counter((row["end"], row["group"]) for row in logged.rows if row["end"] != "evaluated")
    assert set(by_group.values()) == {SAMPLES}
    assert len({group for _, group in by_group}) == len(by_group), "no group has two ends"
    counted = Counter(end for end, _ in by_group)
    assert counted.pop("trained") == logged.audit["groups"]["trained"]
    # What was on its way when the driver was killed is missing, and nothing is there that did not end so.
    assert all(0 < n <= logged.audit["losses"][end] for end, n in counted.items())
    evaluated = Counter((row["step"], row["group"]) for row in logged.of("evaluated"))
    assert set(evaluated.values()) == {1}
    assert Counter(step for step, _ in evaluated)[6] == HELD_OUT
