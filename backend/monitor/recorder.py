"""Turns what happens in a run into metrics, progress and the summary."""

import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Literal

import numpy as np

from slipstream.backend.monitor.live_metrics import live_metrics
from slipstream.backend.monitor.metrics import MetricsLog, Value
from slipstream.backend.monitor.progress import HeldOut, Progress
from slipstream.backend.monitor.status import RunStatus, StepTimes, TrainedStep
from slipstream.backend.monitor.summary import GroupTotals, RunSummary, turn_totals
from slipstream.backend.monitor.trace_log import TraceLog
from slipstream.backend.objective.names import BATCH, HOOK
from slipstream.bridge.publish.report import PublishReport
from slipstream.rollout.control.ends import Loss
from slipstream.rollout.control.slots import State
from slipstream.rollout.tokens.named_numbers import NamedNumbers, by_name, mean
from slipstream.rollout.tokens.trajectory import Finish, TrajectoryHeader

MOST_NAMES = 128
"""Largest number of different names under one tag in one process. Each is a chart: names that are made from
data would otherwise fill metrics, TensorBoard and memory."""


def spread(numbers: Iterable[NamedNumbers]) -> dict[str, float]:
    """Return the mean of each name as NAME, and its extremes as NAME/min and NAME/max."""
    spreads: dict[str, float] = {}
    for name, values in by_name(numbers).items():
        spreads |= {name: mean(values), f"{name}/min": min(values), f"{name}/max": max(values)}
    return spreads


class BoundedNames:
    """Passes on the first ``MOST_NAMES`` names of a tag, and says once that there are more."""

    def __init__(self, tag: str, note: Callable[[str], None], most: int = MOST_NAMES) -> None:
        """``tag``: one of kind `parts` in ``TAGS``."""
        self._tag = tag
        self._note = note
        self._most = most
        self._names: set[str] = set()
        self._is_full = False

    def logged(self, numbers: Mapping[str, float]) -> dict[str, Value]:
        """Return the record of numbers by name, which may be the ones that ``spread`` returns."""
        kept = {name: value for name, value in numbers.items() if self._is_known(name.partition("/")[0])}
        return {self._tag: kept} if kept else {}

    def _is_known(self, name: str) -> bool:
        if name in self._names:
            return True
        if len(self._names) < self._most:
            self._names.add(name)
            return True
        if not self._is_full:
            self._is_full = True
            prefix = self._tag.removesuffix("parts")
            self._note(
                f"{prefix}{name} is not logged, nor is any further new name: there are {self._most} already. "
                "Names of metrics must not be made from data"
            )
        return False


SHOWN_FAILURES = 3
"""Number of failed attempts, and of failed groups, that the user is shown. Metrics count all of them, and the
ledger has the reason of every failed group."""


@dataclass
class _Totals:
    steps: int = 0
    tokens_trained: int = 0
    trajectories: int = 0
    multi_version: int = 0
    head_lag_sum: int = 0
    head_lag_max: int = 0
    wait_s: float = 0.0
    stalls_s: list[float] = field(default_factory=list)
    retractions: int = 0
    episode_retries: int = 0
    tokens_masked: int = 0


class Recorder:
    """Implements the listener ports of the driver. Owned by the driver's event loop."""

    def __init__(
        self,
        metrics: MetricsLog,
        progress: Progress,
        trace: TraceLog | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
        started: float | None = None,
        resumed: int = 0,
        is_accuracy: bool = False,
        beside: Callable[[], Mapping[str, Value]] = dict,
        prompts_left_out: int = 0,
        untested: Sequence[str] = (),
        on_step: Callable[[float], object] = lambda seconds: None,
        on_checkpoint: Callable[[int, float], object] = lambda step, seconds: None,
    ) -> None:
        """``beside``: returns what others have to log with a step, by the tags of ``tags.py``. ``started``:
        when the run began, by ``clock`` in seconds (now, if not given). ``resumed``: earlier starts of the
        run. ``is_accuracy``: whether the mean of the run's rewards is one. ``prompts_left_out``: prompts that
        are too long. ``untested``: fields that the recipe sets although they are untested. ``on_step``: hears
        how long a step took without the wait for its batch; ``on_checkpoint``: the step of a committed
        checkpoint, and how long it took.
        """
        self._metrics = metrics
        self._progress = progress
        self._trace = trace
        self._clock = clock
        self._resumed = resumed
        self._totals = _Totals()
        self._is_accuracy = is_accuracy
        self._beside = beside
        self._prompts_left_out = prompts_left_out
        self._untested = list(untested)
        self._on_step = on_step
        self._on_checkpoint = on_checkpoint
        self._held_out: dict[int, float] = {}
        """Mean reward of the evaluations, by version."""
        self._unshown: HeldOut | None = None
        """The latest evaluation, until a step is shown with it."""
        self._started = clock() if started is None else started
        self._training_began: float | None = None
        self._training_ended: float | None = None
        self._last_step = (self._started, 0)
        self._checkpoint_stall: dict[str, float] = {}
        self._shown_groups = 0
        self._parts = BoundedNames("reward/parts", progress.note)
        self._episode_metrics = BoundedNames("episode/parts", progress.note)
        self._eval_parts = BoundedNames("eval/reward_parts", progress.note)
        self._eval_metrics = BoundedNames("eval/episode_parts", progress.note)
        self._lost: dict[Loss, list[int]] = {loss: [] for loss in Loss}
        """Lengths in tokens of the trajectories lost since the last step."""

    def training_begins(self, status: RunStatus) -> None:
        """Start the clock of training: groups are admitted from now on."""
        self._training_began = self._clock()
        self._last_step = (self._training_began, status.tokens_generated)

    def training_ends(self) -> None:
        """Stop the clock of training."""
        self._training_ended = self._clock()

    def evaluated(
        self,
        version: int,
        reward: float,
        response_length: float,
        parts: Mapping[str, float],
        metrics: Mapping[str, float],
        of_samples: Mapping[str, float],
        *,
        is_logged: bool = False,
    ) -> None:
        self._held_out[version] = reward
        self._unshown = HeldOut(reward, self._is_accuracy)
        if is_logged:
            return
        accuracy: dict[str, Value] = {"eval/accuracy": reward} if self._is_accuracy else {}
        self._metrics.log(
            version,
            {
                "eval/reward": reward,
                **accuracy,
                **self._eval_parts.logged(parts),
                **self._eval_metrics.logged(metrics),
                **_of_samples(of_samples),
                "eval/response_length": response_length,
            },
        )

    def note(self, text: str) -> None:
        self._progress.note(text)

    def attempt_failed(self, prompt: int, attempt: int, error: str) -> None:
        self._totals.episode_retries += 1
        if self._totals.episode_retries <= SHOWN_FAILURES:
            self._progress.note(f"episode of prompt {prompt}, attempt {attempt}: {error}")

    def checkpoint_taken(self, stall_s: float) -> None:
        self._checkpoint_stall = {"perf/checkpoint_stall_s": stall_s}

    def checkpoint_committed(self, step: int, seconds: float) -> None:
        self._on_checkpoint(step, seconds)

    def lost(self, loss: Loss, trajectories: Sequence[TrajectoryHeader], reason: str = "") -> None:
        if loss is Loss.FAILED and reason:
            self._shown_groups += 1
            if self._shown_groups <= SHOWN_FAILURES:
                self._progress.note(f"a group has failed: {reason}")
        self._lost[loss] += [trajectory.sampled_length for trajectory in trajectories]

    def step(self, step: TrainedStep, status: RunStatus) -> None:
        version, metrics, report, times = step.version, step.metrics, step.report, step.times
        trajectories = step.trajectories
        counted = [t for t in trajectories if not t.is_dropped]
        rewards = [t.reward for t in counted if t.reward is not None]
        now, generated = self._clock(), status.tokens_generated
        then, before = self._last_step
        self._last_step = (now, generated)
        tokens_per_s = (generated - before) / max(now - then, 1e-9)
        head_lag, staleness = self._staleness(trajectories, step.lags)
        totals = self._totals
        totals.steps += 1
        totals.wait_s += times.wait_s
        self._on_step(times.step_s - times.wait_s)
        if math.isfinite(metrics["train/tokens"]):
            totals.tokens_trained += int(metrics["train/tokens"])
        totals.stalls_s.append(report.stall_s)
        totals.retractions += sum(t.retractions for t in trajectories)
        totals.tokens_masked += sum(t.sampled_length - t.response_length for t in trajectories)
        self._metrics.log(
            version,
            {
                **({} if step.is_logged else _reward_metrics(rewards, trajectories)),
                **({} if step.is_logged else self._parts.logged(spread(t.reward_parts for t in counted))),
                **self._episode_metrics.logged(spread(t.metrics for t in counted)),
                **_source_metrics(step.sources, trajectories),
                **staleness,
                **({} if step.is_logged else _length_metrics(trajectories)),
                **_status_metrics(status),
                **({} if status.live is None else live_metrics(status.live, status.live_requests_running)),
                "rollout/episode_retries": totals.episode_retries,
                "rollout/retractions": totals.retractions,
                "lost/tokens_masked": totals.tokens_masked,
                **{f"lost/{loss}_lengths": lengths for loss, lengths in self._lost.items() if lengths},
                **self._checkpoint_stall,
                **_with_parts(metrics),
                **_performance_metrics(metrics, report, times),
                "perf/generate_tokens_per_s": tokens_per_s,
                **self._beside(),
            },
        )
        self._lost = {loss: [] for loss in Loss}
        self._checkpoint_stall = {}
        if self._trace:
            tokens = sum(t.length for t in trajectories)
            self._trace.write("step", version=version, tokens=tokens, end_s=now, **asdict(times))
            self._trace.write("publish", end_s=now, **asdict(report))
        self._progress.step(
            status.step,
            reward=mean(rewards) if rewards else math.nan,
            head_lag=head_lag,
            tokens_per_s=tokens_per_s,
            held_out=self._unshown,
        )
        self._unshown = None

    def _staleness(
        self, trajectories: Sequence[TrajectoryHeader], lag_of: Mapping[int, int]
    ) -> tuple[int, dict[str, Value]]:
        """Return the largest head lag of a batch, and the metrics of its lags."""
        tokens = [trajectory.trained_tokens for trajectory in trajectories]
        # A workflow may give a trajectory without a single token to train.
        heads = [max(lag_of[version] for version in versions) for versions in tokens if versions] or [0]
        lags: Counter[int] = Counter()
        for versions in tokens:
            for version, n in versions.items():
                lags[lag_of[version]] += n
        several = sum(len(versions) > 1 for versions in tokens)
        totals, head_lag = self._totals, max(heads)
        totals.trajectories += len(trajectories)
        totals.multi_version += several
        totals.head_lag_sum += sum(heads)
        totals.head_lag_max = max(totals.head_lag_max, head_lag)
        return head_lag, {
            "staleness/head_max": head_lag,
            "staleness/head_mean": sum(heads) / len(heads),
            "staleness/token_mean": sum(lag * n for lag, n in lags.items()) / max(lags.total(), 1),
            "staleness/token_lag": dict(lags),
            "rollout/multi_version_fraction": several / len(trajectories),
        }

    def summary(self, end: Literal["done", "failed", "stopped"], status: RunStatus) -> RunSummary:
        """Return the account of the run so far, which has come to ``end``."""
        totals, counts = self._totals, status.counts
        now = self._clock()
        training_s = 0.0
        if self._training_began is not None:
            training_s = (
                now if self._training_ended is None else self._training_ended
            ) - self._training_began
        version = status.version
        trained = totals.trajectories > 0
        return RunSummary(
            exit=end,
            steps=status.step,
            steps_of_start=totals.steps,
            wall_s=now - self._started,
            training_s=training_s,
            reward_before=self._held_out.get(0),
            reward_after=self._held_out.get(version) if version else None,
            reward_is_accuracy=self._is_accuracy,
            head_lag_max=totals.head_lag_max if trained else None,
            head_lag_mean=totals.head_lag_sum / totals.trajectories if trained else None,
            multi_version_fraction=totals.multi_version / totals.trajectories if trained else None,
            tokens_generated=status.tokens_generated,
            tokens_trained=totals.tokens_trained,
            versions=version,
            resumed=self._resumed,
            stall_s_mean=float(np.mean(totals.stalls_s)) if trained else None,
            engine_restarts=status.engine_restarts,
            trainer_restarts=status.trainer_restarts,
            trainer_wait_fraction=min(1.0, totals.wait_s / training_s) if training_s else None,
            prompts_left_out=self._prompts_left_out,
            untested=self._untested,
            groups=GroupTotals(**asdict(counts)),
            turns=None if status.live is None else turn_totals(status.live),
        )


def _of_samples(scores: Mapping[str, float]) -> dict[str, Value]:
    """Return avg@n and pass@k as parts of two metrics."""
    named: dict[str, Value] = {}
    for prefix in ("avg_at_", "pass_at_"):
        parts = {name.removeprefix(prefix): n for name, n in scores.items() if name.startswith(prefix)}
        if parts:
            named[f"eval/{prefix}parts"] = parts
    return named


def _with_parts(metrics: Mapping[str, float]) -> dict[str, Value]:
    """Return the metrics of a step, those that code of the user's names as parts of one."""
    named: dict[str, Value] = {
        name: value for name, value in metrics.items() if not name.startswith((HOOK, BATCH))
    }
    for prefix in (HOOK, BATCH):
        parts = {name.removeprefix(prefix): n for name, n in metrics.items() if name.startswith(prefix)}
        if parts:
            named[f"{prefix}parts"] = parts
    return named


def _reward_metrics(rewards: Sequence[float], trajectories: Sequence[TrajectoryHeader]) -> dict[str, Value]:
    metrics: dict[str, Value] = {}
    if rewards:
        with np.errstate(over="ignore"):
            metrics = {"reward/mean": mean(rewards), "reward/std": float(np.std(rewards))}
    trajectories = [trajectory for trajectory in trajectories if not trajectory.is_dropped]
    turns = [
        reward for trajectory in trajectories for _, reward in trajectory.turn_rewards if reward is not None
    ]
    if turns:
        metrics["reward/turn_mean"] = mean(turns)
    return metrics


def _source_metrics(sources: Sequence[str], trajectories: Sequence[TrajectoryHeader]) -> dict[str, Value]:
    """Return the metrics of each source of prompts. Live trajectories, which come last, are of none."""
    if not sources:
        return {}
    rewards: dict[str, list[float]] = {}
    for name, trajectory in zip(sources, trajectories, strict=False):
        if trajectory.reward is not None and not trajectory.is_dropped:
            rewards.setdefault(name, []).append(trajectory.reward)
    return {
        "reward/source_parts": {name: mean(values) for name, values in rewards.items()},
        "rollout/source_parts": dict(Counter(sources)),
    }


def _length_metrics(trajectories: Sequence[TrajectoryHeader]) -> dict[str, Value]:
    lengths = [trajectory.sampled_length for trajectory in trajectories]
    truncated = sum(trajectory.finish is Finish.LENGTH for trajectory in trajectories)
    return {
        "rollout/response_length": float(np.mean(lengths)),
        "rollout/response_length_max": max(lengths),
        "rollout/response_lengths": lengths,
        "rollout/truncated_fraction": truncated / len(trajectories),
    }


def _status_metrics(status: RunStatus) -> dict[str, Value]:
    counts, states = status.counts, status.states
    return {
        "rollout/groups_admitted": counts.admitted,
        "rollout/groups_trained": counts.trained,
        "rollout/groups_filtered": counts.filtered,
        "rollout/groups_expired": counts.expired,
        "rollout/groups_failed": counts.failed,
        "rollout/groups_in_flight": counts.in_flight - states[State.READY],
        "rollout/groups_generating": states[State.GENERATING],
        "rollout/groups_judging": states[State.JUDGING],
        "rollout/groups_ready": states[State.READY],
        "rollout/requests_running": status.requests_running,
        "rollout/requests_limit": status.requests_limit,
        "rollout/engines_serving": status.engines_serving,
        "rollout/requests_resent": status.requests_resent,
        "train/step": status.step,
        "perf/engine_restarts": status.engine_restarts,
        "perf/collector_restarts": status.collector_restarts,
        "perf/trainer_restarts": status.trainer_restarts,
        "perf/weight_transports_given_up": status.transports_given_up,
        **{f"lost/{loss}": status.losses[loss] for loss in Loss},
    }


def training_metrics(
    trajectories: Sequence[TrajectoryHeader], metrics: Mapping[str, float], train_s: float
) -> dict[str, Value]:
    """Return the metrics of a training step alone: of its batch and of the trainer."""
    counted = [t for t in trajectories if not t.is_dropped]
    rewards = [t.reward for t in counted if t.reward is not None]
    return {
        **_reward_metrics(rewards, trajectories),
        **_length_metrics(trajectories),
        **_with_parts(metrics),
        **_speed_metrics(metrics, train_s),
    }


def _speed_metrics(metrics: Mapping[str, float], train_s: float) -> dict[str, Value]:
    return {
        "perf/train_s": train_s,
        "perf/train_tokens_per_s": metrics["train/tokens"] / max(train_s, 1e-9),
        "perf/train_tflops": metrics["train/tflop"] / max(train_s, 1e-9),
    }


def _performance_metrics(
    metrics: Mapping[str, float], report: PublishReport, times: StepTimes
) -> dict[str, Value]:
    return {
        "perf/step_s": times.step_s,
        **_speed_metrics(metrics, times.train_s),
        "perf/weight_update_s": report.total_s,
        "perf/weight_update_stall_s": report.stall_s,
        "perf/weight_bytes": report.bytes_sent,
        "perf/weight_gb_per_s": report.bytes_sent / max(report.total_s, 1e-9) / 1e9,
        "perf/weight_ipc_ranks": report.ways.get("cuda_ipc", 0),
        "perf/trainer_wait_s": times.wait_s,
        "perf/trainer_wait_fraction": times.wait_s / max(times.step_s, 1e-9),
    }
