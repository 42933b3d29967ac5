"""Turns what the loops did into metrics, progress and the summary."""

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Literal

import numpy as np

from slipstream.backend.batch.step_result import StepResult
from slipstream.backend.monitor.metrics import MetricsLog
from slipstream.backend.monitor.progress import Progress
from slipstream.backend.monitor.summary import GroupTotals, RunSummary
from slipstream.backend.monitor.trace import TraceLog
from slipstream.bridge.publish.report import PublishReport
from slipstream.rollout.collect.gate import AdmissionGate
from slipstream.rollout.control.core import Loss
from slipstream.rollout.control.slots import State
from slipstream.rollout.engine.pool import EnginePool
from slipstream.rollout.trajectory import Finish, Group, Prompt, Trajectory


@dataclass(frozen=True)
class StepTimes:
    """Seconds of one training step."""

    wait_s: float
    """Waiting for the batch."""
    train_s: float
    step_s: float
    """All of it, publication included."""


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
    """Owned by the driver's event loop. ``clock`` gives monotonic seconds."""

    def __init__(
        self,
        metrics: MetricsLog,
        progress: Progress,
        gate: AdmissionGate,
        pool: EnginePool,
        engine_restarts: Callable[[], int],
        clock: Callable[[], float] = time.monotonic,
        started: float | None = None,
        resumed: int = 0,
        trace: TraceLog | None = None,
    ) -> None:
        """``started``: when the run began, by ``clock`` (now, if not given). ``resumed``: earlier starts."""
        self._resumed = resumed
        self._trace = trace
        self._metrics = metrics
        self._progress = progress
        self._gate = gate
        self._pool = pool
        self._engine_restarts = engine_restarts
        self._clock = clock
        self._totals = _Totals()
        self._accuracy: dict[int, float] = {}
        self._shown_accuracy: float | None = None
        self._started = clock() if started is None else started
        self._training_began: float | None = None
        self._training_ended: float | None = None
        self._last_step = (self._started, 0)
        self._checkpoint_stall: dict[str, float] = {}
        self._lost: dict[Loss, list[int]] = {loss: [] for loss in Loss}
        """Lengths of what was lost since the last step."""

    def training_begins(self) -> None:
        """Admission is open from now on."""
        self._training_began = self._clock()
        self._last_step = (self._training_began, self._pool.tokens_generated)

    def training_ends(self) -> None:
        self._training_ended = self._clock()

    def evaluated(self, version: int, accuracy: float, response_length: float) -> None:
        """Held-out results of ``version``; measured beside training, they may hold tokens of a newer one."""
        self._accuracy[version] = self._shown_accuracy = accuracy
        self._metrics.log(version, {"eval/accuracy": accuracy, "eval/response_length": response_length})

    def note(self, text: str) -> None:
        """Tell the user."""
        self._progress.note(text)

    def episode_failed(self, prompt: Prompt, attempt: int, error: Exception) -> None:
        self._totals.episode_retries += 1
        if self._totals.episode_retries <= 3:
            self._progress.note(
                f"episode of prompt {prompt.id}, attempt {attempt}: {type(error).__name__}: {error}"
            )

    def checkpoint_taken(self, stall_s: float) -> None:
        """Training has waited so long for the state of the trainer to be copied."""
        self._checkpoint_stall = {"perf/checkpoint_stall_s": stall_s}

    def lost(self, loss: Loss, trajectories: Sequence[Trajectory]) -> None:
        """A group has ended untrained; ``trajectories``: what was finished of it."""
        self._lost[loss] += [trajectory.sampled_length for trajectory in trajectories]

    def step(self, groups: list[Group], result: StepResult, report: PublishReport, times: StepTimes) -> None:
        """A training step on ``groups`` has produced and published ``result.version``."""
        trajectories = [trajectory for group in groups for trajectory in group.trajectories]
        rewards = np.array([t.reward for t in trajectories])
        turns = [reward for t in trajectories for _, reward in t.turn_rewards]
        now, generated = self._clock(), self._pool.tokens_generated
        then, before = self._last_step
        self._last_step = (now, generated)
        tokens_per_s = (generated - before) / max(now - then, 1e-9)
        staleness = self._staleness(trajectories, result.version - 1)
        totals, counts = self._totals, self._gate.counts
        totals.steps += 1
        totals.wait_s += times.wait_s
        totals.tokens_trained += int(result.metrics["train/tokens"])
        totals.stalls_s.append(report.stall_s)
        totals.retractions += sum(t.retractions for t in trajectories)
        lengths = [t.sampled_length for t in trajectories]
        totals.tokens_masked += sum(lengths) - sum(t.response_length for t in trajectories)
        lost = {f"lost/{loss}_lengths": found for loss, found in self._lost.items() if found}
        self._lost = {loss: [] for loss in Loss}
        self._metrics.log(
            result.version,
            {
                "reward/mean": rewards.mean(),
                "reward/std": rewards.std(),
                **({"reward/turn_mean": np.mean(turns)} if turns else {}),
                **staleness,
                "rollout/response_length": np.mean(lengths),
                "rollout/response_length_max": max(lengths),
                "rollout/response_lengths": lengths,
                "rollout/truncated_fraction": np.mean([t.finish is Finish.LENGTH for t in trajectories]),
                "rollout/groups_admitted": counts.admitted,
                "rollout/groups_trained": counts.trained,
                "rollout/groups_filtered": counts.filtered,
                "rollout/groups_expired": counts.expired,
                "rollout/groups_failed": counts.failed,
                "rollout/groups_in_flight": counts.in_flight - self._gate.ready,
                "rollout/requests_running": self._pool.in_use,
                "rollout/requests_limit": self._pool.limit,
                "rollout/groups_generating": self._gate.in_state(State.GENERATING),
                "rollout/groups_judging": self._gate.in_state(State.JUDGING),
                "rollout/groups_ready": self._gate.ready,
                "rollout/episode_retries": totals.episode_retries,
                "rollout/retractions": totals.retractions,
                "rollout/requests_resent": self._pool.requests_resent,
                "train/step": self._gate.step,
                **{f"lost/{loss}": self._gate.losses[loss] for loss in Loss},
                "lost/tokens_masked": totals.tokens_masked,
                **lost,
                **self._checkpoint_stall,
                **result.metrics,
                "perf/step_s": times.step_s,
                "perf/train_s": times.train_s,
                "perf/train_tokens_per_s": result.metrics["train/tokens"] / times.train_s,
                "perf/train_tflops": result.metrics["train/tflop"] / times.train_s,
                "perf/generate_tokens_per_s": tokens_per_s,
                "perf/weight_update_s": report.total_s,
                "perf/weight_update_stall_s": report.stall_s,
                "perf/weight_bytes": report.bytes_sent,
                "perf/weight_gb_per_s": report.bytes_sent / max(report.total_s, 1e-9) / 1e9,
                "perf/trainer_wait_s": times.wait_s,
                "perf/trainer_wait_fraction": times.wait_s / times.step_s,
                "perf/engine_restarts": self._engine_restarts(),
            },
        )
        self._checkpoint_stall = {}
        if self._trace:
            tokens = sum(len(t.tokens_T) for t in trajectories)
            self._trace.write("step", version=result.version, tokens=tokens, end_s=now, **asdict(times))
            self._trace.write("publish", end_s=now, **asdict(report))
        self._progress.step(
            self._gate.step,
            reward=float(rewards.mean()),
            head_lag=int(staleness["staleness/head_max"]),
            tokens_per_s=tokens_per_s,
            accuracy=self._shown_accuracy,
        )
        self._shown_accuracy = None

    def _staleness(self, trajectories: list[Trajectory], version: int) -> dict:
        """Lags of a batch that was trained from ``version``."""
        # A workflow may give a trajectory without a single token to train.
        heads = np.array([version - t.oldest_version for t in trajectories if t.response_length] or [0])
        lags: Counter[int] = Counter()
        for trajectory in trajectories:
            lags.update((version - trajectory.versions_T[trajectory.loss_mask_T]).tolist())
        several = sum(t.n_versions > 1 for t in trajectories)
        totals = self._totals
        totals.trajectories += len(trajectories)
        totals.multi_version += several
        totals.head_lag_sum += int(heads.sum())
        totals.head_lag_max = max(totals.head_lag_max, int(heads.max()))
        return {
            "staleness/head_max": int(heads.max()),
            "staleness/head_mean": heads.mean(),
            "staleness/token_mean": sum(lag * n for lag, n in lags.items()) / max(lags.total(), 1),
            "staleness/token_lag": dict(lags),
            "rollout/multi_version_fraction": several / len(trajectories),
        }

    def summary(self, end: Literal["done", "failed", "stopped"]) -> RunSummary:
        """The account of the run so far."""
        totals, counts = self._totals, self._gate.counts
        now = self._clock()
        training_s = 0.0
        if self._training_began is not None:
            training_s = (
                now if self._training_ended is None else self._training_ended
            ) - self._training_began
        version = self._gate.version
        trained = totals.trajectories > 0
        return RunSummary(
            exit=end,
            steps=totals.steps,
            wall_s=now - self._started,
            training_s=training_s,
            accuracy_before=self._accuracy.get(0),
            accuracy_after=self._accuracy.get(version) if version else None,
            head_lag_max=totals.head_lag_max if trained else None,
            head_lag_mean=totals.head_lag_sum / totals.trajectories if trained else None,
            multi_version_fraction=totals.multi_version / totals.trajectories if trained else None,
            tokens_generated=self._pool.tokens_generated,
            tokens_trained=totals.tokens_trained,
            versions=version,
            resumed=self._resumed,
            stall_s_mean=float(np.mean(totals.stalls_s)) if trained else None,
            engine_restarts=self._engine_restarts(),
            trainer_wait_fraction=min(1.0, totals.wait_s / training_s) if training_s else None,
            groups=GroupTotals(**asdict(counts)),
        )
