"""A batch as this rank's micro-batches, grouped by optimizer update, and which are scored beforehand."""

from functools import partial

import numpy as np

from slipstream.backend.batch.flops import forward_flops
from slipstream.backend.batch.micro_batch import MicroBatch, assemble
from slipstream.backend.batch.packing import Pack, balance, schedule, split_minibatches
from slipstream.backend.batch.prefixes import keyed, shared_plan
from slipstream.backend.batch.train_batch import TrainBatch
from slipstream.backend.objective.averaging import mean_scale, token_shares
from slipstream.bridge.model.geometry import Geometry
from slipstream.configs.schema import ActorConfig, HooksConfig


def microbatches_of(
    actor: ActorConfig,
    geometry: Geometry,
    batch: TrainBatch,
    seed: int,
    step: int,
    *,
    rank: int,
    passes_N: np.ndarray | None = None,
) -> tuple[list[list[MicroBatch]], dict[str, float]]:
    """Return the micro-batches of data-parallel ``rank`` by mini-batch, and metrics of all ranks' packing.

    ``passes_N``: forward passes over each trajectory, for the work of the step; None: not measured.

    The draw depends only on ``seed``, that of the run, and on the training step, so it is the same on all
    ranks. Micro-batches keep to the token budget with their padding included.
    """
    multiple, trajectory_multiple = actor.parallel.length_multiple, actor.parallel.trajectory_multiple
    budget = actor.microbatch_tokens
    tokens_N = np.array([trajectory.response_length for trajectory in batch.trajectories])
    length_N = np.array([len(trajectory.tokens_T) for trajectory in batch.trajectories])
    cost_N = forward_flops(geometry, length_N)
    room = budget - budget % multiple
    plan = schedule(
        length_N + -length_N % trajectory_multiple,
        cost_N,
        batch.episode_N,
        minibatches=actor.minibatches,
        ranks=actor.parallel.data,
        multiple=actor.parallel.microbatch_multiple,
        budget=room,
        rng=np.random.default_rng((seed, step)),
    )
    taken_N = np.zeros(len(length_N), np.int64)
    if actor.share_prefixes == "auto":
        plan, taken_N = _shared(plan, batch, actor, geometry, tokens_N, room)
    own_N, own_cost_N = length_N - taken_N, cost_N - forward_flops(geometry, taken_N)
    # Means are over the mini-batch on all ranks, not over the part that one of them holds.
    share_N = np.zeros(len(tokens_N), np.float32)
    scales: list[float] = []
    for minibatch in plan:
        members = [index for packs in minibatch for pack in packs for index in pack]
        units = tokens_N[members], batch.group_N[members], batch.episode_N[members]
        share_N[members] = token_shares(actor.averaging, *units, length=actor.averaging_length)
        scales.append(mean_scale(actor.averaging, *units))

    def assembled(pack: list[int], scale: float) -> MicroBatch:
        return assemble(
            batch,
            pack,
            multiple,
            trajectory_multiple=trajectory_multiple,
            taken_N=taken_N,
            share_N=share_N,
            scale=scale,
        )

    microbatches = [
        [assembled(pack, scale) for pack in minibatch[rank]]
        for minibatch, scale in zip(plan, scales, strict=True)
    ]
    quality = balance(plan, own_N, own_cost_N, budget)
    metrics = {"packing/fill": quality.fill, "packing/imbalance": quality.imbalance}
    if actor.share_prefixes == "auto":
        metrics["packing/saved_tokens"] = float(taken_N.sum() / length_N.sum())
        metrics["packing/saved_flops"] = float(1 - own_cost_N.sum() / cost_N.sum())
    if passes_N is not None:
        metrics["train/tflop"] = float(passes_N @ own_cost_N) / 1e12
    return microbatches, metrics


def _shared(
    plan: list[list[list[Pack]]],
    batch: TrainBatch,
    actor: ActorConfig,
    geometry: Geometry,
    loss_N: np.ndarray,
    budget: int,
) -> tuple[list[list[list[Pack]]], np.ndarray]:
    """Return a plan that computes shared prefixes once, and the tokens that each trajectory takes, [N]."""
    trajectories = batch.trajectories
    tokens = keyed(
        [trajectory.tokens_T for trajectory in trajectories],
        [trajectory.routes_TW if actor.routing_replay == "rollout" else None for trajectory in trajectories],
    )
    found = [
        shared_plan(
            minibatch,
            tokens,
            partial(forward_flops, geometry),
            loss_N=loss_N,
            budget=budget,
            multiple=actor.parallel.microbatch_multiple,
        )
        for minibatch in plan
    ]
    return [packs for packs, _ in found], np.sum([taken_N for _, taken_N in found], axis=0)


def first_recomputed(actor: ActorConfig, hooks: HooksConfig | None) -> int:
    """Return the number of the first mini-batch with a forward pass for its proximal log-probs.

    All later ones have one too; ``actor.minibatches``: none has. The training pass of mini-batch 0 gives
    these log-probs itself: no update comes before it, and there is no dropout. It comes too late only where
    advantages, or hooks that see the whole batch, depend on them.
    """
    if not actor.recompute_logprobs:
        return actor.minibatches
    in_advantages = (
        actor.teacher_term is not None
        or (actor.plugin_term is not None and actor.plugin_term.needs_logprobs)
        or (actor.kl is not None and actor.kl.where == "reward")
    )
    seen = hooks is not None and (hooks.custom_advantage_function or hooks.rollout_data_postprocess)
    return 0 if in_advantages or seen else 1


def is_recomputed(
    actor: ActorConfig, hooks: HooksConfig | None, episode_N: np.ndarray, seed: int, step: int
) -> np.ndarray:
    """Return which trajectories of a batch have a forward pass for their proximal log-probs, bool [N]."""
    drawn = split_minibatches(episode_N, actor.minibatches, np.random.default_rng((seed, step)))
    is_recomputed_N = np.ones(len(episode_N), np.bool_)
    for places in drawn[: first_recomputed(actor, hooks)]:
        is_recomputed_N[places] = False
    return is_recomputed_N
