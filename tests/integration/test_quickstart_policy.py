"""The quickstart's preparation, with a warm start of a few steps."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from backend import quickstart
from backend.quickstart import policy as policies
from backend.quickstart import task
from backend.quickstart.tokenizer import ASSISTANT, build_tokenizer, demonstration_text

STEPS = 4


def prepare(directory: Path, say: Callable[[str], None] = lambda line: None) -> tuple[Path, Path, Path]:
    parts = directory / "model", directory / "train.jsonl", directory / "held_out.jsonl"
    quickstart.prepare(*parts, say=say, warm_start_steps=STEPS)
    return parts


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path]:
    return prepare(tmp_path_factory.mktemp("quickstart"))


def test_the_checkpoint_loads_with_transformers_and_stops_at_the_end_token(parts: tuple[Path, Path, Path]):
    model_path = parts[0]
    policy = AutoModelForCausalLM.from_pretrained(model_path)
    tokenizer = AutoTokenizer.from_pretrained(model_path)
    assert (model_path / "model.safetensors").exists()
    assert policy.config.model_type == "qwen3"
    assert policy.dtype == torch.float32
    assert policy.config.tie_word_embeddings
    assert policy.config.max_position_embeddings >= 256
    assert policy.generation_config.eos_token_id == tokenizer.eos_token_id == 1
    assert policy.config.vocab_size == len(tokenizer)


def test_the_two_sets_are_disjoint_and_each_label_is_the_sum(parts: tuple[Path, Path, Path]):
    train, held_out = ([json.loads(line) for line in path.read_text().splitlines()] for path in parts[1:])
    assert len(train) == quickstart.TRAIN_PROBLEMS
    assert len(held_out) == quickstart.HELD_OUT_PROBLEMS
    assert not {row["prompt"] for row in train} & {row["prompt"] for row in held_out}
    for row in train + held_out:
        assert row["label"] == str(sum(task.operands_of(row["prompt"])) % 10)


def test_the_same_seed_gives_the_same_weights(parts: tuple[Path, Path, Path], tmp_path: Path):
    again = prepare(tmp_path)
    assert (again[0] / "model.safetensors").read_bytes() == (parts[0] / "model.safetensors").read_bytes()
    assert [path.read_text() for path in again[1:]] == [path.read_text() for path in parts[1:]]


def test_parts_that_exist_are_kept_and_missing_ones_are_made(tmp_path: Path):
    parts = tmp_path / "model", tmp_path / "train.jsonl", tmp_path / "held_out.jsonl"
    for path in parts[:2]:
        path.write_text("mine")
    quickstart.prepare(*parts, say=lambda line: None)
    assert [path.read_text() for path in parts[:2]] == ["mine", "mine"]
    assert len(parts[2].read_text().splitlines()) == quickstart.HELD_OUT_PROBLEMS


def test_an_interrupted_preparation_leaves_nothing(tmp_path: Path):
    def interrupt(line: str) -> None:
        if "loss" in line:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare(tmp_path, say=interrupt)
    assert list(tmp_path.iterdir()) == []


def test_equal_paths_are_refused(tmp_path: Path):
    with pytest.raises(ValueError, match="three different paths"):
        quickstart.prepare(tmp_path / "model", tmp_path / "a.jsonl", tmp_path / "a.jsonl")


def test_the_loss_covers_the_response_and_its_end_token_only():
    tokenizer = build_tokenizer()
    texts = [demonstration_text("a1b2", "a11b23#3"), demonstration_text("a1b2c3", "a1")]
    batch = tokenizer(texts, padding=True, padding_side="right", return_tensors="pt")
    assistant = tokenizer.convert_tokens_to_ids(ASSISTANT)
    labels_BT = policies.response_labels(batch["input_ids"], assistant, tokenizer.pad_token_id)
    kept = [row[row != policies.IGNORED] for row in labels_BT]
    assert [tokenizer.decode(row) for row in kept] == ["a11b23#3<eos>", "a1<eos>"]


def test_chunks_sorted_by_length_give_the_gradient_of_the_whole_batch():
    tokenizer = build_tokenizer()
    policy = policies.build_policy(tokenizer, seed=0)
    prompts = [problem.prompt for problem in task.train_set(seed=0, count=10)]
    texts = [demonstration_text(prompt, task.gold_demonstration(prompt)) for prompt in prompts]
    batch = tokenizer(texts, padding=True, padding_side="right", return_tensors="pt")
    assistant = tokenizer.convert_tokens_to_ids(ASSISTANT)
    labels_BT = policies.response_labels(batch["input_ids"], assistant, tokenizer.pad_token_id)

    expected = policy(**batch, labels=labels_BT).loss  # transformers' own shift and mean over kept tokens
    expected.backward()
    gradients = [parameter.grad.clone() for parameter in policy.parameters()]
    policy.zero_grad()
    loss = policies.accumulate_gradient(policy, tokenizer, texts)

    assert loss == pytest.approx(expected.item(), rel=1e-5)
    for parameter, gradient in zip(policy.parameters(), gradients, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-4, atol=1e-6)


def test_the_learning_rate_rises_stays_and_falls():
    scales = [policies.lr_scale(step, 300) for step in range(300)]
    peak = scales.index(1.0)
    assert scales[: peak + 1] == sorted(scales[: peak + 1])
    assert scales[peak:] == sorted(scales[peak:], reverse=True)
    assert scales[-1] == pytest.approx(policies.FLOOR_LR, abs=0.01)
