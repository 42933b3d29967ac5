"""The optimizer updates of the policy: from a micro-batch's hidden states to its loss and statistics."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from slipstream.backend.batch.micro_batch import MicroBatch
from slipstream.backend.objective import kl
from slipstream.backend.objective.correction import interpolated_logp
from slipstream.backend.objective.losses import Tokens, token_losses
from slipstream.backend.objective.statistics import TOP_TOKENS, StepStatistics, token_statistics
from slipstream.backend.trainer.episode_log import StepLogProbs
from slipstream.backend.trainer.hooks import RankHooks
from slipstream.backend.trainer.prepared import PreparedMicroBatch, Scores
from slipstream.backend.trainer.skipping import Faults, SkippedUpdates, add_faults
from slipstream.configs.schema import ActorConfig

if TYPE_CHECKING:  # Megatron can only be imported once the rank has joined its groups
    from slipstream.backend.megatron.packed_model import LanguageModel
    from slipstream.backend.megatron.trained import Trained
    from slipstream.backend.trainer.plugins import RankPlugins


@dataclass(frozen=True)
class MicroBatchResult:
    """Results of a micro-batch's loss, without gradient."""

    statistics: dict[str, Tensor]
    logp_M: Tensor
    loss_M: Tensor


def update_policy(
    trained: "Trained",
    policy: "LanguageModel",
    minibatches: Sequence[Sequence[PreparedMicroBatch]],
    actor: ActorConfig,
    skipped: SkippedUpdates,
    *,
    temperature: float,
    lr: float,
    plugins: "RankPlugins",
    hooks: RankHooks,
    mismatch: float | None = None,
    logprobs: StepLogProbs | None = None,
) -> StepStatistics:
    """Make one optimizer update for each mini-batch, and return the statistics of all of them.

    ``plugins``: what the recipe names by import path. ``hooks``: those of the recipe that decide about losses
    or see updates. ``mismatch``: mean of log(pi_old / mu)^2 over tokens of lag 0, from earlier steps; None:
    not measured yet. Updates that are not finite are left out, and added to ``skipped``.
    ``logprobs`` keeps those that the first mini-batch gives; None: nobody wants them.
    """
    statistics = StepStatistics(lr, named_by_hooks=hooks.names_statistics)
    for number, minibatch in enumerate(minibatches):
        loss = partial(_loss, policy, actor, temperature, mismatch, number == 0, plugins, hooks)
        heads = [partial(loss, item) for item in minibatch]
        hooks.update_begins(number, trained, lr)
        update = trained.update(policy, [item.micro for item in minibatch], heads, lr)
        if logprobs is not None and number == 0:
            logprobs.add(minibatch, [result.logp_M for result in update.results])
        if update.succeeded:
            statistics.add_update([result.statistics for result in update.results], update.grad_norm)
        else:
            statistics.add_skipped()
            skipped.add("policy", number, trained, _faults(minibatch, update.results))
    trained.gather()
    return statistics


def _loss(
    policy: "LanguageModel",
    actor: ActorConfig,
    temperature: float,
    mismatch: float | None,
    is_first: bool,
    plugins: "RankPlugins",
    hooks: RankHooks,
    item: PreparedMicroBatch,
    hidden: Tensor,
) -> tuple[Tensor, Tensor, MicroBatchResult]:
    """Return the sum of token losses, the number of tokens, and further results of a micro-batch.

    ``is_first``: no update of the step comes before.
    """
    micro, scores, targets = item.micro, item.scores, item.targets
    assert targets is not None  # only the last stage, which has targets, computes a loss
    batch = policy.on_device(micro)
    logp_M, entropy_M, divergence_M = _outputs(policy, actor, temperature, micro, hidden)
    behaviour_M, lag_M = batch.behaviour_logp_M, batch.lag_M
    proximal_M = scores.proximal_M
    if actor.interpolate_logprobs:
        proximal_M = interpolated_logp(logp_M, behaviour_M, lag_M)
    elif actor.recompute_logprobs and proximal_M is None:
        assert is_first  # the weights are still those that the step starts from
        proximal_M = logp_M.detach()
    tokens = Tokens(
        logp_M=logp_M,
        behaviour_logp_M=behaviour_M,
        proximal_logp_M=proximal_M,
        advantage_M=targets.advantage_M.to(logp_M),
        lag_M=lag_M,
        owner_M=batch.owner_M,
        owners=micro.owners,
        mismatch=mismatch,
    )
    share_M = batch.share_M
    hooked = hooks.loss_of(item)
    weigh = hooked.weighing(tokens, share_M)
    loss = hooked.kept(token_losses(actor, tokens, weigh, own=plugins.objective))
    if hooked.replaces_loss:
        total = hooked.custom_total(policy, hidden)
    else:
        total = hooked.total(loss, share_M)
        total = total + _penalties(actor, scores, share_M, logp_M, entropy_M, behaviour_M, plugins.penalty)
        if actor.top_tokens_term is not None and divergence_M is not None:
            total = total + actor.top_tokens_term.weight * (share_M * divergence_M).sum()
    measured = token_statistics(
        loss=loss,
        tokens=tokens,
        share_M=share_M,
        entropy_M=entropy_M.detach(),
        reference_M=scores.reference_M,
        measured=targets.measured,
        recomputed=actor.recompute_logprobs,
        weight_cap=actor.correction.weight_cap if actor.use_decoupled_loss else None,
    )
    measured |= hooked.statistics()
    if actor.top_tokens_term is not None:
        measured |= _divergence_statistics(divergence_M, micro, measured["tokens"])
    return total, batch.count, MicroBatchResult(measured, logp_M.detach(), loss.loss_T.detach())


def _outputs(
    policy: "LanguageModel", actor: ActorConfig, temperature: float, micro: MicroBatch, hidden: Tensor
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return log-probs, entropies, and the divergence from a teacher's likeliest tokens, [M] each.

    The divergence is None if the recipe does not ask for it, or nothing is known of them here.
    """
    teacher = micro.teacher if actor.top_tokens_term is not None else None
    has_gradient = actor.entropy_bonus > 0
    if teacher is None or not teacher.k:
        outputs = policy.logprob_and_entropy(micro, hidden, temperature, entropy_gradient=has_gradient)
        return *outputs, None
    return policy.logprob_entropy_and_divergence(
        micro, hidden, temperature, teacher, entropy_gradient=has_gradient
    )


def _divergence_statistics(
    divergence_M: Tensor | None, micro: MicroBatch, tokens: Tensor
) -> dict[str, Tensor]:
    """Return the sum of the divergences, and the number of tokens that have one; float64 scalars."""
    if divergence_M is None or micro.teacher is None:
        return dict.fromkeys(TOP_TOKENS, torch.zeros_like(tokens))
    known = tokens.new_tensor(float(np.count_nonzero(micro.teacher.has_top_T)))
    return dict(zip(TOP_TOKENS, (divergence_M.detach().double().sum(), known), strict=True))


def _penalties(
    actor: ActorConfig,
    scores: Scores,
    share_M: Tensor,
    logp_M: Tensor,
    entropy_M: Tensor,
    behaviour_M: Tensor,
    estimate: kl.Estimate | None,
) -> Tensor:
    """Return what the recipe adds to the loss of a micro-batch: its entropy bonus, its penalty for leaving
    the reference. ``estimate``: of ``actor.kl.penalty``; None: of ``actor.kl.estimator``.
    """
    total = share_M.new_zeros(())
    if actor.entropy_bonus > 0:
        total = total - actor.entropy_bonus * (share_M * entropy_M).sum()
    if actor.kl is not None and actor.kl.where == "loss":
        assert scores.reference_M is not None
        kl_M = kl.in_loss(logp_M, scores.reference_M, behaviour_M, estimate or actor.kl.estimator)
        total = total + actor.kl.coefficient * (share_M * kl_M).sum()
    return total


def _faults(minibatch: Sequence[PreparedMicroBatch], results: Sequence[MicroBatchResult]) -> Faults:
    """Return the trajectories of this rank with numbers that are not finite.

    ``results`` is empty except on the last pipeline stage, whose ranks know everything.
    """
    faults: Faults = {}
    for item in minibatch:
        scores, targets = item.scores, item.targets
        inputs = {
            "behaviour log-prob": item.micro.behaviour_logp_M,
            "proximal log-prob": scores.proximal_M,
            "reference log-prob": scores.reference_M,
            "teacher log-prob": scores.teacher_M,
            "value": scores.value_M,
            "advantage": targets.advantage_M if targets is not None else None,
        }
        add_faults(faults, item.micro.trajectory_M, inputs)
    for item, result in zip(minibatch, results, strict=False):
        add_faults(faults, item.micro.trajectory_M, {"log-prob": result.logp_M, "loss": result.loss_M})
    return faults
