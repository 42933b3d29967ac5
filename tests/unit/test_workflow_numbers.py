"""What a workflow records of an episode: checked where it is recorded, attached to the episode, bounded."""

import asyncio
import re
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from slipstream.backend.monitor.recorder import BoundedNames, spread
from slipstream.configs.schema import RolloutConfig, SamplingConfig
from slipstream.rollout.collection.collector.episodes import Episodes, check
from slipstream.rollout.system.time_limit import TimeLimit
from slipstream.rollout.tokens.record import decode_header, decode_trajectory, encode, encode_trajectory
from slipstream.rollout.tokens.trajectory import UNSAMPLED, Finish, Prompt, Trajectory
from slipstream.rollout.workflow import WorkflowContext
from slipstream.rollout.workflow.numbers import EpisodeNumbers, MetricError

NOTHING: Any = None
PROMPT = Prompt(7, "?")
SOUND = Trajectory(
    np.array([1, 2]),
    np.array([False, True]),
    np.array([0, -0.5], np.float32),
    np.array([UNSAMPLED, 3], np.int32),
    Finish.STOP,
)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        (
            "tool_calls",
            float("nan"),
            "the metric 'tool_calls' is nan of type float, expected a finite number",
        ),
        ("tool_calls", float("-inf"), "is -inf of type float, expected a finite number: leave it out"),
        ("tool_calls", "3", "is '3' of type str, expected a finite number"),
        ("tool_calls", None, "is None of type NoneType, expected a finite number"),
        ("tool calls", 1, "a metric is named 'tool calls', expected at most 64 letters"),
        ("a/b", 1, "a metric is named 'a/b'"),
        ("x" * 65, 1, "expected at most 64 letters, digits, `_`, `-` and `.`"),
        ("", 1, "a metric is named ''"),
        (3, 1, "a metric is named 3"),
    ],
)
def test_what_is_no_metric_is_refused_where_it_is_recorded(name, value, message):
    with pytest.raises(MetricError, match=re.escape(message)):
        WorkflowContext(NOTHING, NOTHING, NOTHING, SamplingConfig()).metric(name, value)


def test_an_episode_has_a_bounded_number_of_names():
    numbers = EpisodeNumbers()
    for number in range(32):
        numbers.record(f"n{number}", number)
    numbers.record("n5", 50)
    with pytest.raises(MetricError, match="'another' is number 33 of its episode, expected 32 names at most"):
        numbers.record("another", 1)
    assert dict(numbers.attached(SOUND).metrics)["n5"] == 50.0, "a name that is recorded again is replaced"


@dataclass
class Recording:
    """Records its attempt, and fails in the first one."""

    attempts: int = 0

    async def run(self, prompt: Prompt, context: WorkflowContext) -> Trajectory:
        self.attempts += 1
        context.metric("attempt", self.attempts)
        if self.attempts == 1:
            context.metric("only_in_the_first", np.float32(1.5))
            raise RuntimeError("no luck")
        return SOUND


@dataclass
class Host:
    """Gives every attempt a context of its own."""

    is_given_up: bool = False

    def begin(self, attempt: int) -> WorkflowContext:
        return WorkflowContext(NOTHING, NOTHING, NOTHING, SamplingConfig())

    def accept(self, trajectory: Trajectory) -> None: ...
    def attempt_failed(self, prompt: int, attempt: int, error: str) -> None: ...


def test_only_the_attempt_that_counts_is_recorded_and_the_record_keeps_it():
    rollout = RolloutConfig.model_validate(
        {"max_head_offpolicyness": 0, "batch_size": 1, "n_samples_per_prompt": 1, "reward": "my.Reward"}
    )
    host = Host()

    def checked(trajectory: object) -> Trajectory:
        return check(trajectory, vocab_size=9, workflow="my.Flow")

    episodes = Episodes(Recording(), rollout, checked, TimeLimit(600), host.attempt_failed)
    trajectory = asyncio.run(episodes.run(PROMPT, host))
    assert trajectory.metrics == (("attempt", 2.0),)
    judged = trajectory.judged(1.0)
    stored = decode_trajectory(encode_trajectory(judged), decode_header(encode(judged.header)))
    assert stored.metrics == judged.header.metrics == (("attempt", 2.0),)


def test_a_step_has_the_mean_and_the_extremes_of_each_name_over_the_episodes_that_have_it():
    assert spread([(("a", 1.0), ("b", 1e308)), (("a", 2.0),), (("b", 1e308),), ()]) == {
        "a": 1.5,
        "a/min": 1.0,
        "a/max": 2.0,
        "b": 1e308,
        "b/min": 1e308,
        "b/max": 1e308,
    }


def test_names_beyond_the_bound_are_left_out_and_told_once():
    notes: list[str] = []
    names = BoundedNames("episode/parts", notes.append, most=2)
    assert names.logged(spread([(("a", 1.0),)])) == {"episode/parts": {"a": 1.0, "a/min": 1.0, "a/max": 1.0}}
    assert names.logged({"b": 1.0, "c": 2.0, "d": 3.0}) == {"episode/parts": {"b": 1.0}}
    assert names.logged({"c": 1.0}) == {}
    assert names.logged({"a": 2.0}) == {"episode/parts": {"a": 2.0}}
    [note] = notes
    assert note.startswith("episode/c is not logged, nor is any further new name: there are 2 already.")
