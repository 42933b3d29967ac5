"""From the recipe's objective and correction to the loss of each token: the one way in for the trainer."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from slipstream.backend.objective import clipped, correction, masked, weighted
from slipstream.backend.objective.policy_loss import PolicyLoss
from slipstream.configs.schema import ActorConfig


@dataclass(frozen=True)
class Tokens:
    """The M tokens of a micro-batch that carry loss. A sequence is never split over micro-batches."""

    logp_M: Tensor
    """Log-probs under the policy being updated, with gradient."""
    behaviour_logp_M: Tensor
    proximal_logp_M: Tensor | None
    """None: neither recomputed nor interpolated."""
    advantage_M: Tensor
    lag_M: Tensor
    owner_M: Tensor
    """int64: the sequence of each token, below ``owners``."""
    owners: int


LOSSES: dict[str, Callable[..., PolicyLoss]] = {
    "ppo": lambda x, old_M, **s: clipped.ppo(x.logp_M, old_M, x.advantage_M, **s),
    "dual_clip": lambda x, old_M, **s: clipped.dual_clip(x.logp_M, old_M, x.advantage_M, **s),
    "decayed_clip": lambda x, old_M, **s: clipped.decayed_clip(x.logp_M, old_M, x.advantage_M, x.lag_M, **s),
    "gspo": lambda x, old_M, **s: clipped.gspo(x.logp_M, old_M, x.advantage_M, x.owner_M, x.owners, **s),
    "cispo": lambda x, old_M, clip_high: weighted.truncated(
        x.logp_M, old_M, x.advantage_M, cap=1 + clip_high
    ),
    "aipo": lambda x, old_M, **s: weighted.truncated(x.logp_M, old_M, x.advantage_M, **s),
    "sapo": lambda x, old_M, **s: weighted.sapo(x.logp_M, old_M, x.advantage_M, **s),
    "reinforce": lambda x, old_M: weighted.reinforce(x.logp_M, old_M, x.advantage_M),
    "m2po": lambda x, old_M, **s: masked.m2po(x.logp_M, old_M, x.advantage_M, **s),
    "dppo": lambda x, old_M, **s: masked.dppo(x.logp_M, old_M, x.advantage_M, **s),
}
"""``actor.objective.type`` -> loss of (tokens, old log-probs) and the settings of that type."""

SEQUENCE_MASKS: dict[str, Callable[..., Tensor]] = {
    "geometric": correction.geometric_outside_band,
    "product": correction.product_outside_band,
    "kl": correction.divergence_above,
}
"""``actor.correction.sequence.type`` -> where tokens are dropped."""


def token_losses(actor: ActorConfig, x: Tokens) -> PolicyLoss:
    """The loss of each token under ``actor.objective``, decoupled and corrected as the recipe says.

    Decoupled: w L(pi / pi_old) with w = pi_old / mu (AReaL, arXiv:2505.24298, eq. 5). The weight corrects for
    who sampled the token, the objective bounds how far this step moves; each is applied once. Otherwise the
    ratio is taken to pi_old, to mu where there is none, and always to mu by objectives that are about mu.
    """
    objective = actor.objective
    old_M = x.proximal_logp_M
    if old_M is None or objective.against_behaviour:
        old_M = x.behaviour_logp_M
    loss = LOSSES[objective.type](x, old_M, **objective.model_dump(exclude={"type"}))
    if actor.use_decoupled_loss:
        weight_M = correction.behaviour_weight(_log_weight(x), actor.correction.weight_cap)
        loss = replace(loss, loss_T=weight_M * loss.loss_T)
    dropped = _dropped(actor, x)
    if dropped:
        anywhere_M = torch.stack(list(dropped.values())).any(dim=0)
        loss = replace(loss, loss_T=torch.where(anywhere_M, 0.0, loss.loss_T), masked=dropped)
    return loss


def _dropped(actor: ActorConfig, x: Tokens) -> dict[str, Tensor]:
    """By correction in force: the tokens [M] that it drops."""
    found = {}
    token, sequence, negative = actor.correction.token, actor.correction.sequence, actor.correction.negative
    if token is not None and token.type == "mask":
        found["token"] = correction.outside_band(_log_weight(x), low=token.low, high=token.high)
    if sequence is not None:
        found["sequence"] = SEQUENCE_MASKS[sequence.type](
            _log_weight(x), x.owner_M, x.owners, **sequence.model_dump(exclude={"type"})
        )
    if negative is not None:
        found["negative"] = correction.left_negative(
            x.logp_M, x.behaviour_logp_M, x.advantage_M, x.owner_M, x.owners, delta=negative.delta
        )
    return found


def _log_weight(x: Tokens) -> Tensor:
    if x.proximal_logp_M is None:
        raise ValueError(
            "weights proximal / behaviour need proximal log-probs: recompute or interpolate them"
        )
    return x.proximal_logp_M - x.behaviour_logp_M
