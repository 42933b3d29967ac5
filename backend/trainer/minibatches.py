"""A batch as this rank's micro-batches, grouped by optimizer update."""

import numpy as np

from slipstream.backend.batch.flops import forward_flops
from slipstream.backend.batch.micro_batch import MicroBatch, assemble
from slipstream.backend.batch.packing import balance, schedule
from slipstream.backend.batch.train_batch import TrainBatch
from slipstream.backend.objective.averaging import token_shares
from slipstream.bridge.model.geometry import Geometry
from slipstream.configs.schema import RunConfig


def microbatches_of(
    config: RunConfig, geometry: Geometry, batch: TrainBatch, step: int, *, rank: int
) -> tuple[list[list[MicroBatch]], dict[str, float]]:
    """Return the micro-batches of data-parallel ``rank`` by mini-batch, and how well all ranks are packed.

    The draw depends only on the run's seed and on the training step, so it is the same on all ranks.
    Micro-batches keep to the token budget with their padding included.
    """
    actor = config.actor
    multiple, trajectory_multiple = actor.parallel.length_multiple, actor.parallel.trajectory_multiple
    budget = actor.microbatch_tokens
    tokens_N = np.array([trajectory.response_length for trajectory in batch.trajectories])
    length_N = np.array([len(trajectory.tokens_T) for trajectory in batch.trajectories])
    cost_N = forward_flops(geometry, length_N)
    plan = schedule(
        length_N + -length_N % trajectory_multiple,
        cost_N,
        minibatches=actor.minibatches,
        ranks=actor.parallel.data,
        multiple=actor.parallel.microbatch_multiple,
        budget=budget - budget % multiple,
        rng=np.random.default_rng((config.run.seed, step)),
    )
    # Means are over the mini-batch on all ranks, not over the part that one of them holds.
    share_N = np.zeros(len(tokens_N), np.float32)
    for minibatch in plan:
        members = [index for packs in minibatch for pack in packs for index in pack]
        share_N[members] = token_shares(actor.averaging, tokens_N[members], batch.group_N[members])

    def assembled(pack: list[int]) -> MicroBatch:
        return assemble(batch, pack, multiple, trajectory_multiple=trajectory_multiple, share_N=share_N)

    microbatches = [[assembled(pack) for pack in minibatch[rank]] for minibatch in plan]
    quality = balance(plan, length_N, cost_N, budget)
    return microbatches, {"packing/fill": quality.fill, "packing/imbalance": quality.imbalance}
