"""One episode: what user code lets out is a failed attempt; only a sound trajectory passes."""

import asyncio
import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.backend.simulate import clock
from slipstream.configs.schema import RolloutConfig
from slipstream.rollout.collection.collector.episodes import EpisodeFailed, Episodes, check
from slipstream.rollout.engine.engine_pool import NoEngine
from slipstream.rollout.reward.judge.judge_errors import JudgeStartFailed, JudgingFailed
from slipstream.rollout.system.time_limit import TimeLimit
from slipstream.rollout.tokens.record import decode_header, decode_trajectory, encode, encode_trajectory
from slipstream.rollout.tokens.trajectory import UNSAMPLED, Finish, Prompt, Trajectory
from slipstream.rollout.workflow.numbers import EpisodeNumbers

PROMPT = Prompt(7, "?")
GOOD = Trajectory(
    np.array([1, 2, 3]),
    np.array([False, True, True]),
    np.array([0, -0.5, -1], np.float32),
    np.array([UNSAMPLED, 3, 4], np.int32),
    Finish.STOP,
)


def checked(trajectory: object) -> Trajectory:
    return check(trajectory, vocab_size=9, workflow="my.Flow")


def rollout(**more: object) -> RolloutConfig:
    fields = {"max_head_offpolicyness": 0, "batch_size": 1, "n_samples_per_prompt": 1, "reward": "my.Reward"}
    return RolloutConfig.model_validate(fields | more)


@dataclass(frozen=True)
class Context:
    """What a workflow gets."""

    attempt: int
    numbers: EpisodeNumbers = field(default_factory=EpisodeNumbers)


@dataclass
class Host:
    """Whoever runs an episode."""

    begun: list[int] = field(default_factory=list)
    is_given_up: bool = False
    refuses: int = 0
    """Number of trajectories to refuse."""

    def begin(self, attempt: int) -> Any:
        self.begun.append(attempt)
        return Context(attempt)

    def accept(self, trajectory: Trajectory) -> None:
        if self.refuses:
            self.refuses -= 1
            raise ValueError("contradicted")


@dataclass
class Scripted:
    """A workflow whose n-th attempt does what the n-th entry says: raises it, calls it or returns it."""

    script: list[Any]
    contexts: list[Any] = field(default_factory=list)

    async def run(self, prompt: Prompt, context: Any) -> Trajectory:
        entry = self.script[len(self.contexts)]
        self.contexts.append(context)
        if isinstance(entry, BaseException):
            raise entry
        return await entry() if callable(entry) else entry


@dataclass
class Attempts:
    """Hears of failed attempts."""

    failed: list[tuple[int, int, str]] = field(default_factory=list)

    def attempt_failed(self, prompt: int, attempt: int, error: str) -> None:
        self.failed.append((prompt, attempt, error))


@dataclass
class World:
    """An episode of a scripted workflow."""

    script: list[Any]
    attempts: int = 3
    host: Host = field(default_factory=Host)
    listener: Attempts = field(default_factory=Attempts)
    during: Callable[["World", asyncio.Task[Trajectory]], None] | None = None
    contexts: list[Any] = field(default_factory=list)

    def run(self) -> Trajectory:
        async def main() -> Trajectory:
            limit = TimeLimit(60)
            workflow = Scripted(self.script, self.contexts)
            settings = rollout(episode_attempts=self.attempts)
            episodes = Episodes(workflow, settings, checked, limit, self.listener.attempt_failed)
            task = asyncio.create_task(episodes.run(PROMPT, self.host))
            if self.during is not None:
                asyncio.get_running_loop().call_later(1, self.during, self, task)
            try:
                return await task
            finally:
                assert not limit.entered

        return clock.run(main())


def test_several_trajectories_are_one_episode():
    other = replace(GOOD, tokens_T=np.array([3, 2, 1]))
    episode = World([[GOOD, other]]).run()
    assert episode.siblings == (3, 6)
    assert [part.tokens_T.tolist() for part in episode.split()] == [[1, 2, 3], [3, 2, 1]]


@pytest.mark.parametrize(
    ("returned", "reason"),
    [([], "without a trajectory"), ([GOOD, None], "returned NoneType"), ("text", "returned str")],
)
def test_what_is_no_list_of_trajectories_is_a_failed_attempt(returned, reason):
    world = World([returned], attempts=1)
    with pytest.raises(EpisodeFailed, match=reason):
        world.run()


# ---- attempts


class Unshowable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no")


class OfMyOwn(BaseException):
    pass


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (ValueError("broken"), "ValueError: broken"),
        (asyncio.CancelledError("mine"), "CancelledError: mine"),
        (SystemExit(3), "SystemExit: 3"),
        (KeyboardInterrupt(), "KeyboardInterrupt: "),
        (TimeoutError("slow"), "TimeoutError: slow"),
        (MemoryError(), "MemoryError: "),
        (OfMyOwn("x"), "OfMyOwn: x"),
        (ExceptionGroup("two", [ValueError("a"), KeyError("b")]), "ExceptionGroup: two (2 sub-exceptions)"),
        (Unshowable(), "Unshowable, which cannot be shown: RuntimeError"),
    ],
)
def test_whatever_a_workflow_raises_is_a_failed_attempt(error, says):
    world = World([error, GOOD])
    assert world.run() is GOOD
    [(prompt, attempt, reason)] = world.listener.failed
    assert (prompt, attempt) == (7, 1)
    assert re.fullmatch(rf"the workflow, at {__file__}:\d+, in run: {re.escape(says)}", reason)
    assert world.host.begun == [0, 1]


def test_each_attempt_has_a_context_of_its_own():
    world = World([ValueError(1), ValueError(2), GOOD])
    world.run()
    assert world.host.begun == [0, 1, 2]
    assert [context.attempt for context in world.contexts] == [0, 1, 2]


def test_an_episode_fails_with_its_last_attempt_and_says_why():
    world = World([ValueError("a"), ValueError("b"), ValueError("c")])
    with pytest.raises(
        EpisodeFailed, match=rf"^prompt 7: the workflow, at {__file__}:\d+, in run: ValueError: c$"
    ):
        world.run()
    assert [attempt for _, attempt, _ in world.listener.failed] == [1, 2, 3]


def test_an_attempt_that_takes_too_long_has_failed():
    world = World([lambda: asyncio.sleep(1e9), GOOD])
    assert world.run() is GOOD
    [(_, _, reason)] = world.listener.failed
    assert reason.startswith(f"the workflow, at {__file__}:")  # where it was waiting
    assert reason.endswith("TimeoutError: not done within 60 s")


def test_a_trajectory_that_its_completions_contradict_is_a_failed_attempt():
    world = World([GOOD, GOOD], host=Host(refuses=1))
    assert world.run() is GOOD
    [(_, _, reason)] = world.listener.failed
    assert reason.startswith("the workflow") and reason.endswith("ValueError: contradicted")


@pytest.mark.parametrize("error", [NoEngine("none"), JudgeStartFailed("none")])
@pytest.mark.parametrize("depth", range(3))
def test_what_no_attempt_can_mend_is_let_through(error, depth):
    """Also from within the task groups of a workflow."""
    raised = error
    for _ in range(depth):
        raised = ExceptionGroup("tasks", [ValueError("beside"), raised])
    world = World([raised, GOOD])
    with pytest.raises(type(error)):
        world.run()
    assert not world.listener.failed


@pytest.mark.parametrize("depth", range(2))
def test_an_episode_whose_judging_has_failed_is_not_generated_again(depth):
    error = JudgingFailed("in every attempt")
    world = World([ExceptionGroup("tasks", [error]) if depth else error, GOOD])
    with pytest.raises(EpisodeFailed, match="prompt 7: in every attempt"):
        world.run()
    assert (world.host.begun, world.listener.failed) == ([0], [])


# ---- cancellation


def give_up(world: World, task: asyncio.Task[Trajectory]) -> None:
    world.host.is_given_up = True
    task.cancel()


async def waits() -> Trajectory:
    await asyncio.sleep(50)
    return GOOD


async def swallows() -> Trajectory:
    try:
        await asyncio.sleep(50)
    except asyncio.CancelledError:
        return GOOD
    raise AssertionError


async def converts() -> Trajectory:
    try:
        await asyncio.sleep(50)
    except asyncio.CancelledError:
        raise ValueError("cancelled") from None
    raise AssertionError


async def hides() -> Trajectory:
    try:
        await asyncio.sleep(50)
    except asyncio.CancelledError:
        return "nothing"  # type: ignore[return-value]
    raise AssertionError


@pytest.mark.parametrize("workflow", [waits, swallows, converts, hides])
def test_an_episode_that_is_given_up_ends_quietly_whatever_its_workflow_makes_of_that(workflow):
    """A further attempt would generate for a group that nobody needs."""
    world = World([workflow, GOOD], during=give_up)
    with pytest.raises(asyncio.CancelledError):
        world.run()
    assert (world.host.begun, world.listener.failed) == ([0], [])


def test_a_workflow_that_cancels_itself_has_failed_in_that_attempt_only():
    async def cancels_itself() -> Trajectory:
        task = asyncio.current_task()
        assert task is not None
        task.cancel()
        task.cancel()
        await asyncio.sleep(5)
        return GOOD

    async def looks() -> Trajectory:
        task = asyncio.current_task()
        assert task is not None and not task.cancelling()
        await asyncio.sleep(5)
        return GOOD

    world = World([cancels_itself, looks])
    assert world.run() is GOOD
    assert [attempt for _, attempt, _ in world.listener.failed] == [1]


def test_an_episode_is_given_up_although_its_workflow_has_cancelled_itself_before():
    async def cancels_itself() -> Trajectory:
        task = asyncio.current_task()
        assert task is not None
        task.cancel()
        await asyncio.sleep(5)
        return GOOD

    world = World([cancels_itself, waits], during=give_up)
    with pytest.raises(asyncio.CancelledError):
        world.run()
    assert world.host.begun == [0, 1]


# ---- what must not be trained


def with_(**arrays: Any) -> Trajectory:
    return replace(GOOD, **arrays)


ARRAYS = ("tokens_T", "loss_mask_T", "logprobs_T", "versions_T")


@pytest.mark.parametrize(
    ("trajectory", "says"),
    [
        (None, "my.Flow returned NoneType, expected a slipstream.Trajectory"),
        ("text", "my.Flow returned str"),
        (with_(reward=float("nan")), "gave no reward: it returned nan"),
        (with_(reward=float("inf")), "gave no reward: it returned inf"),
        (with_(reward=-1e39), r"gave no reward: it returned -1e\+39"),
        (
            with_(reward=1.0, reward_parts=(("acc", 1e39),)),
            r"part 'acc' is 1e\+39, expected a float of float32",
        ),
        (with_(reward="1.0"), "gave no reward: it returned '1.0' of type str"),
        (with_(reward=np.array([1.0, 2.0])), "gave no reward"),
        (with_(reward=10**400), "gave no reward"),
        (with_(reward=1j), "gave no reward"),
        (with_(reward=1.0, reward_parts={"acc": 1.0}), "reward_parts are of type dict, expected a tuple"),
        (with_(reward=1.0, reward_parts=("acc", 1.0)), r"reward_parts have 'acc', expected \(name, number\)"),
        (with_(reward=1.0, reward_parts=(("acc", float("nan")),)), "reward part 'acc' is nan"),
        (
            with_(reward=1.0, reward_parts=(("acc", 1),)),
            "reward part 'acc' is 1, expected a float of float32",
        ),
        (with_(reward=1.0, reward_parts=(("mean", 1.0),)), "the key 'mean', which names another metric"),
        (with_(reward=1.0, reward_parts=((["a"], 1.0),)), "expected a name of at most 64"),
        (
            with_(reward=1.0, reward_parts=(("a", 1.0), ("a", 2.0))),
            "2 reward_parts, expected 32 at most, each",
        ),
        (with_(tokens_T=np.array([1, 2, 9])), r"token ids \[9\] are outside the vocabulary of 9"),
        (with_(tokens_T=np.array([-1, 2, 3])), r"token ids \[-1\]"),
        (with_(loss_mask_T=np.array([True, True, True])), "tokens carry loss that no policy sampled"),
        (with_(logprobs_T=np.array([0, -0.5, np.nan], np.float32)), r"log-probs \[nan\]"),
        (with_(logprobs_T=np.array([0, -0.5, -np.inf], np.float32)), r"log-probs \[-inf\]"),
        (with_(logprobs_T=np.array([0, 0.5, -1], np.float32)), r"log-probs \[0.5\]"),
        *[(with_(**{name: getattr(GOOD, name)[:2]}), r"the lengths \[2, 3\]") for name in ARRAYS],
        *[(with_(**{name: getattr(GOOD, name)[:, None]}), f"{name} is 2-dimensional") for name in ARRAYS],
        *[(with_(**{name: getattr(GOOD, name).tolist()}), f"{name} is <class 'list'>") for name in ARRAYS],
        *[(with_(**{name: getattr(GOOD, name).astype("M8[s]")}), f"{name} is 1-dim") for name in ARRAYS[:1]],
        (with_(tokens_T=GOOD.tokens_T.astype(float)), "tokens_T is 1-dimensional float64"),
        (with_(loss_mask_T=GOOD.loss_mask_T.astype(int)), "loss_mask_T is 1-dimensional int64"),
        (with_(logprobs_T=GOOD.logprobs_T.astype(int)), "logprobs_T is 1-dimensional int64"),
        (with_(logprobs_T=GOOD.logprobs_T.astype(object)), "logprobs_T is 1-dimensional object"),
        (with_(versions_T=GOOD.versions_T.astype(float)), "versions_T is 1-dimensional float64"),
        (with_(finish="stop sign"), "finish is 'stop sign'"),
        (with_(finish=None), "finish is None"),
        (with_(retractions=1.5), "retractions is 1.5"),
        (with_(retractions=None), "retractions is None"),
        (
            with_(versions_T=np.full(3, UNSAMPLED), loss_mask_T=np.zeros(3, bool)),
            "3 tokens, none of them sampled",
        ),
        (Trajectory(*(getattr(GOOD, name)[:0] for name in ARRAYS), Finish.STOP), "0 tokens, none of them"),
    ],
)
def test_a_trajectory_that_must_not_be_trained_is_refused_by_name(trajectory, says):
    with pytest.raises(ValueError, match=says):
        checked(trajectory)


def test_it_is_a_failed_attempt():
    world = World([with_(reward=float("nan")), with_(reward=0.5)])
    assert world.run().reward == 0.5
    [(_, _, says)] = world.listener.failed
    assert "ValueError: my.Flow gave no reward" in says


@pytest.mark.parametrize("reward", [1, True, np.float32(1), np.float64(1), np.int64(1), np.array(1.0), None])
def test_any_finite_number_is_a_reward(reward):
    """``np.mean`` and others return numbers that a message cannot hold."""
    trajectory = checked(with_(reward=reward))
    assert trajectory.reward == reward
    assert reward is None or type(trajectory.reward) is float


def test_the_log_prob_of_a_token_that_no_policy_sampled_is_never_read():
    assert checked(with_(logprobs_T=np.array([np.nan, -0.5, -1], np.float32)))


@given(
    st.sampled_from([np.int8, np.int64, np.uint32, np.float32, np.bool_]),
    st.sampled_from([np.bool_, np.int8]),
    st.sampled_from([np.float16, np.float32, np.float64]),
    st.sampled_from([np.int16, np.int32, np.int64, np.uint64, np.float32]),
    st.sampled_from([1.0, 0, np.float32(0.5), np.float64(2), "1", None, float("nan")]),
    st.sampled_from([Finish.STOP, "stop", 3]),
    st.lists(
        st.tuples(st.sampled_from([1, np.int64(2), 2.0]), st.sampled_from([1, np.float32(0.5)])), max_size=1
    ),
)
def test_whatever_is_accepted_travels_as_it_is(tokens, mask, logprobs, versions, reward, finish, turns):
    """To a driver that ends a collector whose messages it cannot read, and to a rank."""
    arrays = np.array([1, 2]), np.array([1, 1]), np.array([-0.5, -1.0]), np.array([3, 4])
    kinds = tokens, mask, logprobs, versions
    trajectory = Trajectory(
        *(array.astype(kind) for array, kind in zip(arrays, kinds, strict=True)),
        finish,
        reward=reward,
        turn_rewards=tuple(turns),
    )
    try:
        accepted = checked(trajectory)
    except ValueError:
        return
    read = decode_trajectory(encode_trajectory(accepted), decode_header(encode(accepted.header)))
    assert read.header == accepted.header
    assert (read.tokens_T.tolist(), read.logprobs_T.tolist()) == ([1, 2], [-0.5, -1])
