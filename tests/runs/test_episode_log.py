"""The episode log of a whole run: every episode, whatever became of it, with the counts of the audit."""

import json
import subprocess
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from slipstream.rollout.ledger.episode_log.files import episode_files, read_rows
from tests.runs.conftest import LaunchedRun, run_command, start_run
from tests.runs.test_run import wait_for_step

STEPS, SAMPLES, HELD_OUT = 6, 4, 50
EVALUATED_STEPS = {0, 2, 4, 6}


@dataclass
class Logged:
    folder: Path
    rows: list[dict]
    audit: dict

    def of(self, end: str) -> list[dict]:
        return [row for row in self.rows if row["end"] == end]


def read_log(run: LaunchedRun) -> Logged:
    rows = [row for path in episode_files(run.folder) for row in read_rows(path)]
    audit = subprocess.run(
        run_command("audit", str(run.folder), "--json"), capture_output=True, text=True, timeout=120
    )
    return Logged(run.folder, rows, json.loads(audit.stdout))


@pytest.fixture(scope="module")
def logged(inputs: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Logged]:
    run = start_run(
        inputs,
        tmp_path_factory.mktemp("logged"),
        "logged",
        f"run.steps={STEPS}",
        "eval.every=2",
        f"eval.max_prompts={HELD_OUT}",
        "rollout.max_head_offpolicyness=1",
        "rollout.over_sampling=1.5",
        "rollout.reward={path: tests.runs.untrained.sometimes_broken}",
        "rollout.judging={attempts: 1}",
        "rollout.group_filter={path: tests.runs.untrained.NotEveryThird}",
    )
    try:
        assert run.process.wait(240) == 0, run.output()
        yield read_log(run)
    finally:
        run.end()


def groups_by_end(rows: list[dict]) -> dict[str, int]:
    return dict(Counter(end for end, _ in {(row["end"], row["group"]) for row in rows}))


@pytest.mark.timeout(300)
def test_the_log_has_as_many_groups_of_each_end_as_the_audit(logged: Logged):
    counted = groups_by_end([row for row in logged.rows if row["end"] != "evaluated"])
    losses = logged.audit["losses"]
    assert logged.audit["clean"] and {"filtered", "failed"} <= set(losses)
    assert counted == {"trained": logged.audit["groups"]["trained"], **losses}
    assert sum(row["trained_tokens"] for row in logged.rows) == logged.audit["tokens"]["trained"]
    by_group = Counter((row["end"], row["group"]) for row in logged.rows if row["end"] != "evaluated")
    assert set(by_group.values()) == {SAMPLES}


def test_every_evaluation_is_in_the_log_once(logged: Logged):
    rows = logged.of("evaluated")
    assert Counter(row["step"] for row in rows) == dict.fromkeys(EVALUATED_STEPS, HELD_OUT)
    assert all(row["response"] and row["reward"] is not None for row in rows)
    metrics = map(json.loads, (logged.folder / "metrics.jsonl").read_text().splitlines())
    for record in metrics:
        if (mean := record.get("eval/reward")) is not None:
            rewards = [row["reward"] for row in rows if row["version"] == record["step"]]
            assert sum(rewards) / len(rewards) == pytest.approx(mean, abs=1e-3)


def test_a_filtered_group_is_whole_and_a_failed_one_says_why(logged: Logged):
    for row in logged.of("filtered"):
        assert row["group"] % 3 == 1 and row["reward"] is not None and row["reason"] is None
        assert row["response_tokens"] == row["spans"][-1][2] > 0 and row["trained_tokens"] == 0
        assert row["head_lag"] is not None and row["advantage"] is None
        assert len(row["tokens"]["text"]) == len(row["tokens"]["logprob"]) == row["response_tokens"]
    failed = logged.of("failed")
    assert all("this prompt has no reward" in row["reason"] for row in failed)
    assert any(row["response"] for row in failed)


def test_the_page_shows_and_counts_all_ends(logged: Logged, tmp_path: Path):
    page = tmp_path / "report.html"
    subprocess.run(
        run_command("report", str(logged.folder), "-o", str(page), "--no-audit"), check=True, timeout=120
    )
    text = page.read_text()
    data = json.loads(text.partition('type="application/json" id="data">')[2].partition("</script>")[0])
    [shown] = data["runs"]
    assert shown["recorded"] == len(logged.rows)
    assert {row["end"] for row in shown["episodes"]} == {row["end"] for row in logged.rows}


@pytest.mark.slow
@pytest.mark.timeout(500)
def test_a_killed_and_resumed_run_has_every_end_once(inputs: Path, tmp_path: Path):
    settings = (
        f"run.steps={STEPS}",
        "eval.every=2",
        f"eval.max_prompts={HELD_OUT}",
        "checkpoint.every=1",
        "rollout.max_head_offpolicyness=1",
        "rollout.reward={path: tests.runs.untrained.sometimes_broken}",
        "rollout.judging={attempts: 1}",
        "rollout.group_filter={path: tests.runs.untrained.NotEveryThird}",
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
    assert Counter(step for step, _ in evaluated)[STEPS] == HELD_OUT
