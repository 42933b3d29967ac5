"""The quickstart, but for its last steps: from nothing to a policy that has learnt, as the README claims."""

import json
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from slipstream.backend.quickstart.policy import greedy_accuracy
from slipstream.backend.quickstart.task import Problem
from tests.runs.conftest import RunProcess, run_command

TIMEOUT_S = 600
"""The job takes about two minutes on two free cores."""


@pytest.mark.timeout(TIMEOUT_S + 30)
def test_the_quickstart_learns_within_its_staleness_bound_and_exports_what_it_served(tmp_path: Path):
    with (tmp_path / "out").open("w") as out:
        process = RunProcess(run_command("train", "quickstart", "run.steps=40"), out, cwd=tmp_path)
    try:
        assert process.wait(TIMEOUT_S) == 0, (tmp_path / "out").read_text()
        assert not process.descendants() and not process.shared_memory()
    finally:
        process.end()
    run = tmp_path / "runs/quickstart"
    summary = json.loads((run / "summary.json").read_text())

    assert 0.2 <= summary["reward_before"] <= 0.4
    assert summary["reward_is_accuracy"]
    assert summary["reward_after"] >= max(0.8, 2 * summary["reward_before"])
    assert 0 < summary["head_lag_max"] <= 4
    assert summary["multi_version_fraction"] > 0
    assert summary["trainer_wait_fraction"] < 0.75
    groups = summary["groups"]
    assert groups["trained"] == 16 * summary["steps"]
    assert groups["filtered"] == groups["expired"] == groups["failed"] == 0

    exported = run / "checkpoint-hf"
    model = AutoModelForCausalLM.from_pretrained(exported)
    tokenizer = AutoTokenizer.from_pretrained(exported)
    lines = (tmp_path / "runs/.quickstart-inputs/heldout.jsonl").read_text().splitlines()
    problems = [Problem(**json.loads(line)) for line in lines]
    assert abs(greedy_accuracy(model, tokenizer, problems) - summary["reward_after"]) <= 0.02
