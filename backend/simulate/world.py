"""One simulated run: the loops of a real one, on models of everything that they wait for."""

import asyncio
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from typing import cast

from slipstream.backend.driver.loops.collection import collection_loop
from slipstream.backend.driver.loops.evaluation import Evaluation
from slipstream.backend.driver.loops.training import StepPublished, Steps, training_loop, training_steps
from slipstream.backend.driver.ports import RunPosition
from slipstream.backend.driver.processes.devices import Devices, Separate
from slipstream.backend.driver.processes.restart_limits import trainer_limit
from slipstream.backend.driver.start.feedback import Feedback
from slipstream.backend.driver.start.resume import RestoredCollection
from slipstream.backend.driver.weights.revival import Revival, TrainerGone
from slipstream.backend.driver.weights.rewind import Rewind
from slipstream.backend.driver.weights.served_weights import ServedWeights
from slipstream.backend.monitor.status import RunStatus
from slipstream.backend.simulate import clock
from slipstream.backend.simulate.account import Account, Outcome
from slipstream.backend.simulate.collector import NAME, Asked, Link, SimulatedRecord
from slipstream.backend.simulate.gpu_split import GpuSplit, model_of
from slipstream.backend.simulate.schedules import Schedule
from slipstream.backend.simulate.simulated_episodes import (
    NoReward,
    NumberedGenerator,
    SimulatedJudge,
    SimulatedTokenizer,
    SimulatedWorkflow,
)
from slipstream.backend.simulate.simulated_failures import ENGINE, Failures, SimulatedCheckpoints
from slipstream.backend.simulate.simulated_ledger import SimulatedLedger
from slipstream.backend.simulate.simulated_pool import SimulatedPool
from slipstream.backend.simulate.simulated_trainer import SimulatedTrainer, TimeShared
from slipstream.backend.simulate.workload import HELD_OUT, SimulatedStream, Workload
from slipstream.configs.schema import RunConfig
from slipstream.rollout.collection.collector.episodes import Episodes
from slipstream.rollout.collection.collector.evaluation import Evaluations
from slipstream.rollout.collection.collector.groups import GroupCollector, NamedFilter, WholeGroups
from slipstream.rollout.collection.collector.outbox import Outbox
from slipstream.rollout.collection.driver.assignments import Assignments
from slipstream.rollout.collection.driver.batches import Batches
from slipstream.rollout.collection.driver.gate import AdmissionGate, StalledRun
from slipstream.rollout.collection.driver.group_ledger import NoLedger
from slipstream.rollout.collection.driver.intake import Intake
from slipstream.rollout.collection.driver.questions import EvaluationTasks
from slipstream.rollout.collection.driver.restored import take_up
from slipstream.rollout.control.filters import GroupFilter
from slipstream.rollout.ledger.recovery import Recovered
from slipstream.rollout.system.plugins import build
from slipstream.rollout.system.restarts import Restarts
from slipstream.rollout.system.time_limit import TimeLimit
from slipstream.rollout.tokens.trajectory import Prompt, Trajectory
from slipstream.rollout.workflow import WorkflowContext


class _NoCheckpoints:
    async def step_done(self, run: RunPosition) -> None:
        """Do nothing: checkpoints are written beside training."""


class SimulationStalled(RuntimeError):
    """A real run would end here: no batch comes, or nothing but failures. Says who waits where."""


@dataclass(frozen=True)
class MeasuredSteps:
    """Steps out of the middle of a run: ``measured`` ones after the first ``skipped``."""

    skipped: int
    measured: int


class World:
    """A run of ``config.run.steps`` training steps; ``run`` it once."""

    pool: SimulatedPool
    trainer: SimulatedTrainer
    ledger: SimulatedLedger | NoLedger
    """A ledger where the trainer may fail."""

    def __init__(
        self, config: RunConfig, schedule: Schedule, split: GpuSplit, workload: Workload, held_out: int = 0
    ) -> None:
        """``held_out``: number of prompts of each evaluation that ``eval.every`` asks for."""
        self._config = config
        self._schedule = schedule
        self._split = split
        self._workload = workload
        self._held_out = held_out
        self._waiting = ""

    def run(
        self, on_advance: Callable[[float], None] | None = None, window: MeasuredSteps | None = None
    ) -> Outcome:
        """Simulate the run, or with a ``window`` its steps up to the end of the window, which are measured.

        ``on_advance`` is called with each new time, while ``pool`` and ``trainer`` are still as they were.
        Raises SimulationStalled when a real run would end with StalledRun, and Deadlock for a bug.
        """
        try:
            return clock.run(self._run(window), on_advance)
        except ExceptionGroup as errors:
            stalled, _ = errors.split((StalledRun, TrainerGone))
            if stalled is None:
                raise
            raise SimulationStalled(f"{_first(stalled)}; {self._waiting}") from None

    async def _run(self, window: MeasuredSteps | None) -> Outcome:
        config, model, workload = self._config, model_of(self._config), self._workload
        rollout, interrupt = config.rollout, self._schedule.interrupt
        account, outbox = Account(), Outbox(flush_s=0)
        control = self._schedule.control(rollout, config.run.total_steps)
        ledger = SimulatedLedger() if model.failures.of_trainer else NoLedger()
        gate = AdmissionGate(control, Intake(SimulatedStream()), ledger, account)
        batches = Batches(gate, ledger, account.note)
        pool = SimulatedPool(self._split.engines, model.engine, workload, rollout.max_concurrent)
        shared = self._split.shared
        trainer = SimulatedTrainer(model, self._split.trainer_gpus, pool, None if shared else interrupt)
        devices: Devices = TimeShared(trainer, pool, interrupt) if shared else Separate()
        weights = ServedWeights(trainer, pool, devices, batches)
        failures = Failures(config, self._split, pool, trainer, weights, workload)
        context = partial(
            WorkflowContext, tokenizer=SimulatedTokenizer(), reward=NoReward(), sampling=rollout.sampling
        )
        limit = TimeLimit(rollout.episode_timeout_s)
        episodes = Episodes(SimulatedWorkflow(workload), rollout, _unchecked, limit, outbox.attempt_failed)
        judge = SimulatedJudge()
        groups = GroupCollector(
            outbox=outbox,
            record=partial(SimulatedRecord, pool, outbox, isinstance(ledger, SimulatedLedger)),
            context=lambda record, place: context(record, place=place),
            episodes=episodes,
            judge=judge,
            samples=rollout.n_samples_per_prompt,
            group_filter=_filter(config),
        )
        greedy = context(NumberedGenerator(pool, 0, greedy=True))
        questions = EvaluationTasks()
        questions.joined(NAME, Asked(Evaluations(outbox, greedy, episodes, judge)))
        assignments = Assignments(
            gate, ledger, account, lambda _: rollout.max_concurrent, rollout.n_samples_per_prompt
        )
        link = Link(groups, assignments, questions)
        assignments.joined(NAME, link)
        evaluation = None
        if config.eval is not None and self._held_out:
            evaluation = Evaluation(
                config.eval,
                [Prompt(HELD_OUT + index, "") for index in range(self._held_out)],
                questions,
                account,
                step_of=lambda version: gate.core.versions.updates(version),
            )
        self.pool, self.trainer, self.ledger = pool, trainer, ledger
        checkpoints, revival = _NoCheckpoints(), None
        if isinstance(ledger, SimulatedLedger):
            checkpoints = SimulatedCheckpoints(config, ledger)

            def went_back() -> None:
                trainer.undone(gate.core.step)
                account.went_back(gate.core.step)

            rewind = Rewind(
                rollout,
                partial(_restored, config, self._schedule, ledger),
                ledger,
                gate,
                batches,
                assignments,
                account.note,
                when_done=went_back,
            )
            clock_s = asyncio.get_running_loop().time
            revival = Revival(
                trainer,
                weights,
                checkpoints,
                rewind,
                step=lambda: gate.core.step,
                restarts=Restarts(trainer_limit(config), clock_s),
                note=account.note,
            )

        def status() -> RunStatus:
            return RunStatus(
                version=gate.core.version,
                step=gate.core.step,
                counts=gate.core.counts,
                losses=gate.core.losses,
                states=dict(gate.core.states),
                tokens_generated=pool.tokens_generated,
                requests_running=0,
                requests_limit=rollout.max_concurrent,
                requests_resent=pool.requests_resent,
                engine_restarts=failures.counts[ENGINE],
                collector_restarts=0,
            )

        def outcome() -> Outcome:
            now = asyncio.get_running_loop().time()
            return account.outcome(gate.core, pool, trainer, failures, now)

        before: list[Outcome] = []
        async with asyncio.TaskGroup() as tasks:
            beside = [
                tasks.create_task(collection_loop(gate, assignments)),
                tasks.create_task(outbox.run(link.send, link.status)),
                tasks.create_task(failures.run()),
            ]
            if revival is not None:
                beside.append(tasks.create_task(revival.run()))
            try:
                steps = training_steps(
                    config.run, batches, weights, checkpoints, account, status, _read, Feedback()
                )
                async with aclosing(steps):
                    shown = steps
                    if window is not None:
                        shown = _up_to(window, steps, lambda: before.append(outcome()))
                    await training_loop(shown, config.run, batches, evaluation)
            except* StalledRun:
                self._waiting = clock.waiting(asyncio.get_running_loop())
                raise
            after = outcome()
            for task in beside:
                task.cancel()
        return after.since(before[0]) if before else after


async def _up_to(window: MeasuredSteps, steps: Steps, at_begin: Callable[[], None]) -> Steps:
    """Yield the steps up to the end of the window, and call ``at_begin`` before the first one in it."""
    done = 0
    async for event in steps:
        yield event
        if not isinstance(event, StepPublished):
            continue
        done += 1
        if done == window.skipped:
            at_begin()
        if done == window.skipped + window.measured:
            return


def _restored(
    config: RunConfig, schedule: Schedule, ledger: SimulatedLedger, recovered: Recovered, served: int
) -> RestoredCollection:
    """Return the collection with which the run goes on, as ``start.resume.restore_collection`` does."""
    rollout, stream = config.rollout, SimulatedStream(recovered.position)
    control = schedule.control(rollout, config.run.total_steps, recovered, served)
    groups = take_up(recovered.open, control, ledger.discarded, stream, rollout.n_samples_per_prompt)
    for group in recovered.requeued:
        control.restore_requeued(group.id, group.requeues)
    positions = [(group.id, group.position) for group in (*recovered.open, *recovered.requeued)]
    return RestoredCollection(control, Intake(stream, positions), groups)


async def _read(refs: list[bytes]) -> list[bytes]:
    """Return nothing for each trajectory: it has no tokens."""
    return [b""] * len(refs)


def _filter(config: RunConfig) -> NamedFilter | None:
    settings = config.rollout.group_filter
    if settings is None:
        return None
    return NamedFilter(settings.path, WholeGroups(cast(GroupFilter, build(settings))))


def _first(error: BaseException) -> BaseException:
    """Return the error itself, out of the groups around it."""
    return _first(error.exceptions[0]) if isinstance(error, BaseExceptionGroup) else error


def _unchecked(trajectory: object) -> Trajectory:
    """Return the trajectory of a simulated workflow, which needs no check."""
    assert isinstance(trajectory, Trajectory)
    return trajectory
