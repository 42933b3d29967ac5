"""The numbers of a run, computed by hand from what the recorder was told."""

from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from slipstream.backend.monitor.progress import HeldOut
from slipstream.backend.monitor.recorder import Recorder
from slipstream.backend.monitor.status import RunStatus, StepTimes, TrainedStep
from slipstream.bridge.publish.report import PublishReport
from slipstream.rollout.control.ends import GroupCounts, Loss
from slipstream.rollout.control.live_door import TurnEnd
from slipstream.rollout.control.slots import State
from slipstream.rollout.live.status import LiveStatus, SinceLastBatch
from slipstream.rollout.reward.live import VoteCounts
from slipstream.rollout.tokens.trajectory import UNSAMPLED, Finish, Group, Prompt, Trajectory


class Fakes:
    """A recorder and everything that it reads or writes."""

    def __init__(self, *, is_accuracy: bool = False) -> None:
        self.now = 0.0
        self.logged: list[tuple[int, dict]] = []
        self.shown: list[dict] = []
        self.notes: list[str] = []
        self.status = RunStatus(
            version=0,
            step=0,
            counts=GroupCounts(),
            losses=Counter(),
            states=dict.fromkeys(State, 0) | {State.GENERATING: 2, State.JUDGING: 1},
            tokens_generated=0,
            requests_running=5,
            requests_limit=6,
            requests_resent=0,
            engine_restarts=0,
            collector_restarts=0,
        )
        self.recorder = Recorder(
            SimpleNamespace(log=lambda step, values: self.logged.append((step, dict(values)))),
            SimpleNamespace(
                step=lambda version, **shown: self.shown.append({"version": version, **shown}),
                note=self.notes.append,
            ),
            clock=lambda: self.now,
            is_accuracy=is_accuracy,
            untested=("actor.megatron.a",),
        )

    def set(self, **changes) -> None:
        """Change where the run stands."""
        self.status = replace(self.status, **changes)

    def step(self, groups, version: int, *, tokens: float = 6.0, **times: float) -> dict:
        """A step that was recorded; what was logged."""
        report = PublishReport(version, bytes_sent=4_000_000, stall_s=0.25, total_s=2.0)
        self.set(version=version)
        times = StepTimes(**{"wait_s": 1.0, "train_s": 3.0, "step_s": 8.0} | times)
        metrics = {"train/tokens": tokens, "train/tflop": 0.6, "train/loss": 0.5}
        trajectories = [trajectory.header for group in groups for trajectory in group.trajectories]
        versions = {version for header in trajectories for version in header.trained_tokens}
        lags = {trained: version - 1 - trained for trained in versions}
        sources = [group.prompt.source for group in groups for _ in group.trajectories]
        step = TrainedStep(
            trajectories, lags, version, metrics, report, times, sources=sources if any(sources) else ()
        )
        self.recorder.step(step, self.status)
        assert self.logged[-1][0] == version
        return self.logged[-1][1]


def trajectory(versions: list[int], reward: float, finish=Finish.STOP, retractions: int = 0) -> Trajectory:
    """Two prompt tokens and one trained token for each version."""
    n = len(versions) + 2
    return Trajectory(
        np.arange(n),
        np.arange(n) >= 2,
        np.zeros(n, np.float32),
        np.array([UNSAMPLED, UNSAMPLED, *versions], np.int32),
        finish,
        retractions,
        reward,
    )


def group(number: int, *trajectories: Trajectory) -> Group:
    return Group(number, Prompt(number, "?"), 0, trajectories)


def two_groups() -> list[Group]:
    return [
        group(0, trajectory([3, 3, 4], 1.0), trajectory([4], 0.0, Finish.LENGTH, retractions=2)),
        group(1, trajectory([2, 4], 0.0, retractions=1), trajectory([4, 4], 0.0)),
    ]


def test_each_of_several_sources_has_its_reward_and_its_trajectories():
    first, second = two_groups()
    groups = [
        replace(first, prompt=Prompt(0, "?", source="math")),
        replace(second, prompt=Prompt(1, "?", source="code")),
    ]
    logged = Fakes().step(groups, 5)
    assert logged["reward/source_parts"] == {"math": 0.5, "code": 0.0}
    assert logged["rollout/source_parts"] == {"math": 2, "code": 2}
    assert not any("source" in name for name in Fakes().step(two_groups(), 5))


def test_a_step_is_logged_with_the_numbers_of_its_groups():
    fakes = Fakes()
    fakes.recorder.training_begins(fakes.status)
    fakes.now = 10.0
    fakes.set(tokens_generated=500)
    fakes.set(counts=GroupCounts(admitted=9, trained=2, filtered=1, expired=1, failed=1))
    fakes.set(states={**fakes.status.states, State.READY: 1}, step=5, engine_restarts=3, requests_resent=7)
    fakes.set(losses=Counter([Loss.FILTERED, Loss.FAILED, Loss.REQUEUED]))
    logged = fakes.step(two_groups(), 5)
    assert logged.pop("staleness/token_lag") == {0: 5, 1: 2, 2: 1}
    assert logged.pop("rollout/response_lengths") == [3, 1, 2, 2]
    assert logged == pytest.approx(
        {
            "reward/mean": 0.25,
            "reward/std": 3**0.5 / 4,
            "staleness/head_max": 2,
            "staleness/head_mean": (1 + 0 + 2 + 0) / 4,
            "staleness/token_mean": (1 + 1 + 2) / 8,
            "rollout/multi_version_fraction": 0.5,
            "rollout/response_length": 2.0,
            "rollout/response_length_max": 3,
            "rollout/truncated_fraction": 0.25,
            "rollout/groups_admitted": 9,
            "rollout/groups_trained": 2,
            "rollout/groups_filtered": 1,
            "rollout/groups_expired": 1,
            "rollout/groups_failed": 1,
            "rollout/groups_in_flight": 3,
            "rollout/groups_generating": 2,
            "rollout/groups_judging": 1,
            "rollout/groups_ready": 1,
            "rollout/episode_retries": 0,
            "rollout/retractions": 3,
            "rollout/requests_resent": 7,
            "rollout/requests_running": 5,
            "rollout/requests_limit": 6,
            "rollout/engines_serving": 0,
            "train/step": 5,
            "lost/filtered": 1,
            "lost/failed": 1,
            "lost/quarantined": 0,
            "lost/stale": 0,
            "lost/requeued": 1,
            "lost/surplus": 0,
            "lost/tokens_masked": 0,
            "train/tokens": 6.0,
            "train/tflop": 0.6,
            "train/loss": 0.5,
            "perf/step_s": 8.0,
            "perf/train_s": 3.0,
            "perf/train_tokens_per_s": 2.0,
            "perf/train_tflops": 0.2,
            "perf/generate_tokens_per_s": 50.0,
            "perf/weight_update_s": 2.0,
            "perf/weight_update_stall_s": 0.25,
            "perf/weight_bytes": 4_000_000,
            "perf/weight_gb_per_s": 0.002,
            "perf/weight_ipc_ranks": 0,
            "perf/trainer_wait_s": 1.0,
            "perf/trainer_wait_fraction": 0.125,
            "perf/engine_restarts": 3,
            "perf/collector_restarts": 0,
            "perf/trainer_restarts": 0,
            "perf/weight_transports_given_up": 0,
        }
    )
    assert fakes.shown == [
        {"version": 5, "reward": 0.25, "head_lag": 2, "tokens_per_s": 50.0, "held_out": None}
    ]


def test_every_logged_tag_is_declared():
    from slipstream.backend.monitor.tags import TAGS

    fakes = Fakes(is_accuracy=True)
    fakes.step(two_groups(), 5)
    fakes.recorder.evaluated(5, 0.5, 10.0, {}, {}, {})
    assert {name for _, values in fakes.logged for name in values} <= TAGS.keys()


def test_generation_speed_is_that_since_the_step_before():
    fakes = Fakes()
    fakes.now = 100.0
    fakes.set(tokens_generated=7_000)
    fakes.recorder.training_begins(fakes.status)
    fakes.now = 110.0
    fakes.set(tokens_generated=7_500)
    assert fakes.step(two_groups(), 5)["perf/generate_tokens_per_s"] == pytest.approx(50)
    fakes.now = 114.0
    fakes.set(tokens_generated=7_900)
    assert fakes.step(two_groups(), 6)["perf/generate_tokens_per_s"] == pytest.approx(100)


def test_retractions_and_retries_add_up_over_the_run_and_only_a_few_failures_are_shown():
    fakes = Fakes()
    for attempt in range(1, 6):
        fakes.recorder.attempt_failed(7, attempt, "ValueError: no")
    fakes.step(two_groups(), 5)
    logged = fakes.step(two_groups(), 6)
    assert (logged["rollout/retractions"], logged["rollout/episode_retries"]) == (6, 5)
    assert fakes.notes == [f"episode of prompt 7, attempt {n}: ValueError: no" for n in (1, 2, 3)]


def test_an_evaluation_is_logged_at_its_version_and_shown_with_the_next_step_only():
    fakes = Fakes()
    fakes.recorder.evaluated(4, -7.5, 12.0, {}, {}, {})
    assert fakes.logged == [(4, {"eval/reward": -7.5, "eval/response_length": 12.0})]
    fakes.step(two_groups(), 5)
    fakes.step(two_groups(), 6)
    assert [shown["held_out"] for shown in fakes.shown] == [HeldOut(-7.5, False), None]


def test_an_evaluation_is_an_accuracy_where_the_reward_is_one():
    fakes = Fakes(is_accuracy=True)
    fakes.recorder.evaluated(0, 0.75, 12.0, {}, {}, {})
    assert fakes.logged == [(0, {"eval/reward": 0.75, "eval/accuracy": 0.75, "eval/response_length": 12.0})]
    fakes.step(two_groups(), 5)
    assert fakes.shown[0]["held_out"] == HeldOut(0.75, True)
    summary = fakes.recorder.summary("stopped", fakes.status)
    assert (summary.reward_before, summary.reward_is_accuracy) == (0.75, True)


@pytest.mark.parametrize("reward", [1e308, -1e308, 5e-324])
def test_rewards_of_any_finite_size_have_a_finite_mean(reward):
    fakes = Fakes()
    logged = fakes.step([group(0, *(trajectory([4], reward) for _ in range(8)))], 5)
    assert logged["reward/mean"] == pytest.approx(reward)


def test_metrics_that_are_not_finite_end_neither_a_step_nor_the_summary():
    fakes = Fakes()
    fakes.recorder.training_begins(fakes.status)
    fakes.step(two_groups(), 5, tokens=float("nan"), train_s=0.0, step_s=0.0)
    fakes.recorder.evaluated(5, float("inf"), 5.0, {}, {}, {})
    summary = fakes.recorder.summary("done", fakes.status)
    assert (summary.tokens_trained, summary.reward_after) == (0, None)


def test_the_summary_adds_the_run_up():
    fakes = Fakes()
    fakes.now = 20.0
    fakes.recorder.evaluated(0, 0.1, 5.0, {}, {}, {})
    fakes.recorder.training_begins(fakes.status)
    fakes.now = 30.0
    fakes.set(tokens_generated=400)
    fakes.step(two_groups(), 5, tokens=8.0, wait_s=4.0)
    fakes.now = 40.0
    fakes.set(tokens_generated=1_000)
    fakes.step([group(2, trajectory([5], 1.0), trajectory([5], 1.0))], 6, tokens=2.0, wait_s=1.0)
    fakes.recorder.training_ends()
    fakes.now = 45.0
    fakes.recorder.evaluated(6, 0.9, 5.0, {}, {}, {})
    fakes.set(counts=GroupCounts(admitted=5, trained=3, filtered=1, failed=1))
    fakes.set(engine_restarts=1, step=7)
    summary = fakes.recorder.summary("done", fakes.status).model_dump()
    assert summary.pop("untested") == ["actor.megatron.a"]
    assert summary.pop("groups") == {"admitted": 5, "trained": 3, "filtered": 1, "expired": 0, "failed": 1}
    assert summary.pop("turns") is None
    assert summary == pytest.approx(
        {
            "exit": "done",
            "steps": 7,
            "steps_of_start": 2,
            "wall_s": 45.0,
            "training_s": 20.0,
            "reward_before": 0.1,
            "reward_after": 0.9,
            "reward_is_accuracy": False,
            "head_lag_max": 2,
            "head_lag_mean": 3 / 6,
            "multi_version_fraction": 2 / 6,
            "tokens_generated": 1_000,
            "tokens_trained": 10,
            "versions": 6,
            "resumed": 0,
            "stall_s_mean": 0.25,
            "engine_restarts": 1,
            "trainer_restarts": 0,
            "trainer_wait_fraction": 5 / 20,
            "prompts_left_out": 0,
        }
    )


def test_the_turns_of_users_are_in_the_metrics_and_in_the_summary():
    fakes = Fakes()
    fakes.recorder.training_begins(fakes.status)
    since = SinceLastBatch(trained_ages_s=[2.0, 4.0], scores=[1.0, -1.0, 1.0, 1.0])
    ends = {TurnEnd.TRAINED: 4, TurnEnd.SIDE: 9}
    live = LiveStatus(
        3,
        2,
        1,
        8.0,
        5.0,
        4.0,
        ends,
        {"temperature": 6, "top_p, min_p": 1, "helper: title": 2, "fork": 4},
        5,
        7,
        2,
        VoteCounts(3, 4, 6),
        0,
        1,
        0.25,
        since,
    )
    fakes.set(live=live, live_requests_running=6)
    logged = fakes.step(two_groups(), 5)
    assert {tag: value for tag, value in logged.items() if tag.startswith("live/")} == {
        "live/requests_running": 6,
        "live/turns_waiting": 3,
        "live/turns_unjudged": 2,
        "live/turns_ready": 1,
        "live/oldest_waiting_s": 8.0,
        "live/oldest_unjudged_s": 5.0,
        "live/oldest_ready_s": 4.0,
        **{f"live/{end}": 0 for end in TurnEnd},
        "live/trained": 4,
        "live/side": 9,
        "live/side_helpers": 2,
        "live/side_sampling": 7,
        "live/verdicts": 5,
        "live/put_off": 7,
        "live/given_up": 2,
        "live/votes_tied": 3,
        "live/votes_unparsable": 4,
        "live/votes_missing": 6,
        "live/judge_outages": 0,
        "live/late_rewards": 1,
        "live/batch_turns": 4,
        "live/score_mean": 0.5,
        "live/trained_age_s": 3.0,
        "live/baseline": 0.25,
    }
    summary = fakes.recorder.summary("stopped", fakes.status)
    totals = {name: n for name, n in summary.turns.model_dump().items() if n}
    assert totals == {"trained": 4, "side": 9, "waiting": 3, "unjudged": 2, "ready": 1}


def test_a_run_that_never_trained_has_no_training_in_its_summary():
    fakes = Fakes()
    fakes.now = 12.0
    summary = fakes.recorder.summary("failed", fakes.status)
    assert (summary.exit, summary.steps, summary.wall_s, summary.training_s) == ("failed", 0, 12.0, 0.0)
    assert summary.tokens_generated == 0
    assert summary.head_lag_max is summary.stall_s_mean is summary.trainer_wait_fraction is None
    assert summary.reward_before is summary.reward_after is None


def test_an_interrupted_run_does_not_call_an_earlier_version_its_last_policy():
    fakes = Fakes()
    fakes.recorder.evaluated(0, 0.1, 5.0, {}, {}, {})
    fakes.recorder.training_begins(fakes.status)
    fakes.step(two_groups(), 5)
    fakes.recorder.evaluated(5, 0.4, 5.0, {}, {}, {})
    assert fakes.recorder.summary("stopped", fakes.status).reward_after == 0.4
    fakes.step([group(2, trajectory([5], 1.0))], 6)
    assert fakes.recorder.summary("stopped", fakes.status).reward_after is None


def test_training_time_goes_on_until_it_has_ended_even_if_that_is_at_time_zero():
    fakes = Fakes()
    fakes.now = -10.0
    fakes.recorder.training_begins(fakes.status)
    fakes.now = 0.0
    fakes.recorder.training_ends()
    fakes.now = 5.0
    assert fakes.recorder.summary("done", fakes.status).training_s == 10.0


def test_a_trajectory_without_a_trained_token_does_not_end_the_run():
    fakes = Fakes()
    logged = fakes.step([group(0, trajectory([], 0.0), trajectory([3], 1.0))], 5)
    assert (logged["staleness/head_max"], logged["rollout/response_lengths"]) == (1, [0, 1])
    logged = fakes.step([group(1, trajectory([], 0.0))], 6)
    assert (logged["staleness/token_mean"], logged["staleness/token_lag"]) == (0, {})
