"""A run whose trainer takes the engine's experts, killed and resumed: real Megatron and SGLang."""

import json
from pathlib import Path

import pytest

from slipstream.backend.quickstart.tokenizer import build_tokenizer
from tests.models import make_checkpoint
from tests.runs.conftest import start_run
from tests.runs.test_examples import read_log
from tests.runs.test_run import wait_for_step

STEPS = 3


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_killed_run_goes_on_with_the_experts_of_its_record(inputs: Path, tmp_path: Path):
    tokenizer, model = build_tokenizer(), tmp_path / "mixture"
    make_checkpoint(model, "qwen3_moe", tied=False, vocab_size=len(tokenizer), mlp_only_layers=[])
    tokenizer.save_pretrained(model)
    settings = (
        f"run.steps={STEPS}",
        f"model.path={model}",
        "actor.routing_replay=rollout",
        "checkpoint.every=1",
        "rollout.max_head_offpolicyness=1",
    )
    run = start_run(inputs, tmp_path, "routed", *settings)
    try:
        wait_for_step(run, 1, 500)
    finally:
        run.end()
    run = start_run(inputs, tmp_path, "routed", *settings, resume=True)
    try:
        assert run.process.wait(500) == 0, run.output()
        logged = read_log(run)
    finally:
        run.end()
    assert logged.audit["clean"] and logged.audit["starts"] == 2
    metrics = [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]
    unrouted = [step["mismatch/unrouted"] for step in metrics if "mismatch/unrouted" in step]
    assert len(unrouted) >= STEPS and max(unrouted) < 0.05
    assert all(step["mismatch/logprob_abs_max"] < 1e-3 for step in metrics if step.get("mismatch/tokens"))
