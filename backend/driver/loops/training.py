"""Training: ready groups in, policy versions out.

    batches.next ──► step_begins ──► weights: train ──► publish ──► listener.step ──► checkpoint, if due
        ▲            (ledger on disk)                      │                          evaluation, if due
        └─────────────── slots are free ◄──────────────────┘

``training_steps`` yields what becomes of each step. ``training_loop`` takes them all; an own loop
(``own_loop``) goes from one to the next when its user says so.

The loop waits for nothing but a batch (``run.batch_timeout_s``) and the trainer. Back-pressure on generation
is the number of slots: they become free when the version trained on their groups is published. Evaluations
and the writing of checkpoints go on beside the next steps. When the trainer has failed, the loop waits until
it is restored (``revival``), and goes on from the version that it then holds.

waits for       ``batches.next``, with ``run.batch_timeout_s``
unblocked by    ``gate.finished``, once a group is on disk; a turn of a live user that is ready, or the end of
                the wait for turns; ``batches.end``
waits for       ``batches.step_begins``: the ledger has the number of the new version
unblocked by    the ledger's writer thread (``Ledger.flushed``)
waits for       ``weights.trained`` and ``publish``
unblocked by    the trainer's answer, or its end (``TrainerLife.fail``); another move of the weights that ends
waits for       ``life.alive``, after the trainer has failed
unblocked by    ``Revival.run``, which restores it; ``batches.end``
"""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from slipstream.backend.batch.train_batch import EncodedBatch, TrainBatch
from slipstream.backend.cluster.trainer_failed import TrainerFailed
from slipstream.backend.cluster.waits import first_of
from slipstream.backend.driver.loops.evaluation import Evaluation
from slipstream.backend.driver.loops.hooked_batches import HookedBatches
from slipstream.backend.driver.ports import Checkpoints, ClientT, RunListener, RunPosition
from slipstream.backend.driver.start.feedback import Feedback
from slipstream.backend.driver.weights.served_weights import ServedWeights, TrainerLife
from slipstream.backend.driver.weights.skipped import SkippedUpdateLimit
from slipstream.backend.monitor.status import RunStatus, StepTimes, TrainedStep
from slipstream.configs.schema.run import RunSection
from slipstream.rollout.collection.driver.batches import Batches
from slipstream.rollout.collection.driver.collected_group import CollectedGroup
from slipstream.rollout.live.batches import LiveTrajectory

Read = Callable[[list[bytes]], Awaitable[list[bytes]]]


@dataclass(frozen=True)
class BatchTaken:
    """A batch that the next step trains on. The consumer of the steps may send another one back."""

    batch: EncodedBatch


@dataclass(frozen=True)
class StepTrained:
    """The batch was trained on, and its version is to be published."""

    metrics: Mapping[str, float]


@dataclass(frozen=True)
class StepPublished:
    """The new version is served."""

    version: int
    metrics: Mapping[str, float]


@dataclass(frozen=True)
class StepLost:
    """The trainer has failed in the step, which is to be done again with another batch."""

    error: TrainerFailed


StepEvent = BatchTaken | StepTrained | StepPublished | StepLost
Steps = AsyncGenerator[StepEvent, "TrainBatch | None"]
"""Each step as it comes: taken, trained and published, or lost instead of one of them."""


async def training_loop(
    steps: Steps, run: RunSection, batches: Batches, evaluation: Evaluation | None
) -> None:
    """Train and publish until ``run.steps`` steps are done or the batches were ended. Raises as ``steps``."""
    running: list[asyncio.Task[object]] = []
    async with asyncio.TaskGroup() as evaluations:
        async for event in steps:
            if not isinstance(event, StepPublished) or evaluation is None:
                continue
            if evaluation.is_due(batches.core.step, run.total_steps):
                running.append(evaluations.create_task(evaluation.run(event.version)))
        if batches.is_ended:
            for task in running:
                task.cancel()


async def training_steps(
    run: RunSection,
    batches: Batches,
    weights: ServedWeights[ClientT],
    checkpoints: Checkpoints,
    listener: RunListener,
    status: Callable[[], RunStatus],
    read: Read,
    feedback: Feedback,
    hooks: HookedBatches | None = None,
) -> Steps:
    """Yield what becomes of each step, until ``run.steps`` are done or the batches were ended.

    ``read`` returns the chunks of trajectories, given their references into the ledger. ``feedback`` passes
    on what a step measures to later ones. ``hooks`` see each batch before it is trained; None: the recipe
    names none.

    Raises HookProcessFailed, PluginFailed, and TooManySkippedUpdates when the trainer skips more updates than
    ``run.max_skipped_updates``.
    """
    clock = asyncio.get_running_loop().time
    skipped = SkippedUpdateLimit(run.max_skipped_updates, listener.note)
    while batches.core.step < run.total_steps and await _is_trainer_there(weights.life, batches):
        try:
            began = clock()
            groups = await _batch(run, batches, weights.life)
            if not (groups or batches.live):
                return
            waited_s = clock() - began
            await batches.step_begins()
            batch = await encoded(groups, batches, read)
            sources = _sources(groups)
            if hooks is not None:
                batch = await _hooked(hooks.begin(batch, groups, batches.core.step, waited_s), weights.life)
            batch = feedback.prepared(batch)
            changed = yield BatchTaken(batch)
            async with weights.trained(changed or batch, batches.next_version) as trained:
                feedback.observe(batch, trained.metrics)
                yield StepTrained(trained.metrics)
                report = await trained.publish()
            times = StepTimes(wait_s=waited_s, train_s=trained.train_s, step_s=clock() - began)
            step = TrainedStep(
                batch.headers,
                batch.lags or {},
                trained.version,
                trained.metrics,
                report,
                times,
                is_logged=hooks is not None and await hooks.has_logged(),
                sources=sources,
            )
            listener.step(step, status())
            skipped.add(batches.core.step, trained.skipped)
            await checkpoints.step_done(position_of(batches))
            yield StepPublished(trained.version, trained.metrics)
        except TrainerFailed as error:
            weights.life.fail(error)
            if batches.is_stepping:
                await batches.step_failed(str(error))
            yield StepLost(error)


def position_of(batches: Batches) -> RunPosition:
    """Return where the run stands, as its checkpoints record it."""
    core = batches.core
    return RunPosition(core.version, core.step, batches.prompts_drawn, core.counts)


def _sources(groups: Sequence[CollectedGroup]) -> list[str]:
    """Return the name of the source of each trajectory's prompt; nothing where there is one source."""
    names = [group.prompt.source for group in groups for _ in group.samples]
    return names if any(names) else []


async def _is_trainer_there(life: TrainerLife, batches: Batches) -> bool:
    """Wait for a trainer that is being restored. Return False if the batches were ended before."""
    if life.is_alive:
        return True
    async with first_of(life.alive(), batches.ended()):
        """Either has come."""
    return life.is_alive


async def _batch(run: RunSection, batches: Batches, life: TrainerLife) -> list[CollectedGroup]:
    """Wait for the next batch. It is empty once the batches were ended. Raises TrainerFailed."""
    async with first_of(batches.next(run.batch_timeout_s), life.lost()) as (batch, lost):
        if lost.done():
            raise lost.result()
        return batch.result()


async def _hooked(begin: Coroutine[None, None, EncodedBatch], life: TrainerLife) -> EncodedBatch:
    """Wait for the hooks' batch. Raises TrainerFailed: a trainer that is restored has no use for it."""
    async with first_of(begin, life.lost()) as (made, lost):
        if lost.done():
            raise lost.result()
        return made.result()


async def encoded(groups: Sequence[CollectedGroup], batches: Batches, read: Read) -> EncodedBatch:
    """Return the trajectories of ``groups``, in their order, followed by the live ones of the batch, for a
    step from the present version.
    """
    live = batches.live
    samples = [sample for group in groups for sample in group.judged]
    chunks = await read([each.refs for each in (*samples, *live)])
    chunks[len(samples) :] = map(LiveTrajectory.payload, live, chunks[len(samples) :])
    versions = {version for item in (*groups, *live) for version in item.trained_tokens}
    # A live trajectory is a group of its own.
    group_ids = [group.id for group in groups for _ in group.judged] + [each.ids[0] for each in live]
    return EncodedBatch(
        batches.core.version,
        (*(header for group in groups for header in group.headers), *(each.header for each in live)),
        np.frombuffer(b"".join(chunks), np.uint8),
        tuple(map(len, chunks)),
        np.array(group_ids, np.int64),
        lags={version: batches.core.lag(version) for version in versions},
        turn_advantages={number: each.advantages for number, each in enumerate(live, len(samples))},
    )
