"""One simulated run: the loops of a real one, on models of everything that they wait for."""

import asyncio
from collections.abc import Callable
from typing import Any

from slipstream.backend.driver.devices import Separate
from slipstream.backend.driver.loops import Loops, collection_loop, training_loop
from slipstream.backend.driver.served_weights import ServedWeights
from slipstream.backend.simulate import clock
from slipstream.backend.simulate.account import Account, Outcome
from slipstream.backend.simulate.failures import Failures
from slipstream.backend.simulate.gpu_split import GpuSplit, model_of
from slipstream.backend.simulate.pool import SimulatedPool
from slipstream.backend.simulate.schedules import Schedule
from slipstream.backend.simulate.trainer import SimulatedTrainer, TimeShared
from slipstream.backend.simulate.workload import (
    SimulatedReward,
    SimulatedStream,
    SimulatedWorkflow,
    Workload,
    held_out_prompts,
)
from slipstream.configs.schema import RunConfig
from slipstream.rollout.collect.gate import AdmissionGate, StalledRun
from slipstream.rollout.collect.intake import Intake
from slipstream.rollout.collect.journal import NoJournal
from slipstream.rollout.collect.time_limit import TimeLimit
from slipstream.rollout.plugins import build
from slipstream.rollout.workflow import WorkflowContext


class _NoCheckpoints:
    async def step_done(self, gate: AdmissionGate) -> None:
        """Checkpoints are written beside training."""


class SimulationStalled(RuntimeError):
    """A real run would end here: no batch comes, or nothing but failures. Says who waits where."""


class World:
    """A run of ``config.run.steps`` training steps; ``run`` it once."""

    pool: SimulatedPool
    trainer: SimulatedTrainer

    def __init__(
        self, config: RunConfig, schedule: Schedule, layout: GpuSplit, workload: Workload, held_out: int = 0
    ) -> None:
        """``held_out``: prompts of the evaluations that ``eval.every`` asks for; 0: there are none."""
        self._config = config if held_out else config.model_copy(update={"eval": None})
        self._schedule = schedule
        self._layout = layout
        self._workload = workload
        self._held_out = held_out
        self._waiting = ""

    def run(self, on_advance: Callable[[float], None] | None = None) -> Outcome:
        """Raises SimulationStalled when a real run would end with StalledRun, and Deadlock for a bug.

        ``on_advance`` is called with each new time, while ``pool`` and ``trainer`` are still as they were.
        """
        try:
            return clock.run(self._run(), on_advance)
        except ExceptionGroup as errors:
            stalled, _ = errors.split(StalledRun)
            if stalled is None:
                raise
            raise SimulationStalled(f"{_first(stalled)}; {self._waiting}") from None

    async def _run(self) -> Outcome:
        rollout, model, workload = self._config.rollout, model_of(self._config), self._workload
        self.pool = SimulatedPool(self._layout.engines, model.engine, workload, rollout.max_concurrent)
        interrupt, shared = self._schedule.interrupt, self._layout.shared
        self.trainer = SimulatedTrainer(
            model, self._layout.trainer_gpus, self.pool, None if shared else interrupt
        )
        pool: Any = self.pool
        trainer: Any = self.trainer
        devices: Any = TimeShared(trainer, pool, interrupt) if shared else Separate(pool)
        weights: Any = ServedWeights(trainer, pool, devices)
        failures = Failures(model.failures, self.pool, weights, workload)
        account = Account()
        control = self._schedule.control(rollout, self._config.run.steps)
        stream: Any = SimulatedStream()
        generator: Any = self.pool
        tokenizer: Any = None  # no token is looked at
        context = WorkflowContext(generator, tokenizer, SimulatedReward(), rollout.sampling)
        parts: dict[str, Any] = {
            "gate": AdmissionGate(control, Intake(stream), NoJournal(), account.lost),
            "journal": NoJournal(),
            "pool": self.pool,
            "trainer": self.trainer,
            "weights": weights,
            "supervisor": failures,
            "workflow": SimulatedWorkflow(workload),
            "context": context,
            "group_filter": build(rollout.group_filter) if rollout.group_filter else None,
            "recorder": account,
            "checkpoints": _NoCheckpoints(),
            "episode_limit": TimeLimit(rollout.episode_timeout_s),
        }
        held_out: Any = held_out_prompts(self._held_out)
        loops = Loops(config=self._config, held_out=held_out, **parts)
        async with asyncio.TaskGroup() as tasks:
            beside = [tasks.create_task(collection_loop(loops)), tasks.create_task(failures.run())]
            try:
                await training_loop(loops)
            except* StalledRun:
                self._waiting = clock.waiting(asyncio.get_running_loop())
                raise
            outcome = account.outcome(
                control, self.pool, self.trainer, failures, asyncio.get_running_loop().time()
            )
            for task in beside:
                task.cancel()
        return outcome


def _first(error: BaseException) -> BaseException:
    """The error itself, out of the groups around it."""
    return _first(error.exceptions[0]) if isinstance(error, BaseExceptionGroup) else error
