"""Evaluation episodes: every question that the driver has not withdrawn is answered, come what may."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import pytest

from slipstream.backend.simulate import clock
from slipstream.configs.schema import RolloutConfig
from slipstream.rollout.collection.collector.episodes import Episodes, check
from slipstream.rollout.collection.collector.evaluation import Evaluations, UnrecordedGenerator
from slipstream.rollout.collection.collector.groups import CLOSE_TIMEOUT_S
from slipstream.rollout.collection.collector.outbox import Outbox
from slipstream.rollout.collection.messages import Evaluated, Question
from slipstream.rollout.engine.engine_pool import NoEngine
from slipstream.rollout.reward.judge.judge_errors import JudgesClosed, JudgeStartFailed, JudgingFailed
from slipstream.rollout.reward.value import Judgement
from slipstream.rollout.system.time_limit import TimeLimit
from slipstream.rollout.tokens.trajectory import Prompt, Trajectory, TrajectoryBuilder
from slipstream.rollout.workflow import WorkflowContext
from slipstream.rollout.workflow.multi_turn import OnLimit, limited
from slipstream.rollout.workflow.numbers import EpisodeNumbers
from tests.unit.collecting import SAMPLING, HoldingDriver, PureEngines, ideal

PROMPT = Prompt(7, "what?")


class Greedy(PureEngines):
    """Engines that must be asked greedily."""

    async def generate(self, input_ids, sampling, completion, *, greedy=False, grown=None) -> None:
        assert greedy
        assert grown is None
        await super().generate(input_ids, sampling, completion)


@dataclass
class World:
    """Evaluations whose workflow asks once, after it has done what ``first`` says."""

    first: Callable[[], Any] | None = None
    judged: Callable[[], Any] = lambda: 0.5
    reward: Any = None
    on_limit: OnLimit = "train"
    driver: HoldingDriver = field(default_factory=HoldingDriver)
    outbox: Outbox = field(default_factory=Outbox)
    numbers: list[EpisodeNumbers] = field(default_factory=list)
    """Those of each attempt."""

    def __post_init__(self) -> None:
        rollout = RolloutConfig.model_validate(
            {
                "max_head_offpolicyness": 0,
                "batch_size": 1,
                "n_samples_per_prompt": 1,
                "reward": "my.Reward",
                "episode_attempts": 2,
            }
        )
        nothing: Any = None
        checking = partial(check, vocab_size=100, workflow="my.Flow")
        episodes = Episodes(self, rollout, checking, TimeLimit(60), self.outbox.attempt_failed)
        context = WorkflowContext(UnrecordedGenerator(Greedy(), greedy=True), nothing, nothing, SAMPLING)
        self.evaluations = Evaluations(self.outbox, context, episodes, self)

    async def run(self, prompt: Prompt, context: WorkflowContext) -> Trajectory:
        assert prompt == PROMPT
        self.numbers.append(context.numbers)
        if self.first is not None:
            await self.first()
        builder = TrajectoryBuilder([1])
        builder.add_completion(await context.generator.generate([1], context.sampling))
        return limited(replace(builder.build(), reward=self.reward), self.on_limit)

    @property
    def of_groups(self) -> bool:
        return False

    async def judge_group(self, prompt: Prompt, trajectories: Any) -> list[Judgement]:
        raise AssertionError

    async def judge(self, prompt: Prompt, trajectory: Trajectory) -> Judgement:
        await asyncio.sleep(1)
        outcome = self.judged()
        if isinstance(outcome, BaseException):
            raise outcome
        return Judgement(outcome)

    def ask(self, during: Callable[[], None] = lambda: None) -> list[Evaluated]:
        """Ask question 4, and return the answers."""

        async def main() -> None:
            before = asyncio.all_tasks()
            async with self.driver.hearing(self.outbox):
                self.evaluations.start(Question(4, PROMPT))
                await asyncio.sleep(0.5)
                during()
                await asyncio.sleep(1000)
            assert asyncio.all_tasks() == before

        clock.run(main())
        return self.driver.evaluated


def raises(error: BaseException) -> Callable[[], Any]:
    async def raising() -> None:
        raise error

    return raising


LENGTH = len(ideal([1], 12))


@pytest.mark.parametrize("reward", [None, 0.5])
def test_an_episode_is_judged_unless_its_workflow_has_done_so(reward):
    world = World(reward=reward, judged=lambda: 0.5 if reward is None else JudgingFailed("asked"))
    assert world.ask() == [Evaluated(4, 0.5, LENGTH, "")]


@pytest.mark.parametrize("on_limit", ["mask", "drop"])
def test_an_episode_that_a_limit_keeps_from_training_is_judged_with_its_whole_length(on_limit):
    assert World(on_limit=on_limit).ask() == [Evaluated(4, 0.5, LENGTH, "")]


@pytest.mark.parametrize(
    ("world", "says"),
    [
        (World(raises(ValueError("broken"))), ": ValueError: broken"),
        (World(judged=lambda: JudgingFailed("in every attempt")), "in every attempt"),
        (World(judged=lambda: JudgesClosed("the judges are gone")), "JudgesClosed: the judges are gone"),
        (World(judged=lambda: ZeroDivisionError("a bug")), "ZeroDivisionError: a bug"),
        (World(judged=lambda: asyncio.CancelledError()), "the workflow has cancelled itself"),
        (World(raises(asyncio.CancelledError("mine"))), ": CancelledError: mine"),
    ],
)
def test_an_episode_that_fails_is_answered_without_a_reward(world, says):
    """A run would wait for ever for a question that nobody answers."""
    [result] = world.ask()
    assert (result.task, result.reward, result.response_length) == (4, None, 0)
    assert says in result.note


def test_each_attempt_begins_without_numbers():
    world = World(raises(ValueError("broken")))
    world.ask()
    first, second = world.numbers
    assert first is not second


@pytest.mark.parametrize("error", [NoEngine("no engine"), JudgeStartFailed("no judge")])
@pytest.mark.parametrize("where", ["first", "judged"])
def test_what_nothing_here_can_mend_ends_the_run(error, where):
    world = World(raises(error)) if where == "first" else World(judged=lambda: error)
    assert world.ask() == []
    assert world.driver.fatal == [str(error)]


def test_a_question_that_is_withdrawn_is_not_answered():
    world = World()
    assert world.ask(lambda: world.evaluations.withdraw(4)) == []


def test_nor_if_its_workflow_makes_something_else_of_its_cancellation():
    async def converts() -> None:
        try:
            await asyncio.sleep(100)
        except asyncio.CancelledError:
            raise ValueError("cancelled") from None

    world = World(converts)
    assert world.ask(lambda: world.evaluations.withdraw(4)) == []
    assert not world.driver.failed


def test_withdrawing_what_is_answered_or_unknown_does_nothing():
    world = World()

    def during() -> None:
        world.evaluations.withdraw(9)
        asyncio.get_running_loop().call_later(500, world.evaluations.withdraw, 4)

    assert len(world.ask(during)) == 1


def test_closing_gives_up_everything_and_waits_no_longer_than_it_says():
    gone = asyncio.Event()

    async def stays() -> None:
        while not gone.is_set():
            try:
                await asyncio.sleep(1)
            except asyncio.CancelledError:
                continue

    async def main() -> None:
        world = World(stays)
        async with world.driver.hearing(world.outbox):
            world.evaluations.start(Question(4, PROMPT))
            await asyncio.sleep(1)
            began = asyncio.get_running_loop().time()
            await world.evaluations.close()
            assert asyncio.get_running_loop().time() - began == CLOSE_TIMEOUT_S
            gone.set()
            await asyncio.sleep(10)
        assert not world.driver.evaluated

    clock.run(main())


def test_a_reward_of_numpy_arrives_as_a_number():
    assert World(reward=np.float32(0.5)).ask() == [Evaluated(4, 0.5, LENGTH, "")]
