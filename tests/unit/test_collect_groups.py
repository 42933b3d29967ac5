"""One group, from its slot to ready, filtered or failed; its episodes, their attempts and their rewards."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from slipstream.configs.schema import SamplingConfig
from slipstream.configs.schema.rollout import RolloutConfig
from slipstream.rollout.collect.episodes import Episodes
from slipstream.rollout.collect.gate import AdmissionGate
from slipstream.rollout.collect.groups import GroupCollector, NamedFilter
from slipstream.rollout.collect.intake import Intake
from slipstream.rollout.collect.journal import NoJournal
from slipstream.rollout.collect.running import RunningGroups
from slipstream.rollout.collect.time_limit import TimeLimit
from slipstream.rollout.control.core import Loss, RolloutControl
from slipstream.rollout.control.slots import State
from slipstream.rollout.ledger.recovery import OpenGroup
from slipstream.rollout.prompts import PromptStream
from slipstream.rollout.trajectory import Finish, Group, Prompt, Trajectory
from slipstream.rollout.workflow import WorkflowContext
from tests.unit.doubles import Listener

SAMPLES = 3


def trajectory(reward: float | None = None) -> Trajectory:
    tokens = np.zeros(2, np.int64)
    return Trajectory(
        tokens, tokens == 0, np.zeros(2, np.float32), np.zeros(2, np.int32), Finish.STOP, reward=reward
    )


@dataclass
class Scripted:
    """A workflow whose n-th start does what the n-th entry says: gives a reward, raises, or waits first."""

    script: list[Any]
    starts: int = 0

    async def run(self, prompt: Prompt, context: WorkflowContext) -> Trajectory:
        entry = self.script[self.starts]
        self.starts += 1
        if isinstance(entry, asyncio.Event):
            await entry.wait()
            entry = 1.0
        if isinstance(entry, Exception):
            raise entry
        judged = await context.reward.score(prompt, str(entry), trajectory())
        return replace(trajectory(), reward=judged)


@dataclass
class Parses:
    """The reward that the response names."""

    on_score: Callable[[], None]

    async def score(self, prompt: Prompt, response: str, trajectory: Trajectory) -> float:
        self.on_score()
        return float(response)


@dataclass
class Written(NoJournal):
    """Remembers which trajectories were written."""

    trajectories: list[int] = field(default_factory=list)

    def trajectory(self, group_id: int, sample: int, trajectory: Trajectory) -> None:
        self.trajectories.append(sample)


class World:
    """A gate with room for a group, and a collector over a scripted workflow."""

    def __init__(
        self,
        script: list[Any],
        *,
        attempts: int = 1,
        keep: Callable[[Group], bool] | None = None,
        on_score: Callable[[], None] = lambda: None,
    ) -> None:
        rollout = RolloutConfig.model_validate(
            {
                "max_head_offpolicyness": 0,
                "batch_size": 1,
                "n_samples_per_prompt": SAMPLES,
                "reward": "my.Reward",
                "episode_attempts": attempts,
            }
        )
        self.workflow, self.listener, self.journal = Scripted(script), Listener(), Written()
        self.core = RolloutControl(1, 0)
        prompts = PromptStream([Prompt(0, "?")], shuffle=False, seed=0)
        self.gate = AdmissionGate(self.core, Intake(prompts), self.journal, self.listener, RunningGroups())
        nothing: Any = None
        group_filter: Any = type("Filter", (), {"keep": staticmethod(keep)})() if keep else None
        self.collector = GroupCollector(
            gate=self.gate,
            journal=self.journal,
            engines=nothing,
            context=WorkflowContext(nothing, nothing, Parses(on_score), SamplingConfig()),
            episodes=Episodes(self.workflow, rollout, TimeLimit(60), self.listener),
            samples=SAMPLES,
            group_filter=NamedFilter("my.Filter", group_filter) if group_filter else None,
        )

    def collect(self, **prior: Any) -> None:
        async def main() -> None:
            assignment = await self.gate.slot()
            await self.collector.collect(replace(assignment, **prior))

        asyncio.run(main())

    @property
    def state(self) -> State:
        """The state of the only group."""
        [state] = [state for state, count in self.core.states.items() if count]
        return state

    @property
    def ready(self) -> int:
        return self.core.states[State.READY]


def test_a_group_whose_episodes_all_end_is_ready_and_in_the_journal():
    world = World([1, 0.5, -2])
    world.collect()
    assert world.ready == 1
    assert sorted(world.journal.trajectories) == [0, 1, 2]
    [group] = asyncio.run(world.gate.batch(1))
    assert sorted(group.rewards.tolist()) == [-2.0, 0.5, 1.0]


def test_an_episode_that_fails_is_tried_again():
    world = World([1, RuntimeError("no"), 1, 0.25], attempts=2)
    world.collect()
    assert world.ready == 1
    assert world.listener.failures == [(0, 1, "no")]


def test_a_group_fails_with_the_episode_that_has_no_attempt_left_and_says_what_was_finished():
    world = World([1, 0.5, ValueError("broken"), ValueError("for good")], attempts=2)
    world.collect()
    assert (world.ready, world.core.counts.failed) == (0, 1)
    [(loss, finished)] = world.listener.losses
    assert loss is Loss.FAILED
    assert sorted(trajectory.reward for trajectory in finished) == [0.5, 1.0]
    assert [text for _, _, text in world.listener.failures] == ["broken", "for good"]


def test_a_reward_that_is_no_number_is_a_failed_attempt():
    world = World(["nan", 1, 1, 1], attempts=2)
    world.collect()
    assert world.ready == 1
    assert "gave the reward nan" in world.listener.failures[0][2]


def test_a_group_that_the_filter_rejects_is_lost_with_its_trajectories():
    world = World([1, 1, 1], keep=lambda group: False)
    world.collect()
    assert (world.ready, world.core.counts.filtered) == (0, 1)
    [(loss, trajectories)] = world.listener.losses
    assert (loss, len(trajectories)) == (Loss.FILTERED, SAMPLES)


def test_a_filter_that_raises_fails_the_group_and_is_named():
    def keep(group: Group) -> bool:
        raise KeyError("label")

    world = World([1, 1, 1], keep=keep)
    world.collect()
    assert world.core.counts.failed == 1
    assert "my.Filter: KeyError: 'label'" in world.gate._last_failure


def test_trajectories_from_before_a_restart_are_not_generated_again():
    world = World([0.5])
    prior = OpenGroup(0, 0, False, trajectories={0: trajectory(1.0), 2: trajectory(0.0)})
    world.collect(prior=prior)
    assert world.workflow.starts == 1
    [group] = asyncio.run(world.gate.batch(1))
    assert group.rewards.tolist() == [1.0, 0.5, 0.0]
    assert world.journal.trajectories == [1]


def test_a_group_is_judging_once_its_last_episode_asks_for_the_reward():
    seen: list[State] = []

    async def main() -> None:
        last = asyncio.Event()
        world = World([1, 1, last], on_score=lambda: seen.append(world.state))
        collecting = asyncio.create_task(world.collector.collect(await world.gate.slot()))
        for _ in range(20):
            await asyncio.sleep(0)
        last.set()
        await collecting
        assert world.ready == 1

    asyncio.run(main())
    assert seen == [State.GENERATING, State.GENERATING, State.JUDGING]
