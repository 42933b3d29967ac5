"""The loops of a run. They share one event loop and meet only in the admission gate and the engine pool.

collection:  slot -> prompt -> n episodes -> group            (never waits for training, only for slots)
training:    oldest ready groups -> step -> publish -> free the slots
serving:     keeps every engine on the current version                (slipstream.rollout.engine.supervisor)
"""

import asyncio
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from slipstream.backend.batch.train_batch import TrainBatch
from slipstream.backend.driver.checkpointing import Checkpoints
from slipstream.backend.driver.served_weights import ServedWeights
from slipstream.backend.driver.trainer_client import Trainer
from slipstream.backend.monitor.recorder import Recorder, StepTimes
from slipstream.configs.schema import RunConfig, SamplingConfig
from slipstream.rollout.collect.gate import AdmissionGate
from slipstream.rollout.collect.intake import Assignment
from slipstream.rollout.collect.journal import Journal
from slipstream.rollout.collect.journaled import JournaledGenerator, WatchedReward
from slipstream.rollout.collect.time_limit import TimeLimit
from slipstream.rollout.control.filters import GroupFilter
from slipstream.rollout.engine.pool import EnginePool, NoEngine
from slipstream.rollout.engine.supervisor import Supervisor
from slipstream.rollout.ledger.database import LedgerError
from slipstream.rollout.trajectory import Completion, Group, Prompt, Trajectory
from slipstream.rollout.workflow import Workflow, WorkflowContext


@dataclass
class Loops:
    """What the loops work on. Built by ``slipstream.backend.driver.run``."""

    config: RunConfig
    gate: AdmissionGate
    journal: Journal
    pool: EnginePool
    trainer: Trainer
    weights: ServedWeights
    supervisor: Supervisor
    held_out: list[Prompt]
    workflow: Workflow
    context: WorkflowContext
    group_filter: GroupFilter | None
    recorder: Recorder
    checkpoints: Checkpoints
    episode_limit: TimeLimit


# ---- training


async def training_loop(loops: Loops) -> None:
    """Train on batches and publish every new version, until all steps are done or the gate is ended."""
    running: list[asyncio.Task[None]] = []
    async with asyncio.TaskGroup() as evaluations:
        while loops.gate.step < loops.config.run.steps:
            asked = asyncio.get_running_loop().time()
            groups = await loops.gate.batch(loops.config.run.batch_timeout_s)
            if not groups:
                for evaluation in running:
                    evaluation.cancel()
                return
            version = await training_step(loops, groups, asked)
            await loops.checkpoints.step_done(loops.gate)
            if is_evaluated(loops.config, loops.gate.step):
                running.append(evaluations.create_task(evaluate_and_record(loops, version)))


async def training_step(loops: Loops, groups: list[Group], asked: float) -> int:
    """One step on a batch that was ``asked`` for then, one published version; that version."""
    clock = asyncio.get_running_loop().time
    waited_s = clock() - asked
    await loops.gate.step_begins()
    advance = await loops.weights.advance(as_batch(groups, loops.gate.version))
    for name, reason in advance.report.failed.items():
        loops.supervisor.condemn(name, reason)
    loops.gate.published(advance.version)
    times = StepTimes(wait_s=waited_s, train_s=advance.train_s, step_s=clock() - asked)
    loops.recorder.step(groups, advance.version, advance.metrics, advance.report, times)
    return advance.version


def as_batch(groups: list[Group], version: int) -> TrainBatch:
    """The trajectories of a batch of groups, in admission order."""
    return TrainBatch(
        version,
        tuple(trajectory for group in groups for trajectory in group.trajectories),
        np.repeat([group.id for group in groups], [len(group.trajectories) for group in groups]),
    )


# ---- collection


async def collection_loop(loops: Loops) -> None:
    """Start a group whenever there is a slot. Ends only by cancellation, and its groups with it."""
    running: dict[int, asyncio.Task[None]] = {}

    def abandon(id_: int) -> None:
        if id_ in running:
            running[id_].cancel()

    loops.gate.abandon = abandon
    async with asyncio.TaskGroup() as groups:
        while True:
            assignment = await loops.gate.slot()
            id_ = assignment.ticket.id
            running[id_] = task = groups.create_task(collect(loops, assignment))
            task.add_done_callback(lambda _, id_=id_: running.pop(id_))


async def collect(loops: Loops, assignment: Assignment) -> None:
    """One group, from its slot to ready, filtered or failed."""
    ticket, prompt, prior = assignment.ticket, assignment.prompt, assignment.prior
    n = loops.config.rollout.n_samples_per_prompt
    generating = set(range(n)).difference(prior.trajectories if prior else ())

    def judging(number: int) -> None:
        if number in generating:  # else it is judged again
            generating.remove(number)
            if not generating:
                loops.gate.judging(ticket)

    wanted = partial(loops.gate.is_open, ticket.id)
    tokenizer, sampling = loops.context.tokenizer, loops.context.sampling

    async def sample(number: int) -> Trajectory:
        if prior and number in prior.trajectories:
            return prior.trajectories[number]
        answers = prior.partials.get(number, {}) if prior else {}
        generator = JournaledGenerator(loops.pool, loops.journal, ticket.id, number, answers, wanted)
        reward = WatchedReward(loops.context.reward, partial(judging, number))
        context = WorkflowContext(generator, tokenizer, reward, sampling)
        trajectory = await episode(loops, prompt, context)
        loops.journal.trajectory(ticket.id, number, trajectory)
        return trajectory

    failure = None
    tasks: list[asyncio.Task[Trajectory]] = []
    loops.gate.generating(ticket)
    try:
        async with asyncio.TaskGroup() as episodes:
            tasks += [episodes.create_task(sample(number)) for number in range(n)]
        group = Group(ticket.id, prompt, ticket.version, tuple(task.result() for task in tasks))
        keep = kept(loops, group)
    except* EpisodeFailed as failures:
        failure = failures.exceptions[0]
    if failure is not None:
        finished = [task.result() for task in tasks if not task.cancelled() and task.exception() is None]
        loops.gate.failed(ticket, str(failure), finished)
    elif keep:
        await loops.gate.finished(group)
    else:
        loops.gate.filtered(group)


def kept(loops: Loops, group: Group) -> bool:
    """Whether the recipe's filter wants the group trained. What the filter raises is an EpisodeFailed."""
    if loops.group_filter is None:
        return True
    try:
        return loops.group_filter.keep(group)
    except Exception as error:  # user code
        path = loops.config.rollout.group_filter.path
        raise EpisodeFailed(f"prompt {group.prompt.id}: {path}: {type(error).__name__}: {error}") from error


class EpisodeFailed(RuntimeError):
    """An episode has failed as often as ``rollout.episode_attempts`` allows."""


async def episode(loops: Loops, prompt: Prompt, context: WorkflowContext) -> Trajectory:
    """One judged episode. Whatever a workflow or reward raises is a failed attempt, never a neutral score."""
    rollout = loops.config.rollout
    for attempt in range(1, rollout.episode_attempts + 1):
        try:
            with loops.episode_limit():
                trajectory = await loops.workflow.run(prompt, context)
            if trajectory.reward is None or not math.isfinite(trajectory.reward):
                raise ValueError(f"{rollout.workflow.path} gave the reward {trajectory.reward}")
            return trajectory
        except (NoEngine, LedgerError):
            raise
        except Exception as error:  # user code: whatever it raises, the episode has failed and is counted
            loops.recorder.episode_failed(prompt, attempt, error)
            last = error
    raise EpisodeFailed(f"prompt {prompt.id}: {type(last).__name__}: {last}")


# ---- evaluation


@dataclass(frozen=True)
class Greedy:
    """The pool as evaluation sees it: temperature 0."""

    pool: EnginePool

    async def generate(self, input_ids: Sequence[int], sampling: SamplingConfig) -> Completion:
        return await self.pool.generate(input_ids, sampling, greedy=True)


def is_evaluated(config: RunConfig, step: int) -> bool:
    """Whether the policy is evaluated while the run goes on; the last one is evaluated at the end."""
    every = config.eval.every if config.eval else 0
    return every > 0 and step % every == 0 and step < config.run.steps


async def evaluate_and_record(loops: Loops, version: int) -> None:
    """Evaluate what the engines serve. An evaluation that fails is told to the user, and the run goes on."""
    try:
        loops.recorder.evaluated(version, *await evaluate(loops))
    except* EpisodeFailed as failures:
        loops.recorder.note(f"no evaluation of version {version}: {failures.exceptions[0]}")


async def evaluate(loops: Loops) -> tuple[float, float]:
    """Mean reward and mean response length of greedy answers to the held-out prompts."""
    settings = loops.config.eval
    assert settings is not None
    sampling = loops.context.sampling
    if settings.max_new_tokens is not None:
        sampling = sampling.model_copy(update={"max_new_tokens": settings.max_new_tokens})
    context = replace(loops.context, generator=Greedy(loops.pool), sampling=sampling)
    async with asyncio.TaskGroup() as episodes:
        tasks = [episodes.create_task(episode(loops, prompt, context)) for prompt in loops.held_out]
    trajectories = [task.result() for task in tasks]
    rewards = [trajectory.reward for trajectory in trajectories]
    return float(np.mean(rewards)), float(np.mean([t.response_length for t in trajectories]))
