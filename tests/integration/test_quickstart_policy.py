"""The quickstart's preparation, with a warm start of a few steps."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from slipstream.backend import quickstart
from slipstream.backend.quickstart import task
from slipstream.backend.quickstart.policy import build_policy
from slipstream.backend.quickstart.tokenizer import build_tokenizer
from slipstream.backend.quickstart.warm_start import FLOOR_LR, PEAK_LR, encoded, recipe
from slipstream.backend.trainer.learning_rate import learning_rate

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
    assert list(model_path.glob("*.safetensors"))
    assert policy.config.model_type == "qwen3"
    assert policy.dtype == torch.float32
    assert policy.config.tie_word_embeddings
    assert policy.config.max_position_embeddings >= 256
    assert policy.generation_config.eos_token_id == tokenizer.eos_token_id == 1
    assert policy.config.vocab_size == len(tokenizer)


def test_the_policy_has_the_width_that_was_asked_for():
    config = build_policy(build_tokenizer(), seed=0, hidden=48).config
    assert (config.hidden_size, config.intermediate_size, config.head_dim) == (48, 96, 12)
    with pytest.raises(ValueError, match="hidden is 100; expected a positive multiple of 8"):
        build_policy(build_tokenizer(), seed=0, hidden=100)


def test_the_two_sets_are_disjoint_and_each_label_is_the_sum(parts: tuple[Path, Path, Path]):
    train, held_out = ([json.loads(line) for line in path.read_text().splitlines()] for path in parts[1:])
    assert len(train) == quickstart.TRAIN_PROBLEMS
    assert len(held_out) == quickstart.HELD_OUT_PROBLEMS
    assert not {row["prompt"] for row in train} & {row["prompt"] for row in held_out}
    for row in train + held_out:
        assert row["label"] == str(sum(task.operands_of(row["prompt"])) % 10)


def weights(model_path: Path) -> list[bytes]:
    return [file.read_bytes() for file in sorted(model_path.glob("*.safetensors"))]


def test_the_same_seed_gives_the_same_weights(parts: tuple[Path, Path, Path], tmp_path: Path):
    again = prepare(tmp_path)
    assert weights(again[0]) == weights(parts[0])
    assert [path.read_text() for path in again[1:]] == [path.read_text() for path in parts[1:]]


def test_parts_that_exist_are_kept_and_missing_ones_are_made(tmp_path: Path):
    parts = tmp_path / "model", tmp_path / "train.jsonl", tmp_path / "held_out.jsonl"
    for path in parts[:2]:
        path.write_text("mine")
    quickstart.prepare(*parts, say=lambda line: None)
    assert [path.read_text() for path in parts[:2]] == ["mine", "mine"]
    assert len(parts[2].read_text().splitlines()) == quickstart.HELD_OUT_PROBLEMS


def test_a_run_that_reads_no_prompts_gets_a_policy_alone(tmp_path: Path):
    """As does `slipstream serve`, which leaves the prompts of a recipe out."""
    quickstart.prepare(tmp_path / "model", say=lambda line: None, warm_start_steps=STEPS)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_an_interrupted_preparation_leaves_nothing(tmp_path: Path):
    def interrupt(line: str) -> None:
        if "parameters" in line:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare(tmp_path, say=interrupt)
    assert list(tmp_path.iterdir()) == []


def test_equal_paths_are_refused(tmp_path: Path):
    with pytest.raises(ValueError, match="three different paths"):
        quickstart.prepare(tmp_path / "model", tmp_path / "a.jsonl", tmp_path / "a.jsonl")


def test_a_demonstration_is_the_prompt_as_rl_sends_it_and_the_response_with_its_end():
    tokenizer = build_tokenizer()
    messages = task.conversation("a1b2", "a11b23#3", "c4", "c47#7")
    turns = encoded(tokenizer, [messages])
    assert [tokenizer.decode(response) for _, response in turns] == ["a11b23#3<eos>", "c47#7<eos>"]
    for (prompt, _), place in zip(turns, (1, 3), strict=True):
        before = messages[:place]
        assert prompt == tokenizer.apply_chat_template(before, add_generation_prompt=True, return_dict=False)


def test_the_learning_rate_rises_stays_and_falls():
    optimizer = recipe(Path("start"), seed=0, steps=300).actor.optimizer
    rates = [learning_rate(optimizer, step, run_steps=300) for step in range(300)]
    peak = rates.index(PEAK_LR)
    assert rates[: peak + 1] == sorted(rates[: peak + 1])
    assert rates[peak:180] == [PEAK_LR] * (180 - peak)
    assert rates[180:] == sorted(rates[180:], reverse=True)
    assert rates[-1] == pytest.approx(FLOOR_LR * PEAK_LR, abs=0.01 * PEAK_LR)
