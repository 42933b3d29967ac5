"""One assigned group: its episodes, their rewards, its filter, its verdict, and every way to end."""

import asyncio
import logging
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.backend.simulate import clock
from slipstream.configs.schema import RolloutConfig, SamplingConfig
from slipstream.rollout.collection.collector.episodes import Episodes
from slipstream.rollout.collection.collector.groups import (
    CLOSE_TIMEOUT_S,
    GroupCollector,
    NamedFilter,
    WholeGroups,
)
from slipstream.rollout.collection.collector.outbox import UNSENT_BYTES, Outbox
from slipstream.rollout.collection.collector.recording import Recording
from slipstream.rollout.collection.messages import (
    ANSWERED,
    FAILED,
    FILTERED,
    JUDGED,
    PIECE,
    TRAIN,
    Assignment,
    PriorSample,
)
from slipstream.rollout.engine.engine_pool import NoEngine
from slipstream.rollout.reward.judge.judge_errors import JudgeStartFailed, JudgingFailed
from slipstream.rollout.reward.value import Judgement
from slipstream.rollout.system.time_limit import TimeLimit
from slipstream.rollout.tokens.teacher import NOTHING_NEEDED, TeacherNeeds, TeacherScores
from slipstream.rollout.tokens.trajectory import Group, Prompt, Trajectory, TrajectoryBuilder
from slipstream.rollout.workflow import GroupRejected, WorkflowContext
from slipstream.rollout.workflow.multi_turn import limited
from tests.tries import tries
from tests.unit.collecting import SAMPLING, HeldSample, HoldingDriver, PureEngines, ideal

PROMPT = Prompt(7, "what?", "label", {"level": 1})


@dataclass
class Flow:
    """Asks once, with token ids of its own for each start. Does what ``script`` says instead, by start."""

    script: dict[int, Any] = field(default_factory=dict)
    starts: int = 0

    async def run(self, prompt: Prompt, context: WorkflowContext) -> Trajectory:
        number, self.starts = self.starts, self.starts + 1
        assert prompt == PROMPT
        act = self.script.get(number)
        if isinstance(act, BaseException):
            await asyncio.sleep(1)
            raise act
        ids = [100 + number] if not callable(act) else (await act(context) or [100 + number])
        builder = TrajectoryBuilder(ids)
        builder.add_completion(await context.generator.generate(ids, context.sampling))
        return builder.build()


@dataclass
class World:
    """A collector of groups between pure engines, a judge and a driver that holds everything."""

    samples: int = 2
    flow: Flow = field(default_factory=Flow)
    attempts: int = 1
    keep: Callable[[Group], object] | None = None
    judged: Callable[[Trajectory], Any] = lambda trajectory: 0.5
    """The reward, which takes a second, or an error that is raised."""
    of_groups: bool = False
    judged_together: Callable[[Sequence[Trajectory]], Any] = lambda trajectories: []
    """The rewards of a group, which take a second, or an error that is raised."""
    groups_asked: list[list[Trajectory]] = field(default_factory=list)
    needs: TeacherNeeds = NOTHING_NEEDED
    engines: Any = field(default_factory=PureEngines)
    driver: HoldingDriver = field(default_factory=HoldingDriver)
    outbox: Outbox = field(default_factory=Outbox)
    questions: list[Trajectory] = field(default_factory=list)

    def __post_init__(self) -> None:
        rollout = RolloutConfig.model_validate(
            {
                "max_head_offpolicyness": 0,
                "batch_size": 1,
                "n_samples_per_prompt": self.samples,
                "reward": "my.Reward",
                "episode_attempts": self.attempts,
            }
        )
        nothing: Any = None
        group_filter: Any = type("Filter", (), {"keep": staticmethod(self.keep)})() if self.keep else None
        episodes = Episodes(self.flow, rollout, lambda t: t, TimeLimit(600), self.outbox.attempt_failed)
        self.groups = GroupCollector(
            outbox=self.outbox,
            record=self._record,
            context=lambda record, place: WorkflowContext(record, nothing, nothing, SAMPLING, place=place),
            episodes=episodes,
            judge=self,
            samples=self.samples,
            group_filter=NamedFilter("my.Filter", WholeGroups(group_filter)) if group_filter else None,
            needs=self.needs,
        )

    def _record(self, group: int, assignment: int, sample: int, attempt: int) -> Recording:
        clock = asyncio.get_running_loop().time
        return Recording(self.engines, self.outbox, group, assignment, sample, clock=clock)

    async def judge(self, prompt: Prompt, trajectory: Trajectory) -> Judgement:
        assert prompt == PROMPT
        self.questions.append(trajectory)
        await asyncio.sleep(1)
        outcome = self.judged(trajectory)
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome if isinstance(outcome, Judgement) else Judgement(outcome)

    async def judge_group(self, prompt: Prompt, trajectories: Sequence[Trajectory]) -> list[Judgement]:
        assert prompt == PROMPT and self.of_groups
        self.groups_asked.append(list(trajectories))
        await asyncio.sleep(1)
        outcome = self.judged_together(trajectories)
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome

    def assign(self, group: int = 0, number: int = 1, *held: HeldSample | None) -> None:
        """Assign a group, of whose samples exists what is ``held``."""
        prior: list[PriorSample] = []
        chunks = b""
        for sample, state in enumerate(held):
            if state is not None:
                each, data = state.prior(sample)
                prior.append(each)
                chunks += data
        self.driver.assignments[group] = number
        self.groups.start(Assignment(group, number, 3, PROMPT, prior), memoryview(chunks))

    @asynccontextmanager
    async def heard(self):
        """Hear everything inside the block, at whose end nothing must be left."""
        before = asyncio.all_tasks()
        async with self.driver.hearing(self.outbox):
            yield
            await self.ended()
            await asyncio.sleep(1)
        assert not len(self.groups)
        assert asyncio.all_tasks() == before

    async def ended(self) -> None:
        async with asyncio.timeout(10_000):
            while len(self.groups):
                await asyncio.sleep(0.5)

    def run(self, *held: HeldSample | None) -> None:
        """Collect one group."""

        async def main() -> None:
            async with self.heard():
                self.assign(0, 1, *held)

        clock.run(main())

    @property
    def verdict(self) -> tuple[int, str]:
        [(group, verdict, note)] = self.driver.verdicts
        assert group == 0
        return verdict, note

    def held(self, sample: int) -> HeldSample:
        return self.driver.samples[0, sample]


# ---- a group that goes well


@pytest.mark.parametrize("samples", [1, 3])
def test_a_group_that_has_ended_leaves_nothing_to_the_search_for_garbage(samples):
    """A process with thousands of episodes searches seldom, and ``clock.run`` never."""
    world = World(samples)

    async def main() -> None:
        async with world.heard():
            world.assign()
            [group] = [weakref.ref(running) for running, _ in world.groups._running.values()]
            assert group() is not None
            await world.ended()
            await asyncio.sleep(1)
            assert group() is None

    clock.run(main())


@pytest.mark.parametrize("samples", [1, 3])
def test_a_group_whose_episodes_all_end_is_to_be_trained_with_all_rewards(samples):
    world = World(samples, judged=lambda trajectory: float(trajectory.tokens_T[0]))
    world.run()
    assert world.verdict == (TRAIN, "")
    assert world.driver.released == samples
    for number in range(samples):
        trajectory = world.held(number).trajectory()
        assert world.held(number).kind == JUDGED
        assert trajectory.tokens_T.tolist() == [100 + number, *ideal([100 + number], 12)]
        assert trajectory.reward == 100 + number


def test_a_trajectory_is_recorded_before_it_is_judged():
    async def main() -> None:
        world = World(1)
        world.judged = lambda trajectory: seen.append(world.held(0).kind) or 0.5
        async with world.heard():
            world.assign()
        assert (seen, world.held(0).kind) == ([ANSWERED], JUDGED)

    seen: list[int] = []
    clock.run(main())


def test_a_workflow_may_give_the_reward_itself():
    class Knows(Flow):
        async def run(self, prompt, context):
            return replace(await super().run(prompt, context), reward=-2.0)

    world = World(2, Knows())
    world.run()
    assert world.verdict[0] == TRAIN
    assert not world.questions
    assert [world.held(number).trajectory().reward for number in range(2)] == [-2.0, -2.0]


@pytest.mark.parametrize("from_workflow", [False, True])
@pytest.mark.parametrize("of_groups", [False, True])
def test_scores_of_a_teacher_that_a_reward_gives_are_recorded_and_replace_those_before(
    from_workflow, of_groups
):
    class Taught(Flow):
        async def run(self, prompt, context):
            trajectory = await super().run(prompt, context)
            everywhere = TeacherScores(np.full(len(trajectory.tokens_T), -9.0, np.float32))
            return replace(trajectory, teacher=everywhere if from_workflow else None)

    def judgement(trajectory: Trajectory) -> Judgement:
        logp_T = np.full(len(trajectory.tokens_T), np.nan, np.float32)
        logp_T[-2:] = -1.5
        return Judgement(0.5, (), TeacherScores(logp_T))

    world = World(2, Taught(), judged=judgement, of_groups=of_groups)
    world.judged_together = lambda trajectories: list(map(judgement, trajectories))
    world.run()
    assert world.verdict == (TRAIN, "")
    for number in range(2):
        teacher = world.held(number).trajectory().teacher
        assert teacher.logp_T[-2:].tolist() == [-1.5, -1.5]
        assert np.isnan(teacher.logp_T[:-2]).all()


def test_scores_of_a_teacher_of_other_tokens_fail_the_group():
    world = World(1, judged=lambda t: Judgement(1.0, (), TeacherScores(np.zeros(3, np.float32))))
    world.run()
    verdict, note = world.verdict
    assert verdict == FAILED
    assert "scores of 3 tokens" in note


@pytest.mark.parametrize(
    ("needs", "values", "missing"),
    [
        (TeacherNeeds(logps=True), None, None),
        (TeacherNeeds(logps=True, alone=True), None, "that carry loss: actor.advantage has no other term"),
        (TeacherNeeds(logps=True, alone=True), [-1.0, np.nan], None),
        (TeacherNeeds(logps=True, tops=True), [-1.0, -1.0], "likeliest tokens at 2 of 2 tokens"),
        (TeacherNeeds(tops=True), [-1.0, -1.0], "likeliest tokens at 2 of 2 tokens"),
    ],
)
def test_what_a_recipe_needs_of_a_teacher_and_lacks_fails_the_group(needs, values, missing):
    def judged(trajectory: Trajectory) -> Judgement:
        if values is None:
            return Judgement(1.0)
        logp_T = np.full(len(trajectory.tokens_T), np.nan, np.float32)
        logp_T[-2:] = values
        return Judgement(1.0, (), TeacherScores(logp_T))

    world = World(1, judged=judged, needs=needs)
    world.run()
    verdict, note = world.verdict
    assert verdict == (TRAIN if missing is None else FAILED)
    assert (missing or "") in note


def test_nobody_is_asked_about_a_dropped_episode():
    class Drops(Flow):
        async def run(self, prompt, context):
            return limited(await super().run(prompt, context), "drop")

    world = World(2, Drops())
    world.run()
    assert world.verdict[0] == TRAIN
    assert not world.questions
    assert [world.held(number).trajectory().reward for number in range(2)] == [0.0, 0.0]


def test_the_filter_gets_the_whole_group_in_the_order_of_its_samples():
    seen: list[Group] = []
    world = World(3, keep=lambda group: seen.append(group) or True, judged=lambda t: float(t.tokens_T[0]))
    world.run()
    [group] = seen
    assert (group.id, group.prompt, group.admitted_at) == (0, PROMPT, 3)
    assert group.rewards.tolist() == [100, 101, 102]
    assert world.verdict == (TRAIN, "")


@pytest.mark.parametrize("answer", [False, 0, None, ""])
def test_a_group_that_the_filter_rejects_is_filtered(answer):
    world = World(2, keep=lambda group: answer)
    world.run()
    assert world.verdict == (FILTERED, "")
    assert {world.held(number).kind for number in range(2)} == {JUDGED}, "its tokens are accounted for"


@pytest.mark.parametrize("error", [KeyError("label"), SystemExit(1), asyncio.CancelledError()])
def test_a_filter_that_raises_fails_the_group_and_is_named(error):
    def keep(group: Group) -> bool:
        raise error

    world = World(2, keep=keep)
    world.run()
    verdict, note = world.verdict
    assert verdict == FAILED
    assert note.startswith(f"prompt 7: the group filter my.Filter, at {__file__}:")
    assert f", in keep: {type(error).__name__}" in note


def test_trajectories_of_which_a_filter_takes_the_loss_are_judged_once_more_before_the_verdict():
    class SecondIsNotTrained:
        def choose(self, group: Group) -> list[Trajectory]:
            return [group.trajectories[0], group.trajectories[1].without_loss(), group.trajectories[2]]

    world = World(3, keep=lambda group: True)
    world.groups._filter = NamedFilter("my.Filter", SecondIsNotTrained())
    world.run()
    assert world.verdict == (TRAIN, "")
    trajectories = [world.held(number).trajectory() for number in range(3)]
    assert [trajectory.response_length > 0 for trajectory in trajectories] == [True, False, True]
    assert trajectories[1].sampled_length and trajectories[1].reward == 0.5
    judged = [event.sample for event, _ in world.driver.sent if event.kind == JUDGED]
    assert sorted(judged) == [0, 1, 1, 2]


# ---- what exists already


def answered(number: int = 0, reward: float | None = None) -> HeldSample:
    """A whole trajectory that another collector has sent."""
    world = World(1, Flow(starts=number), judged=lambda t: JudgingFailed("no") if reward is None else reward)
    world.run()
    assert world.held(0).kind == (ANSWERED if reward is None else JUDGED)
    return world.held(0)


def test_a_trajectory_that_is_answered_is_only_judged():
    """A judge that fails, or a collector that ends while it judges, costs no completion."""
    world = World(2)
    world.run(answered(), answered(1))
    assert world.verdict[0] == TRAIN
    assert (world.flow.starts, world.engines.requests, len(world.questions)) == (0, [], 2)
    assert [(event.kind, chunk) for event, chunk in world.driver.sent] == [(JUDGED, b"")] * 2
    assert world.driver.released == 2


def test_a_trajectory_that_is_judged_is_taken_as_it_is():
    world = World(2, keep=lambda group: group.rewards.tolist() == [0.25, 0.5])
    world.run(answered(reward=0.25), None)
    assert world.verdict[0] == TRAIN
    assert len(world.questions) == world.flow.starts == 1


def test_an_unfinished_episode_goes_on_from_its_pieces():
    async def first(world: World) -> None:
        async with world.heard():
            world.assign()
            await asyncio.sleep(3.5)
            world.groups.cancel(0, 1)

    world = World(1, engines=PureEngines(chunk=1))
    clock.run(first(world))
    held = world.held(0)
    assert held.tokens(0) == ideal([100], 12)[:3]
    again = World(1, driver=HoldingDriver({(0, 0): held}))
    again.run(held)
    assert again.engines.requests == [((100,), 3)]
    assert again.held(0).trajectory().tokens_T.tolist() == [100, *ideal([100], 12)]


def test_an_episode_whose_record_cannot_be_read_begins_anew():
    """The driver has found the bytes as they were written: another release has written them."""
    held = HeldSample(pieces=[(b"\0" * 8, b"\xc0")])
    world = World(1, driver=HoldingDriver({(0, 0): held}))
    world.run(held)
    assert world.engines.requests == [((100,), 0)]
    assert world.held(0).trajectory().tokens_T.tolist() == [100, *ideal([100], 12)]
    assert world.verdict[0] == TRAIN


def test_a_whole_trajectory_that_cannot_be_read_fails_its_group():
    world = World(1)
    world.run(HeldSample(ANSWERED, header=b"\xc0", chunks=[]))
    assert world.verdict[0] == FAILED
    assert "not the header of a trajectory" in world.verdict[1]
    assert world.driver.released == 1


# ---- rewards of groups


def ranks(trajectories: Sequence[Trajectory]) -> list[Judgement]:
    return [
        Judgement(float(place), (("size", float(len(trajectories))),)) for place in range(len(trajectories))
    ]


@pytest.mark.parametrize("samples", [1, 3])
def test_a_reward_of_groups_is_asked_once_when_all_episodes_have_ended(samples):
    world = World(samples, of_groups=True, judged_together=ranks)
    world.run()
    assert (world.questions, len(world.groups_asked)) == ([], 1)
    [asked] = world.groups_asked
    assert [each.tokens_T[0] for each in asked] == [100 + sample for sample in range(samples)]
    assert world.verdict == (TRAIN, "")
    headers = [world.held(sample).trajectory().header for sample in range(samples)]
    assert [header.reward for header in headers] == list(range(samples))
    assert {header.reward_parts for header in headers} == {(("size", float(samples)),)}
    assert world.driver.released == samples


def test_all_episodes_are_recorded_before_their_group_is_judged_and_their_rewards_go_out_in_one_message():
    """A group of which a restart knew the rewards of a part would mix two judgings."""
    world = World(3, of_groups=True, judged_together=ranks)
    world.run()
    kinds = [event.kind for event, _ in world.driver.sent if event.kind != PIECE]
    assert kinds == [ANSWERED] * 3 + [JUDGED] * 3
    messages = [[event.kind for event in message.events] for message in world.driver.messages]
    assert [JUDGED] * 3 in messages


def test_a_reward_that_a_workflow_has_set_stays_and_is_shown_to_the_reward_of_the_group():
    world = World(2, of_groups=True, judged_together=ranks)
    world.run(None, answered(1, reward=0.25))
    [asked] = world.groups_asked
    assert [each.reward for each in asked] == [None, 0.25]
    assert [event.sample for event, _ in world.driver.sent if event.kind == JUDGED] == [0]
    assert world.verdict == (TRAIN, "")


def test_a_group_whose_members_all_have_rewards_is_not_judged():
    world = World(2, of_groups=True)
    world.run(answered(reward=0.5), answered(1, reward=0.25))
    assert world.groups_asked == []
    assert world.verdict == (TRAIN, "")


def test_a_group_that_cannot_be_judged_fails_and_none_of_its_episodes_is_run_again():
    world = World(2, of_groups=True, judged_together=lambda _: JudgingFailed("in every attempt"), attempts=3)
    world.run()
    assert world.verdict == (FAILED, "prompt 7: in every attempt")
    assert world.flow.starts == 2
    assert {world.held(number).kind for number in range(2)} == {ANSWERED}


# ---- failures


def test_an_episode_that_fails_is_tried_again_and_takes_the_place_of_the_failed_attempt():
    world = World(1, Flow({0: ValueError("no")}), attempts=2)
    world.run()
    assert world.verdict[0] == TRAIN
    [(prompt, attempt, reason)] = world.driver.failed
    assert (prompt, attempt) == (7, 1)
    assert reason.endswith(": ValueError: no")
    assert world.held(0).trajectory().tokens_T.tolist() == [101, *ideal([101], 12)]


def test_a_group_fails_with_the_episode_that_has_no_attempt_left():
    world = World(3, Flow({1: ValueError("a"), 3: ValueError("b")}), attempts=2)
    world.run()
    verdict, note = world.verdict
    assert verdict == FAILED
    assert note.startswith("prompt 7: the workflow") and note.endswith(": ValueError: b")
    assert [(attempt, text.partition(", in run: ")[2]) for _, attempt, text in world.driver.failed] == [
        (1, "ValueError: a"),
        (2, "ValueError: b"),
    ]
    assert world.driver.released == 3


def test_of_a_failed_group_nothing_more_is_generated_and_what_there_is_comes_before_the_verdict():
    world = World(2, Flow({0: ValueError("a")}), engines=PureEngines(chunk=1, chunk_s=0.3))
    assert len(ideal([101], 12)) > 4
    world.run()
    assert world.verdict[0] == FAILED
    assert {number for _, number in world.driver.samples} == {1}
    begun = world.held(1).tokens(0)
    assert 0 < len(begun) < len(ideal([101], 12)) and begun == ideal([101], 12)[: len(begun)]


@pytest.mark.parametrize(("samples", "error"), [(1, KeyError("a")), (2, KeyError("a")), (1, GroupRejected())])
def test_what_the_last_attempt_has_sampled_comes_before_the_verdict(samples, error):
    async def asks_and_raises(context: WorkflowContext) -> None:
        await context.generator.generate([55], context.sampling)
        raise error

    world = World(samples, Flow({0: asks_and_raises}))
    world.run()
    assert world.verdict[0] == (FILTERED if isinstance(error, GroupRejected) else FAILED)
    assert world.held(0).tokens(0) == ideal([55], 12) and world.held(0).complete_calls == {0}


def test_a_group_that_its_workflow_rejects_is_filtered_and_not_tried_again():
    world = World(2, Flow({0: GroupRejected()}), attempts=3)
    world.run()
    assert world.verdict == (FILTERED, "")
    assert not world.driver.failed and world.driver.released == 2


def test_a_group_fails_when_its_reward_does():
    world = World(2, judged=lambda trajectory: JudgingFailed("in every attempt"))
    world.run()
    assert world.verdict == (FAILED, "prompt 7: in every attempt")
    assert {world.held(number).kind for number in range(2)} == {ANSWERED}


@pytest.mark.parametrize("where", ["flow", "judge"])
@pytest.mark.parametrize("error", [NoEngine("no engine"), JudgeStartFailed("\ud800 cannot start")])
@pytest.mark.parametrize("samples", [1, 2])
def test_what_nothing_here_can_mend_ends_the_run_and_fails_no_group(where, error, samples):
    world = World(samples, Flow({0: error} if where == "flow" else {}), judged=lambda trajectory: error)
    world.run()
    assert not world.driver.verdicts
    assert set(world.driver.fatal) == {str(error).replace("\ud800", "\\ud800")}
    assert world.driver.released == samples


def test_a_bug_of_ours_fails_the_group_with_its_traceback():
    world = World(2, judged=lambda trajectory: ZeroDivisionError("a bug"))
    world.run()
    verdict, note = world.verdict
    assert verdict == FAILED
    assert "ZeroDivisionError: a bug" in note
    assert "Traceback" in note


def test_the_errors_of_user_code_arrive_whatever_they_hold():
    """A text that UTF-8 does not have would end the collector, and with it the run."""
    world = World(1, Flow({0: ValueError("\ud83d" * 3), 1: ValueError("x" * 10**6)}), attempts=2)
    world.run()
    assert world.verdict[0] == FAILED
    assert world.driver.failed[0][2].endswith("ValueError: " + "\\ud83d" * 3)
    assert len(world.driver.failed[1][2]) < 5000


@pytest.mark.parametrize("samples", [1, 2])
def test_a_workflow_that_cancels_itself_fails_its_group(samples):
    async def cancels(context: WorkflowContext) -> None:
        asyncio.current_task().cancel()

    world = World(samples, Flow(dict.fromkeys(range(9), cancels)))
    world.run()
    verdict, note = world.verdict
    assert verdict == FAILED
    assert note.startswith("prompt 7: the workflow") and note.endswith(": CancelledError: ")


def test_a_workflow_that_cancels_itself_and_does_not_wait_any_more_fails_its_group():
    class Cancels(Flow):
        async def run(self, prompt, context):
            trajectory = await super().run(prompt, context)
            asyncio.current_task().cancel()
            return trajectory

    world = World(1, Cancels())
    world.run()
    assert world.verdict == (FAILED, "prompt 7: the workflow has cancelled itself")


# ---- requests that a workflow leaves behind

ENDLESS = SamplingConfig(max_new_tokens=60)
LONG = next([k] for k in range(1000, 9000) if len(ideal([k], 60)) == 60)
"""A request that outlasts its episode."""


def test_requests_that_a_workflow_leaves_behind_end_with_the_episode():
    left: list[asyncio.Task] = []

    async def leaves(context: WorkflowContext) -> None:
        left.append(asyncio.create_task(context.generator.generate(LONG, ENDLESS)))
        await asyncio.sleep(3)

    world = World(1, Flow({0: leaves}), engines=PureEngines(chunk=1, chunk_s=0.9))
    world.run()
    assert left[0].cancelled()
    assert world.verdict[0] == TRAIN
    assert world.held(0).trajectory().tokens_T.tolist() == [100, *ideal([100], 12)]


def test_those_of_a_failed_attempt_do_not_reach_into_the_next_one():
    async def leaves(context: WorkflowContext) -> list[int]:
        asyncio.ensure_future(stray(context))  # noqa: RUF006
        await asyncio.sleep(3)
        raise ValueError("first attempt")

    async def stray(context: WorkflowContext) -> None:
        outcomes: list[str] = []
        for _ in range(2):
            try:
                await context.generator.generate(LONG, ENDLESS)
            except (asyncio.CancelledError, RuntimeError) as error:
                outcomes.append(type(error).__name__)
        seen.append(outcomes)

    seen: list[list[str]] = []
    world = World(1, Flow({0: leaves}), attempts=2, engines=PureEngines(chunk=1, chunk_s=0.9))
    world.run()
    assert seen == [["CancelledError", "RuntimeError"]]
    assert world.verdict[0] == TRAIN
    assert world.held(0).trajectory().tokens_T.tolist() == [101, *ideal([101], 12)]


# ---- cancellation


@tries(20)
@given(
    st.sampled_from([1, 2, 8]),
    st.floats(0, 12),
    st.integers(1, 3),
    st.booleans(),
    st.sampled_from([0.0, 0.001, 1.0]),
)
def test_a_group_that_is_given_up_anywhere_says_nothing_more_and_gives_everything_back(
    samples, after_s, times, slow_judge, chunk_s
):
    """Again and again, too: the driver may cancel a group while the collector closes."""

    async def main() -> None:
        world = World(samples, engines=PureEngines(chunk=1, chunk_s=chunk_s))
        if slow_judge:
            world.judged = lambda trajectory: 1.0
        async with world.heard():
            world.assign()
            await asyncio.sleep(after_s)
            was_there = bool(len(world.groups))
            for _ in range(times):
                world.groups.cancel(0, 1)
                await asyncio.sleep(0)
        assert world.driver.released == samples
        assert len(world.driver.verdicts) == (not was_there)
        assert not world.driver.failed

    clock.run(main())


def test_a_group_that_is_cancelled_before_it_has_begun_gives_everything_back():
    async def main() -> None:
        world = World(3)
        async with world.heard():
            world.assign()
            world.groups.cancel(0, 1)
        assert (world.driver.released, world.driver.verdicts, world.flow.starts) == (3, [], 0)

    clock.run(main())


def test_a_group_ends_behind_all_of_its_episodes_although_it_is_cancelled_meanwhile():
    """Else an episode that takes its time would be given back twice."""

    async def tidies(context: WorkflowContext) -> None:
        try:
            await asyncio.sleep(100)
        finally:
            await asyncio.sleep(5)

    async def main() -> None:
        world = World(2, Flow({0: ValueError("at 1 s"), 1: tidies}))
        async with world.heard():
            world.assign()
            await asyncio.sleep(3)
            world.groups.cancel(0, 1)
            await asyncio.sleep(1)
            assert len(world.groups) == 1
        assert (world.driver.released, world.driver.verdicts) == (2, [])

    clock.run(main())


def test_only_the_assignment_that_is_named_is_cancelled():
    async def main() -> None:
        world = World(1)
        async with world.heard():
            world.assign(0, 2)
            world.groups.cancel(0, 1)
        assert world.verdict[0] == TRAIN

    clock.run(main())


def test_closing_waits_for_user_code_no_longer_than_it_says(caplog):
    """A workflow that lets no cancellation out would keep its process for ever."""
    gone = asyncio.Event()

    async def stays(context: WorkflowContext) -> None:
        while not gone.is_set():
            try:
                await asyncio.sleep(1)
            except asyncio.CancelledError:
                continue

    async def main() -> None:
        world = World(2, Flow({0: stays}))
        async with world.driver.hearing(world.outbox):
            world.assign(4)
            await asyncio.sleep(1)
            began = asyncio.get_running_loop().time()
            with caplog.at_level(logging.WARNING):
                await world.groups.close()
            assert asyncio.get_running_loop().time() - began == CLOSE_TIMEOUT_S
            assert "1 tasks do not end within 10 s of their cancellation: group 4" in caplog.text
            gone.set()
            await world.ended()
        assert world.driver.released == 2

    clock.run(main())


# ---- back-pressure, and many groups


def test_no_episode_starts_while_too_much_waits_for_the_connection():
    async def main() -> None:
        world = World(1)
        world.outbox.answered(9, 9, 9, 0, answered_header(), bytes(UNSENT_BYTES + 1))
        world.assign()
        await asyncio.sleep(100)
        assert not world.flow.starts
        async with world.driver.hearing(world.outbox):
            await world.ended()
        assert world.flow.starts == 1

    def answered_header():
        return held.trajectory().header

    held = answered()
    clock.run(main())


@tries(13)
@given(
    st.sampled_from([1, 8]),
    st.lists(st.tuples(st.floats(0, 20), st.none() | st.floats(0, 15)), min_size=1, max_size=6),
    st.sets(st.integers(0, 60), max_size=12),
    st.sets(st.integers(0, 20), max_size=4),
)
def test_every_group_that_is_not_cancelled_has_one_verdict_and_every_episode_is_given_back(
    samples, groups, failing, unjudged
):
    """``groups``: when each is assigned, and after how long it is cancelled."""

    async def main() -> None:
        world = World(samples, Flow({number: ValueError("no") for number in failing}), attempts=2)
        world.judged = lambda t: JudgingFailed("no") if t.tokens_T[0] - 100 in unjudged else 0.5
        cancelled = set()

        async def one(number: int, at_s: float, for_s: float | None) -> None:
            await asyncio.sleep(at_s)
            world.assign(number, number + 1)
            if for_s is not None:
                await asyncio.sleep(for_s)
                if (number, number + 1) in world.groups._running:
                    cancelled.add(number)
                world.groups.cancel(number, number + 1)

        async with world.heard():
            await asyncio.gather(*(one(number, *times) for number, times in enumerate(groups)))
        verdicts = Counter(group for group, _, _ in world.driver.verdicts)
        assert verdicts == Counter(set(range(len(groups))) - cancelled)
        assert world.driver.released == samples * len(groups)
        for group, verdict, _ in world.driver.verdicts:
            kinds = [world.driver.samples.get((group, n), HeldSample()).kind for n in range(samples)]
            assert verdict == FAILED or kinds == [JUDGED] * samples
            assert verdict == TRAIN or PIECE in kinds or ANSWERED in kinds

    clock.run(main())


def test_ends_of_completions_are_written_while_their_episodes_go_on():
    async def main() -> None:
        async def slow(context: WorkflowContext) -> None:
            await context.generator.generate([50], SAMPLING)
            await asyncio.sleep(1000)

        world = World(1, Flow({0: slow}))
        async with world.heard():
            world.assign()
            await asyncio.sleep(500)
            world.groups.write_ends(2.0)
            await asyncio.sleep(1)
            assert world.held(0).complete_calls == {0}

    clock.run(main())
