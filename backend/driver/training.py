"""Training: ready groups in, policy versions out.

    gate.batch ──► step_begins ──► weights.advance: train, publish ──► listener.step ──► checkpoint, if due
        ▲          (journal on disk)        │                                            evaluation, if due
        └──────── slots are free ◄──────────┘

The loop waits for nothing but a batch (``run.batch_timeout_s``) and the trainer. Back-pressure on generation
is the number of slots: they become free when the version trained on their groups is published. Evaluations
and the writing of checkpoints go on beside the next steps.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence

import numpy as np

from slipstream.backend.batch.train_batch import EncodedBatch
from slipstream.backend.cluster.errors import TrainerFailed
from slipstream.backend.cluster.waits import Timeout
from slipstream.backend.driver.evaluation import Evaluation
from slipstream.backend.driver.ports import Checkpoints, ClientT, RunListener
from slipstream.backend.driver.served_weights import ServedWeights
from slipstream.backend.driver.skipped import SkippedUpdateLimit
from slipstream.backend.monitor.status import RunStatus, StepTimes, TrainedStep
from slipstream.configs.schema.run import RunSection
from slipstream.rollout.collect.gate import AdmissionGate, ReadyGroup

Read = Callable[[list[bytes]], Awaitable[list[bytes]]]


async def training_loop(
    run: RunSection,
    gate: AdmissionGate,
    weights: ServedWeights[ClientT],
    checkpoints: Checkpoints,
    evaluation: Evaluation | None,
    listener: RunListener,
    status: Callable[[], RunStatus],
    read: Read,
) -> None:
    """Train and publish until ``run.steps`` steps are done or the gate was ended.

    ``read`` returns the chunks of trajectories, given their references into the ledger.
    Raises TooManySkippedUpdates when the trainer skips more updates than ``run.max_skipped_updates``.
    """
    clock = asyncio.get_running_loop().time
    skipped = SkippedUpdateLimit(run.max_skipped_updates, listener.note)
    running: list[asyncio.Task[None]] = []
    async with asyncio.TaskGroup() as evaluations:
        while gate.step < run.steps:
            began = clock()
            groups = await gate.batch(run.batch_timeout_s)
            if not groups:
                for task in running:
                    task.cancel()
                return
            waited_s = clock() - began
            await gate.step_begins()
            batch = await encoded(groups, gate, read)
            try:
                advance = await weights.advance(batch, gate.next_version)
            except (TrainerFailed, Timeout) as error:
                await gate.step_failed(str(error))
                raise
            times = StepTimes(wait_s=waited_s, train_s=advance.train_s, step_s=clock() - began)
            step = TrainedStep(
                batch.headers, batch.lags or {}, advance.version, advance.metrics, advance.report, times
            )
            listener.step(step, status())
            skipped.add(gate.step, advance.skipped)
            await checkpoints.step_done(gate)
            if evaluation is not None and evaluation.is_due(gate.step, run.steps):
                running.append(evaluations.create_task(evaluation.run(advance.version)))


async def encoded(groups: Sequence[ReadyGroup], gate: AdmissionGate, read: Read) -> EncodedBatch:
    """Return the trajectories of ``groups``, in their order, for a step from the present version."""
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    chunks = await read([trajectory.refs for trajectory in trajectories])
    versions = {version for group in groups for version in group.trained_tokens}
    return EncodedBatch(
        gate.version,
        tuple(trajectory.header for trajectory in trajectories),
        np.frombuffer(b"".join(chunks), np.uint8),
        tuple(map(len, chunks)),
        np.repeat([group.id for group in groups], [len(group.trajectories) for group in groups]),
        {version: gate.lag(version) for version in versions},
    )
