"""Credit of turns, from what an environment says to the advantage of each token, beside figures by hand."""

import asyncio
from dataclasses import dataclass

import pytest

from slipstream.configs.schema import ActorConfig, TurnsConfig
from slipstream.rollout.tokens.trajectory import Prompt, Trajectory
from slipstream.rollout.workflow import MultiTurn
from slipstream.rollout.workflow.environment import Action, Step
from tests.chat_model import build_tokenizer
from tests.unit.test_multi_turn import context
from tests.unit.test_trainer_live_turns import advantages

WORDS = ("a", "bcd", "ef")
"""What the policy says in each turn."""
FIRST, SECOND = (1.0, 0.0, 4.0), (2.0, 1.0)
"""Rewards of the turns of two episodes of a group, whose own rewards are 1 and 0."""


@dataclass
class Rewarding:
    """Rewards the turns of an episode, and ends with the last one."""

    async def reset(self, prompt: Prompt):
        self._rewards = list(prompt.metadata["rewards"])
        return prompt.messages()

    async def step(self, action: Action) -> Step:
        reward = self._rewards.pop(0)
        return Step([{"role": "tool", "content": "seen"}], reward=reward, is_done=not self._rewards)

    async def close(self) -> None: ...


def episode(rewards: tuple[float, ...], reward: float) -> Trajectory:
    surroundings, _ = context(build_tokenizer(), WORDS)
    workflow = MultiTurn(f"{__name__}.Rewarding")
    prompt = Prompt(0, "go", None, {"rewards": rewards})
    return asyncio.run(workflow.run(prompt, surroundings)).judged(reward)


def by_turn(settings: TurnsConfig) -> list[list[float]]:
    """Return the advantage of each turn of both episodes. All tokens of a turn must have the same."""
    episodes = [episode(FIRST, 1.0), episode(SECOND, 0.0)]
    given = advantages(ActorConfig(turns=settings), episodes, [8, 8])
    turns: list[list[float]] = []
    for number, rewards in enumerate((FIRST, SECOND)):
        lengths = [len(word) + 1 for word in WORDS[: len(rewards)]]  # with the token that ends a turn
        left = given[number]
        assert len(left) == sum(lengths), "no token of a tool or of the template has an advantage"
        turns.append([])
        for length in lengths:
            [advantage] = set(left[:length])
            turns[-1].append(advantage)
            left = left[length:]
    return turns


def test_a_turn_gets_its_reward_and_the_discounted_ones_behind_it():
    settings = TurnsConfig(baseline="none", discount=0.5, reward_coefficient=0.0)
    first, second = by_turn(settings)
    assert first == [1 + 0 / 2 + 4 / 4, 0 + 4 / 2, 4]
    assert second == [2 + 1 / 2, 1]


def test_without_a_discount_each_turn_gets_all_rewards_behind_it_and_the_episodes_beside_them():
    """The rewards 1 and 0 of two episodes have the mean 1/2 and the standard deviation 1 / sqrt(2)."""
    settings = TurnsConfig(baseline="none", coefficient=2.0, reward_coefficient=3.0)
    first, second = by_turn(settings)
    grpo = 3 * 0.5**0.5
    assert first == pytest.approx([grpo + 10, grpo + 8, grpo + 8], abs=1e-5)
    assert second == pytest.approx([-grpo + 6, -grpo + 2], abs=1e-5)


def test_turns_of_a_group_are_each_others_baseline():
    """The five rewards have the mean 1.6, and squares of deviations of 9.2 together."""
    first, second = by_turn(TurnsConfig(baseline="group", discount=0.5, reward_coefficient=0.0))
    deviation = (9.2 / 4) ** 0.5
    a, b, c, d, e = ((reward - 1.6) / deviation for reward in (*FIRST, *SECOND))
    assert first == pytest.approx([a + b / 2 + c / 4, b + c / 2, c], abs=1e-5)
    assert second == pytest.approx([d + e / 2, e], abs=1e-5)
