"""Supervised training by the trainer: cross-entropy's gradient, and ``slipstream sft`` as a whole."""

import json
import random
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from slipstream.backend.batch.train_batch import demonstrated
from slipstream.backend.driver.modes.sft import read_encoded_examples
from slipstream.backend.megatron.parallel import RankSpec
from slipstream.backend.quickstart import task
from slipstream.backend.quickstart.policy import build_policy
from slipstream.backend.quickstart.tokenizer import build_tokenizer, demonstration_text
from slipstream.configs.load import load_supervised
from slipstream.configs.schema import RunConfig
from slipstream.configs.supervised import Supervised
from slipstream.configs.violations import RecipeError
from tests.integration.test_megatron_parity import unfused
from tests.integration.test_other_models import compare, exported, gradients_in
from tests.models import make_checkpoint, reference_model
from tests.ranks import Job, run_jobs, run_ranks

RNG = np.random.default_rng(0)
PAIRS = [
    (RNG.integers(0, 101, RNG.integers(1, 9)).tolist(), RNG.integers(0, 101, RNG.integers(1, 20)).tolist())
    for _ in range(9)
]


@pytest.fixture
def recipe(tmp_path: Path) -> Callable[..., Path]:
    return partial(write_recipe, tmp_path)


def write_recipe(folder: Path, **changes) -> Path:
    """Write an SFT recipe for a tiny policy and 40 examples of either kind; return its path."""
    model = folder / "model"
    tokenizer = build_tokenizer()
    build_policy(tokenizer, seed=0).save_pretrained(model)
    tokenizer.save_pretrained(model)
    problems = task.train_set(seed=0, count=40)
    rows = []
    for problem in problems:
        right = task.noisy_demonstration(problem.prompt, random.Random(0), habit_rate=0)
        wrong = f"{right[:-1]}{(int(right[-1]) + 1) % 10}"
        rows.append({"prompt": problem.prompt, "response": right, "chosen": right, "rejected": wrong * 2})
    (folder / "examples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = {
        "run": {"name": "sft", "root": str(folder / "runs"), "steps": 12},
        "model": {"path": str(model), "dtype": "float32"},
        "data": {"path": str(folder / "examples.jsonl")},
        "batch_size": 20,
        "actor": {"optimizer": {"lr": 5e-3, "warmup_steps": 2}, "microbatch_tokens": 256},
    }
    file = folder / "recipe.yaml"
    file.write_text(yaml.safe_dump(data | changes))
    return file


def step(rank: RankSpec, config: RunConfig):
    """Metrics and gradient of a step on ``PAIRS``."""
    from slipstream.backend.trainer.rank import TrainerRank

    trainer = TrainerRank(config, rank)
    trainer._trained.optimizer.step = lambda: (True, 0.0, 0)
    metrics = trainer.train(demonstrated(PAIRS, version=0))
    return metrics, exported(trainer._plan, gradients_in(trainer._parameters), rank.rank)


LAYOUTS = {
    "one rank": {},
    "data 2": {"data": 2},
    "pipeline 2": {"pipeline": 2},
    "tensor 2 + sequence": {"tensor": 2, "sequence": True},
}
DEMONSTRATED = ("one rank", "data 2")
"""Layouts in which the policy learns from demonstrations."""


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    return {
        "policy": make_checkpoint(folder / "policy"),
        "reward model": with_value_head(make_checkpoint(folder / "reward-model", tied=False)),
    }


@pytest.fixture(scope="module")
def steps(checkpoints: dict[str, Path], tmp_path_factory) -> dict[tuple[str, str], list[Any]]:
    """By model and layout: the metrics and the gradient of every rank."""
    jobs = {}
    for model, function, changes in (
        ("policy", step, {"batch_size": len(PAIRS)}),
        ("reward model", reward_model_step, {"learn": "preferences"}),
    ):
        path = {"path": str(checkpoints[model]), "dtype": "float32"}
        file = write_recipe(tmp_path_factory.mktemp("recipe"), model=path, **changes)
        for layout in DEMONSTRATED if model == "policy" else LAYOUTS:
            overrides = [f"actor.parallel={json.dumps(LAYOUTS[layout])}", "actor.microbatch_tokens=40"]
            config = load_supervised(file, overrides).run
            jobs[model, layout] = Job(config.actor.parallel.world_size, function, (config,))
    return run_jobs(jobs)


@pytest.mark.parametrize("layout", DEMONSTRATED)
def test_the_gradient_is_that_of_transformers_loss(checkpoints: dict[str, Path], steps, layout: str):
    checkpoint = checkpoints["policy"]
    (metrics, found), *_ = steps["policy", layout]
    model = reference_model(checkpoint)
    total, tokens = 0.0, sum(len(response) for _, response in PAIRS)
    for prompt, response in PAIRS:
        labels = torch.tensor([[-100] * len(prompt) + response])
        total = total + model(torch.tensor([prompt + response]), labels=labels).loss * len(response)
    (total / tokens).backward()
    compare(found, dict(unfused((name, p.grad.numpy()) for name, p in model.named_parameters())), "sft")
    assert metrics["train/loss"] == pytest.approx(total.item() / tokens, rel=1e-5)
    assert metrics["train/tokens"] == tokens


def reward_model_step(rank: RankSpec, config: RunConfig):
    """The same of a reward model, on ``PAIRS``, but for the last one, as pairs of answers."""
    from slipstream.backend.trainer.reward_model import RewardModelRank

    trainer = RewardModelRank(config, rank)
    trainer._trained.optimizer.step = lambda: (True, 0.0, 0)
    metrics = trainer.train(demonstrated(PAIRS[:-1], version=0))
    return metrics, exported(trainer._plan, gradients_in(trainer._parameters), rank.rank)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_reward_models_gradient_is_that_of_the_pairs_loss(checkpoints: dict[str, Path], steps, layout: str):
    checkpoint, ranks = checkpoints["reward model"], steps["reward model", layout]
    [metrics] = [found for found, _ in ranks if found is not None]

    model = reference_model(checkpoint)
    score = torch.nn.Parameter(load_file(checkpoint / "model.safetensors")["score.weight"])
    values = [
        model.model(torch.tensor([prompt + answer])).last_hidden_state[0, -1] @ score[0]
        for prompt, answer in PAIRS[:-1]
    ]
    differences = torch.stack(values[0::2]) - torch.stack(values[1::2])
    loss = -differences.sigmoid().log().mean()
    loss.backward()
    named = [(n, p) for n, p in model.named_parameters() if p.grad is not None] + [("score.weight", score)]
    compare(ranks[0][1], dict(unfused((name, p.grad.numpy()) for name, p in named)), "reward model")
    assert metrics["train/loss"] == pytest.approx(loss.item(), rel=1e-5)
    assert metrics["train/preference_accuracy"] == (differences > 0).float().mean()


def with_value_head(checkpoint: Path) -> Path:
    weights = load_file(checkpoint / "model.safetensors")
    weights["score.weight"] = torch.randn(1, weights["model.norm.weight"].shape[0])
    save_file(weights, checkpoint / "model.safetensors", {"format": "pt"})
    return checkpoint


def wait_for(path: Path, run: subprocess.Popen, out: Path, timeout_s: float = 120) -> None:
    deadline = time.monotonic() + timeout_s
    while not path.exists():
        assert run.poll() is None, out.read_text()
        assert time.monotonic() < deadline, f"{path} was not there in {timeout_s:.0f} s:\n{out.read_text()}"
        time.sleep(0.05)


def slipstream_sft(file: Path, *overrides: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "slipstream.backend.cli", "sft", str(file), *overrides]
    return subprocess.run(command, capture_output=True, text=True, timeout=180)


def test_slipstream_sft_trains_and_writes_a_checkpoint(recipe, tmp_path: Path):
    done = slipstream_sft(recipe())
    assert done.returncode == 0, done.stderr
    folder = tmp_path / "runs/sft"
    ended, *following = done.stdout.splitlines()
    assert ended == f"sft: done; the checkpoint is {folder / 'checkpoint-hf'}"
    assert [line.split()[:2] for line in following] == [
        ["slipstream", "report"],
        ["tensorboard", "--logdir"],
        ["slipstream", "eval"],
        ["slipstream", "init"],
    ]
    assert ended.partition(": ")[2] in (folder / "driver.log").read_text()
    assert json.loads((folder / "summary.json").read_text()) == {"exit": "done", "steps": 12}
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    losses = [record["train/loss"] for record in records if "train/loss" in record]
    assert len(losses) == 12
    assert losses[-1] < losses[0] - 1
    assert f"step 12/12, loss {losses[-1]:.4f}" in done.stderr
    trained = AutoModelForCausalLM.from_pretrained(folder / "checkpoint-hf")
    tokenizer = build_tokenizer()
    row = json.loads((tmp_path / "examples.jsonl").read_text().splitlines()[0])
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": row["prompt"]}], add_generation_prompt=True, return_dict=False
    )
    response = [*tokenizer.encode(row["response"], add_special_tokens=False), tokenizer.eos_token_id]
    labels = torch.tensor([[-100] * len(prompt) + response])
    with torch.no_grad():
        loss = trained(torch.tensor([prompt + response]), labels=labels).loss
    assert float(loss) < losses[0] - 1


def reward_model_without_a_break(rank: RankSpec, asked: Supervised) -> dict:
    """The weights that ``slipstream sft`` has to end with, in HF names."""
    from slipstream.backend.trainer.reward_model import RewardModelRank

    examples, size = read_encoded_examples(asked), asked.run.rollout.batch_size
    trainer = RewardModelRank(asked.run, rank)
    for at in range(asked.run.run.total_steps):
        answers = [answer for i in range(size) for answer in examples.pairs_at(at * size + i)]
        trainer.train(demonstrated(answers, at))
    return exported(trainer._plan, trainer._parameters, rank.rank)


@pytest.mark.slow  # the gradient is tested above, the command with a policy
def test_slipstream_sft_trains_a_reward_model_that_transformers_loads(recipe, tmp_path: Path):
    """Killed behind a checkpoint and resumed, it ends with the weights that it would have had."""
    file, folder = recipe(learn="preferences", checkpoint={"every": 4}), tmp_path / "runs/sft"
    command = [sys.executable, "-m", "slipstream.backend.cli", "sft", str(file)]
    with (tmp_path / "out").open("w") as out:
        run = subprocess.Popen([*command, "run.steps=100000"], stdout=out, stderr=out)
    try:
        wait_for(folder / "checkpoints/v00000004", run, tmp_path / "out")
    finally:
        run.kill()
        run.wait()
    steps = 3 + max(int(path.name[1:]) for path in folder.glob("checkpoints/v????????"))
    epochs = steps / 2  # of 40 examples in batches of 20
    done = slipstream_sft(file, "--resume", "run.steps=null", f"run.epochs={epochs}")
    assert done.returncode == 0, done.stderr
    assert f"resumed from step {steps - 3}" in done.stderr
    assert f"run.epochs: {epochs:g} passes over 40 examples are {steps} steps" in done.stderr
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    versions = [record["step"] for record in records if "train/loss" in record]
    assert versions == sorted(set(versions)), "a version number was used twice"
    assert [record["train/step"] for record in records[-3:]] == [steps - 2, steps - 1, steps]
    asked = load_supervised(file, [f"run.steps={steps}"])
    [straight] = run_ranks(1, reward_model_without_a_break, asked)
    files = (folder / "checkpoint-hf").glob("*.safetensors")
    weights = {name: weight for file in files for name, weight in load_file(file).items()}
    assert weights.keys() == straight.keys()
    for name, weight in straight.items():
        np.testing.assert_array_equal(weights[name].numpy(), weight, err_msg=name)

    losses = [record["train/loss"] for record in records if "train/loss" in record]
    assert losses[0] == pytest.approx(np.log(2))  # every value is 0 at first
    assert losses[-1] < 0.5
    model = AutoModelForSequenceClassification.from_pretrained(folder / "checkpoint-hf", num_labels=1)
    tokenizer = build_tokenizer()
    right = 0
    for line in (tmp_path / "examples.jsonl").read_text().splitlines():
        row = json.loads(line)
        texts = (demonstration_text(row["prompt"], row[kind]) for kind in ("chosen", "rejected"))
        with torch.no_grad():
            chosen, rejected = (model(**tokenizer(text, return_tensors="pt")).logits.item() for text in texts)
        right += chosen > rejected
    assert right >= 36


def test_what_is_wrong_is_told_at_once(recipe, tmp_path: Path):
    with pytest.raises(RecipeError) as error:
        load_supervised(
            recipe(batch_size=0, rollout={}),
            ["actor.advantage=[{type: reward, estimator: gae}]", "actor.optimizer.lr=-1"],
        )
    found = {violation.path: violation.reason for violation in error.value.violations}
    assert found.keys() == {"batch_size", "rollout", "actor.advantage", "actor.optimizer.lr"}
    with pytest.raises(RecipeError) as error:
        load_supervised(recipe(batch_size=1), ["actor.parallel.data=2"])
    [violation] = error.value.violations
    assert violation.path == "batch_size" and "rollout" not in violation.reason

    (tmp_path / "other.jsonl").write_text('{"prompt": "a1b2"}\n')
    done = slipstream_sft(recipe(), f"data.path={tmp_path / 'other.jsonl'}")
    assert done.returncode == 2
    assert "other.jsonl, line 1: there is no column `response`; expected a text" in done.stderr
    assert not (tmp_path / "runs").exists()


def spoil(model: Path) -> None:
    """Write a NaN into one weight of a checkpoint."""
    weights = load_file(model / "model.safetensors")
    weights["model.layers.0.mlp.up_proj.weight"][0, 0] = float("nan")
    save_file(weights, model / "model.safetensors", {"format": "pt"})


@pytest.mark.slow  # test_skipped_updates.py has it without a run, test_driver_skipped.py without a trainer
def test_a_run_ends_when_too_many_updates_are_not_finite(recipe, tmp_path: Path):
    file = recipe()
    spoil(tmp_path / "model")
    done = slipstream_sft(file, "run.max_skipped_updates=1")
    assert done.returncode == 1
    assert "step 1: the update of the policy for mini-batch 1 was skipped" in done.stderr
    assert "trajectory 0 of the batch (group 0): log-prob, loss" in done.stderr
    assert "2 optimizer updates were skipped" in done.stderr
    records = [json.loads(line) for line in (tmp_path / "runs/sft/metrics.jsonl").read_text().splitlines()]
    assert [record.get("train/skipped_updates") for record in records if "train/lr" in record] == [1, 1]
    assert "was skipped" in (tmp_path / "runs/sft/logs/trainer-0.log").read_text()


@pytest.mark.slow
def test_weights_that_are_not_finite_reach_no_checkpoint(recipe, tmp_path: Path):
    file = recipe(checkpoint={"every": 1})
    spoil(tmp_path / "model")
    done = slipstream_sft(file)
    assert done.returncode == 1
    assert "starting a checkpoint failed: numbers of the checkpoint are not finite" in done.stderr
    assert "decoder.layers.0.mlp.linear_fc1.weight" in done.stderr
    assert not [path for path in (tmp_path / "runs/sft/checkpoints").rglob("*") if path.is_file()]
