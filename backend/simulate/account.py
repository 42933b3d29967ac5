"""Statistics and outcome of a simulated run."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace

from slipstream.backend.monitor.status import RunStatus, TrainedStep
from slipstream.backend.simulate.simulated_failures import ENGINE, Failures
from slipstream.backend.simulate.simulated_pool import SimulatedPool
from slipstream.backend.simulate.simulated_trainer import SimulatedTrainer
from slipstream.rollout.control.core import RolloutControl
from slipstream.rollout.control.ends import GroupCounts, Loss
from slipstream.rollout.tokens.trajectory import TrajectoryHeader


@dataclass(frozen=True)
class EngineSeconds:
    """Seconds that all engines together have spent in each way."""

    decode: float
    prefill: float
    paused: float
    idle: float
    down: float
    requests: float
    """Seconds of decoding, times the requests that ran meanwhile."""

    def __sub__(self, earlier: "EngineSeconds") -> "EngineSeconds":
        return EngineSeconds(
            **{each.name: getattr(self, each.name) - getattr(earlier, each.name) for each in fields(self)}
        )

    @property
    def total(self) -> float:
        return self.decode + self.prefill + self.paused + self.idle + self.down


@dataclass(frozen=True)
class Outcome:
    """One simulated run. Times in virtual seconds."""

    steps: int
    makespan_s: float
    """From the first admission to the last publication."""
    step_s: tuple[float, ...]
    trajectories: int
    """Trained ones."""
    tokens_trained: int
    """Those that carried loss."""
    tokens_generated: int
    """Also for what was never trained."""
    tokens_masked: int
    counts: GroupCounts
    losses: dict[Loss, int]
    """Groups."""
    tokens_lost: dict[Loss, int]
    """Tokens of the finished completions in lost groups."""
    head_lags: dict[int, int]
    """Trained trajectories by head lag."""
    token_lags: dict[int, int]
    train_s: float
    """Seconds of training that the weights at the end are made of."""
    undone_s: float
    """Seconds of training that a failure of the trainer has undone or cut off."""
    publish_s: float
    wait_s: float
    engine_s: EngineSeconds
    retractions: int
    requests_resent: int
    failed_attempts: int
    failures_by_kind: dict[str, int]
    """Parts that failed: engines, their nodes, the trainer, its nodes."""
    failures: tuple[str, ...]
    """The first of them, as messages."""

    def since(self, earlier: "Outcome") -> "Outcome":
        """Return the speeds and the shares of time after ``earlier``; what is counted is of the whole run."""
        return replace(
            self,
            steps=self.steps - earlier.steps,
            makespan_s=self.makespan_s - earlier.makespan_s,
            step_s=self.step_s[earlier.steps :],
            trajectories=self.trajectories - earlier.trajectories,
            tokens_trained=self.tokens_trained - earlier.tokens_trained,
            train_s=self.train_s - earlier.train_s,
            undone_s=self.undone_s - earlier.undone_s,
            publish_s=self.publish_s - earlier.publish_s,
            wait_s=self.wait_s - earlier.wait_s,
            engine_s=self.engine_s - earlier.engine_s,
        )

    @property
    def engine_failures(self) -> int:
        """Engines that failed by themselves."""
        return self.failures_by_kind.get(ENGINE, 0)

    @property
    def effective(self) -> float:
        """Share of the time in which the trainer trained what the weights at the end are made of."""
        return self.train_s / self.makespan_s

    @property
    def trainer_idle(self) -> float:
        """Share of the time in which the trainer did not train: it waited for a batch, or was publishing."""
        return 1 - (self.train_s + self.undone_s) / self.makespan_s

    @property
    def engine_idle(self) -> float:
        """Share of the engines' time in which nothing ran, or they were paused for an update."""
        seconds = self.engine_s
        return (seconds.idle + seconds.paused + seconds.down) / seconds.total

    @property
    def running(self) -> float:
        """Mean number of requests that run on an engine while it decodes."""
        return self.engine_s.requests / self.engine_s.decode if self.engine_s.decode else 0.0

    @property
    def tokens_per_s(self) -> float:
        """Trained tokens."""
        return self.tokens_trained / self.makespan_s

    @property
    def trajectories_per_s(self) -> float:
        """Trained ones."""
        return self.trajectories / self.makespan_s

    @property
    def max_lag(self) -> int:
        return max(self.head_lags, default=0)

    @property
    def mean_lag(self) -> float:
        total = sum(self.head_lags.values())
        return sum(lag * number for lag, number in self.head_lags.items()) / total if total else 0.0

    @property
    def groups_wasted(self) -> float:
        """Share of the ended groups that were neither trained nor filtered on purpose."""
        lost = self.counts.expired + self.counts.failed
        return lost / max(self.counts.trained + lost, 1)

    @property
    def tokens_wasted(self) -> float:
        """Share of the generated tokens that were never trained; those of filtered groups count."""
        return 1 - self.tokens_trained / max(self.tokens_generated, 1)


@dataclass
class Account:
    """Keeps the statistics of a simulated run: the listener of its loops."""

    step_s: list[float] = field(default_factory=list)
    wait_s: float = 0.0
    publish_s: float = 0.0
    trajectories: int = 0
    tokens_trained: int = 0
    tokens_masked: int = 0
    tokens_lost: Counter[Loss] = field(default_factory=Counter)
    head_lags: Counter[int] = field(default_factory=Counter)
    token_lags: Counter[int] = field(default_factory=Counter)
    retractions: int = 0
    failed_attempts: int = 0
    failures: list[str] = field(default_factory=list)
    _before: list[tuple[int, int, int]] = field(default_factory=list[tuple[int, int, int]])
    """Trajectories, trained and masked tokens before each step that the present weights are made of."""

    def step(self, step: TrainedStep, status: RunStatus) -> None:
        lags = step.lags
        self._before.append((self.trajectories, self.tokens_trained, self.tokens_masked))
        for trajectory in step.trajectories:
            versions = trajectory.trained_tokens
            trained = sum(versions.values())
            self.trajectories += 1
            self.retractions += trajectory.retractions
            self.tokens_trained += trained
            self.tokens_masked += trajectory.sampled_length - trained
            if versions:
                self.head_lags[max(lags[version] for version in versions)] += 1
                for version, tokens in versions.items():
                    self.token_lags[lags[version]] += tokens
        self.step_s.append(step.times.step_s)
        self.wait_s += step.times.wait_s
        self.publish_s += step.report.total_s

    def went_back(self, step: int) -> None:
        """Count the trajectories of undone steps as untrained. Lags of their tokens stay counted."""
        if len(self._before) > step:
            self.trajectories, self.tokens_trained, self.tokens_masked = self._before[step]
            del self._before[step:]

    def lost(self, loss: Loss, trajectories: Sequence[TrajectoryHeader], reason: str = "") -> None:
        """Groups are counted by the control core."""
        self.tokens_lost[loss] += sum(trajectory.sampled_length for trajectory in trajectories)

    def attempt_failed(self, prompt: int, attempt: int, error: str) -> None:
        self.failed_attempts += 1
        if len(self.failures) < 3:
            self.failures.append(f"prompt {prompt}, attempt {attempt}: {error}")

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
        """Evaluations matter for the time that they take from the engines."""

    def checkpoint_taken(self, stall_s: float) -> None:
        """Do nothing: checkpoints are not simulated."""

    def checkpoint_committed(self, step: int, seconds: float) -> None:
        """Do nothing: checkpoints are not simulated."""

    def note(self, text: str) -> None:
        self.failures.append(text)

    def outcome(
        self,
        control: RolloutControl,
        pool: SimulatedPool,
        trainer: SimulatedTrainer,
        failures: Failures,
        now: float,
    ) -> Outcome:
        """Return the outcome of a run that began at second 0 and has ended ``now``."""
        pool.settle()
        engines = pool.engines
        return Outcome(
            steps=len(self.step_s),
            makespan_s=now,
            step_s=tuple(self.step_s),
            trajectories=self.trajectories,
            tokens_trained=self.tokens_trained,
            tokens_generated=pool.tokens_generated,
            tokens_masked=self.tokens_masked,
            counts=control.counts,
            losses={loss: control.losses[loss] for loss in Loss},
            tokens_lost={loss: self.tokens_lost[loss] for loss in Loss},
            head_lags=dict(sorted(self.head_lags.items())),
            token_lags=dict(sorted(self.token_lags.items())),
            train_s=trainer.useful_s,
            undone_s=trainer.undone_s,
            publish_s=self.publish_s,
            wait_s=self.wait_s,
            engine_s=EngineSeconds(
                decode=sum(engine.decode_s for engine in engines),
                prefill=sum(engine.prefill_s for engine in engines),
                paused=sum(engine.paused_s for engine in engines),
                idle=sum(engine.idle_s for engine in engines),
                down=sum(engine.down_s for engine in engines),
                requests=sum(engine.request_s for engine in engines),
            ),
            retractions=self.retractions,
            requests_resent=pool.requests_resent,
            failed_attempts=self.failed_attempts,
            failures_by_kind=dict(failures.counts),
            failures=tuple(self.failures),
        )
