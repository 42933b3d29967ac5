"""The optimizer updates of the policy: from a micro-batch's hidden states to its loss and statistics."""

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from torch import Tensor

from slipstream.backend.objective import kl
from slipstream.backend.objective.correction import interpolated_logp
from slipstream.backend.objective.losses import Tokens, token_losses
from slipstream.backend.objective.statistics import StepStatistics, token_statistics
from slipstream.backend.trainer.prepared import PreparedMicroBatch
from slipstream.configs.schema import ActorConfig

if TYPE_CHECKING:  # Megatron can only be imported once the rank has joined its groups
    from slipstream.backend.megatron.packed_model import LanguageModel
    from slipstream.backend.megatron.trained import Trained


def update_policy(
    trained: "Trained",
    policy: "LanguageModel",
    minibatches: Sequence[Sequence[PreparedMicroBatch]],
    actor: ActorConfig,
    *,
    temperature: float,
    lr: float,
) -> StepStatistics:
    """Make one optimizer update for each mini-batch, and return the statistics of all of them."""
    statistics = StepStatistics()
    for minibatch in minibatches:
        heads = [partial(_loss, policy, actor, temperature, item) for item in minibatch]
        update = trained.update(policy, [item.micro for item in minibatch], heads, lr)
        statistics.add_update(update.results, grad_norm=update.grad_norm, lr=lr, succeeded=update.succeeded)
    trained.gather()
    return statistics


def _loss(
    policy: "LanguageModel", actor: ActorConfig, temperature: float, item: PreparedMicroBatch, hidden: Tensor
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Return the sum of token losses, the number of tokens, and the statistics of a micro-batch."""
    micro, scores, targets = item.micro, item.scores, item.targets
    assert targets is not None  # only the last stage, which has targets, computes a loss
    logp_M, entropy_M = policy.logprob_and_entropy(
        micro, hidden, temperature, entropy_gradient=actor.entropy_bonus > 0
    )
    behaviour_M, lag_M = policy.tensor(micro.behaviour_logp_M), policy.tensor(micro.lag_M)
    proximal_M = scores.proximal_M
    if actor.interpolate_logprobs:
        proximal_M = interpolated_logp(logp_M, behaviour_M, lag_M)
    tokens = Tokens(
        logp_M=logp_M,
        behaviour_logp_M=behaviour_M,
        proximal_logp_M=proximal_M,
        advantage_M=targets.advantage_M.to(logp_M),
        lag_M=lag_M,
        owner_M=policy.tensor(micro.owner_M),
        owners=micro.owners,
    )
    loss = token_losses(actor, tokens)
    share_M = policy.tensor(micro.share_M)
    total = (share_M * loss.loss_T).sum()
    if actor.entropy_bonus > 0:
        total = total - actor.entropy_bonus * (share_M * entropy_M).sum()
    if actor.kl is not None and actor.kl.where == "loss":
        assert scores.reference_M is not None
        kl_M = kl.in_loss(logp_M, scores.reference_M, behaviour_M, actor.kl.estimator)
        total = total + actor.kl.coefficient * (share_M * kl_M).sum()
    measured = token_statistics(
        loss=loss,
        tokens=tokens,
        share_M=share_M,
        entropy_M=entropy_M.detach(),
        reference_M=scores.reference_M,
        teacher_M=scores.teacher_M,
        recomputed=actor.recompute_logprobs,
        weight_cap=actor.correction.weight_cap if actor.use_decoupled_loss else None,
    )
    return total, policy.count(micro), measured
