"""A batch as this rank's micro-batches, those of each optimizer update together."""

import numpy as np

from slipstream.backend.batch.flops import forward_flops
from slipstream.backend.batch.micro_batch import MicroBatch, TrainBatch, assemble
from slipstream.backend.batch.packing import balance, schedule
from slipstream.backend.objective.averaging import token_shares
from slipstream.bridge.model.geometry import Geometry
from slipstream.configs.schema import RunConfig


def microbatches_of(
    config: RunConfig, geometry: Geometry, batch: TrainBatch, step: int, *, rank: int
) -> tuple[list[list[MicroBatch]], dict[str, float]]:
    """Those of data-parallel ``rank``, by mini-batch; and how well all ranks' are packed, as metrics.

    What is drawn depends on the run's seed and the training step, and is the same on all ranks. With their
    padding they keep to the token budget.
    """
    actor = config.actor
    multiple, each = actor.parallel.length_multiple, actor.parallel.trajectory_multiple
    budget = actor.microbatch_tokens
    tokens_N = np.array([trajectory.response_length for trajectory in batch.trajectories])
    length_N = np.array([len(trajectory.tokens_T) for trajectory in batch.trajectories])
    cost_N = forward_flops(geometry, length_N)
    plan = schedule(
        length_N + -length_N % each,
        cost_N,
        minibatches=actor.minibatches,
        ranks=actor.parallel.data,
        multiple=actor.parallel.microbatch_multiple,
        budget=budget - budget % multiple,
        rng=np.random.default_rng((config.run.seed, step)),
    )
    # A mean is over the mini-batch on all ranks, not over what is on one of them.
    share_N = np.zeros(len(tokens_N), np.float32)
    for minibatch in plan:
        everywhere = [index for packs in minibatch for pack in packs for index in pack]
        share_N[everywhere] = token_shares(actor.averaging, tokens_N[everywhere], batch.group_N[everywhere])
    microbatches = [
        [assemble(batch, pack, multiple, each=each, share_N=share_N) for pack in minibatch[rank]]
        for minibatch in plan
    ]
    found = balance(plan, length_N, cost_N, budget)
    return microbatches, {"packing/fill": found.fill, "packing/imbalance": found.imbalance}
