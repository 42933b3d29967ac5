"""Hooks that see whole batches run in a process of their own, which their time limit ends."""

import asyncio
import os
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from slipstream.backend.batch.train_batch import EncodedBatch
from slipstream.backend.driver.loops.hooked_batches import HookedBatches, records_of, with_training_data
from slipstream.backend.quickstart.tokenizer import build_tokenizer
from slipstream.configs.schema import RunConfig
from slipstream.rollout.collection.driver.collected_group import CollectedGroup
from slipstream.rollout.system.linux import children_of
from slipstream.rollout.system.programs.hook_process import HookProcessFailed
from slipstream.rollout.tokens.evaluated_set import EvaluatedSet
from slipstream.rollout.tokens.record import encode_trajectory
from slipstream.rollout.tokens.trajectory import UNSAMPLED, Finish, Prompt, Trajectory, joined
from tests.unit.collecting import ready_group

HOOKS = "tests.unit.slime_batch_hooks"


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    build_tokenizer().save_pretrained(folder)
    return folder


def config(model: Path, hooks: dict[str, str], timeout_s: float = 60) -> RunConfig:
    named = {setting: f"{HOOKS}.{name}" for setting, name in hooks.items()}
    return RunConfig.model_validate(
        {
            "run": {"name": "test", "steps": 1},
            "model": {"path": str(model)},
            "data": {"path": "unused.jsonl"},
            "rollout": {
                "max_head_offpolicyness": 4,
                "batch_size": 2,
                "n_samples_per_prompt": 2,
                "hooks": {**named, "batch_timeout_s": timeout_s},
            },
        }
    )


def trajectory(seed: int, length: int, finish: Finish = Finish.STOP) -> Trajectory:
    sampled_T = np.arange(3 + length) >= 3
    return Trajectory(
        np.random.default_rng(seed).integers(4, 30, 3 + length),
        sampled_T,
        np.where(sampled_T, -1.5, 0).astype(np.float32),
        np.where(sampled_T, 2, UNSAMPLED).astype(np.int32),
        finish,
        reward=float(seed),
        metrics=(("drops", float(seed)),),
    )


EPISODES = (
    trajectory(1, 4),
    trajectory(2, 3, Finish.LENGTH),
    joined([trajectory(3, 5), trajectory(3, 2)]),
    trajectory(4, 6),
)
"""Of two groups; the third has two trajectories."""


def made() -> tuple[EncodedBatch, list[CollectedGroup], SimpleNamespace]:
    """Return a batch, its groups, and what the hooks ask the step."""
    chunks = [encode_trajectory(episode) for episode in EPISODES]
    headers = [episode.header for episode in EPISODES]
    groups = [
        ready_group(id_, *own, prompt=Prompt(id_, f"what is {id_}?", label=str(id_)))
        for id_, own in ((7, headers[:2]), (9, headers[2:]))
    ]
    batch = EncodedBatch(
        2,
        tuple(episode.header for episode in EPISODES),
        np.frombuffer(b"".join(chunks), np.uint8),
        tuple(map(len, chunks)),
        np.array([7, 7, 9, 9]),
    )
    return batch, groups, 5


def limit_of(name: str) -> float:
    return 3 if name == "hangs" else 60


def run(model: Path, tmp_path: Path, hooks: dict[str, str], use, timeout_s: float = 60):
    """Return the result of ``use(hooked, batch, groups, step)``, and the notes."""
    notes: list[str] = []

    async def course():
        recipe = config(model, hooks, timeout_s)
        hooked = HookedBatches(
            recipe.rollout.hooks, recipe.model_dump_json().encode(), tmp_path, notes.append
        )
        try:
            return await use(hooked, *made())
        finally:
            await hooked.close()

    before = set(children_of(os.getpid()))
    result = asyncio.run(course())
    assert set(children_of(os.getpid())) <= before
    return result, notes


async def begun(hooked, batch, groups, step):
    return await hooked.begin(batch, groups, step, 1.5)


def test_rewards_of_a_hook_are_the_advantages_of_its_samples(model, tmp_path):
    batch, _ = run(model, tmp_path, {"custom_reward_post_process": "halves"}, begun)
    assert batch.given_rewards == (1.0, 1.0, 3.0, 3.0, 4.0)
    decoded = batch.decoded()
    assert decoded.given_rewards == batch.given_rewards
    assert [t.response_length for t in decoded.trajectories] == [4, 3, 5, 2, 6]


def test_training_data_may_take_loss_away(model, tmp_path):
    batch, _ = run(model, tmp_path, {"custom_convert_samples_to_train_data": "train_data"}, begun)
    assert batch.given_rewards == (14.0, 15.0, 18.0, 18.0, 19.0)
    decoded = batch.decoded()
    assert [t.response_length for t in decoded.trajectories] == [4, 1, 5, 1, 6]
    assert [t.loss_mask_T.tolist().index(True) for t in decoded.trajectories] == [3] * 5


def test_live_trajectories_keep_what_they_have():
    batch, groups, _ = made()
    records = records_of(batch, groups[:1])
    assert [record.group for record in records] == [7, 7]
    data = SimpleNamespace(rewards=[1.0, 2.0], masks=[[1, 1, 1, 1], [0, 0, 0]])
    decoded = with_training_data(batch, data).decoded()
    assert decoded.given_rewards == (1.0, 2.0, 0.0, 0.0, 0.0)
    assert [t.response_length for t in decoded.trajectories] == [4, 0, 5, 2, 6]


def test_hooks_that_log_say_whether_ours_is_needed(model, tmp_path):
    async def twice(hooked, batch, groups, step):
        answers = []
        for _ in range(2):  # the second call finds what the first has left in the process
            assert await hooked.begin(batch, groups, step, 1.5) is batch
            answers.append(await hooked.has_logged())
        prompts = [Prompt(0, "a", label="b"), Prompt(1, "c")]
        held_out = EvaluatedSet("held_out", [1.0, 0.0], [3, 8], [False, True], prompts)
        return [*answers, await hooked.has_logged_evaluation(4, [held_out], {"eval/reward": 0.5})]

    hooks = {"custom_rollout_log_function": "logs", "custom_eval_rollout_log_function": "logs_evaluation"}
    answers, notes = run(model, tmp_path, hooks, twice)
    assert answers == [True, False, True] and not notes
    assert "logged (5, 5, " in (tmp_path / "hooks.log").read_text()


def test_a_hook_that_logs_and_ends_its_process_is_a_note(model, tmp_path):
    async def begins(hooked, batch, groups, step):
        answers = []
        for _ in range(2):  # a process that has ended is started again
            assert await hooked.begin(batch, groups, step, 1.5) is batch
            answers.append(await hooked.has_logged())
        return answers

    answers, notes = run(model, tmp_path, {"custom_rollout_log_function": "exits"}, begins)
    assert answers == [False, False] and len(notes) == 2
    assert all("has ended" in note and "Slipstream logs its own" in note for note in notes)


WRONG = {
    "raises": "has raised KeyError: 'no such key'",
    "too_few": "gives the rewards of 1 samples, expected those of 5",
    "not_numbers": "gives the rewards that are not finite",
    "one_list": "expected (raw rewards, rewards)",
    "other_tokens": "changes tokens[0]",
    "nothing_trained": "nothing would be trained",
    "without_rewards": "without rewards",
}
OF_DATA = ("other_tokens", "nothing_trained", "without_rewards")


async def refused(hooked, batch, groups, step) -> str:
    with pytest.raises(HookProcessFailed) as raised:
        await begun(hooked, batch, groups, step)
    return str(raised.value)


@pytest.mark.parametrize("setting", ["custom_reward_post_process", "custom_convert_samples_to_train_data"])
def test_what_is_no_training_data_is_an_error_by_the_name_of_the_hook(model, tmp_path, setting):
    names = [name for name in WRONG if (name in OF_DATA) == ("convert" in setting)]

    async def all_refused(hooked, batch, groups, step):
        errors = []
        for name in names:  # the process outlives an error
            for group in groups:
                group.prompt = Prompt(group.id, "?", label=name)
            errors.append(await refused(hooked, batch, groups, step))
        return errors

    errors, _ = run(model, tmp_path, {setting: "named_by_label"}, all_refused)
    for name, error in zip(names, errors, strict=True):
        assert error.startswith(f"rollout.hooks.{setting} ({HOOKS}.named_by_label) "), error
        assert WRONG[name] in error, error


GONE = {
    "hangs": "has not returned within 3 s (rollout.hooks.batch_timeout_s)",
    "absent": "cannot be imported",
}


@pytest.mark.parametrize("name", GONE)  # one that ends its process: above
def test_a_hook_that_does_not_answer_is_an_error_by_its_name(model, tmp_path, name):
    error, _ = run(model, tmp_path, {"custom_reward_post_process": name}, refused, limit_of(name))
    assert error.startswith(f"rollout.hooks.custom_reward_post_process ({HOOKS}.{name})"), error
    assert GONE[name] in error
