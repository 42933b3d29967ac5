"""The loss of each token under the recipe's objective and corrections: the one way in for the trainer."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol, assert_never

import torch
from torch import Tensor

from slipstream.backend.objective import correction, policy_loss
from slipstream.backend.objective.policy_loss import PolicyLoss
from slipstream.configs.schema import ActorConfig, Objective
from slipstream.configs.schema.objective import (
    AIPOObjective,
    CISPOObjective,
    DecayedClipObjective,
    DPPOObjective,
    DualClipObjective,
    GeometricMask,
    GSPOObjective,
    KLMask,
    M2POObjective,
    PluginObjective,
    PPOObjective,
    ProductMask,
    ReinforceObjective,
    SAPOObjective,
    SequenceCorrection,
    TokenMask,
    TOPRObjective,
)


@dataclass(frozen=True)
class Tokens:
    """The M tokens of a micro-batch that carry loss. A trajectory is never split over micro-batches."""

    logp_M: Tensor
    """Log-probs under the policy being updated, with gradient."""
    behaviour_logp_M: Tensor
    proximal_logp_M: Tensor | None
    """None: neither recomputed nor interpolated."""
    advantage_M: Tensor
    lag_M: Tensor
    owner_M: Tensor
    """int64: trajectory of each token, below ``owners``."""
    owners: int
    mismatch: float | None = None
    """Mean of log(pi_old / mu)^2 over tokens of lag 0, as earlier steps have measured it; None: not yet."""


class TokenObjective(Protocol):
    """An objective of a user's: any class with this method. ``actor.objective.type: plugin`` names it.

    It runs on every trainer rank of the last pipeline stage, once for each micro-batch of each optimizer
    update. Ranks of a tensor- or context-parallel group call it with the same tokens, so that it must depend
    on nothing but its arguments. What it raises ends the run.
    """

    def loss(self, tokens: Tokens, old_logp_M: Tensor) -> Tensor | PolicyLoss:
        """Return the loss of each token, which training minimises: float32 [M], on the device of its inputs.

        ``tokens``: the M tokens of a micro-batch that carry loss, in order; M may be 0, and whole
        trajectories are together. Only ``tokens.logp_M`` has a gradient. ``old_logp_M`` [M], float32: natural
        logarithms of the probabilities that the ratio is taken to: of the proximal policy, or of the
        behaviour policy as the recipe says.

        The importance weight of the decoupled loss, ``actor.correction`` and ``actor.averaging`` are applied
        to what is returned. A ``PolicyLoss`` also says which ratio was taken and where a bound has acted,
        for the metrics; of a tensor they are pi / pi_old, and nowhere.
        """
        ...


Weigh = Callable[[PolicyLoss], PolicyLoss]
"""Weighs the losses of tokens in place of the importance weight and its cap."""

LossOfTokens = Callable[[Tokens, Tensor], PolicyLoss]
"""A user's objective, of which everything is checked that it returns."""


def token_losses(
    actor: ActorConfig, x: Tokens, weigh: Weigh | None = None, *, own: LossOfTokens | None = None
) -> PolicyLoss:
    """Return the loss of each token under ``actor.objective``, decoupled and corrected as the recipe says.

    Decoupled: w L(pi / pi_old) with w = pi_old / mu (AReaL, arXiv:2505.24298, eq. 5). The importance weight
    corrects for the policy that sampled the token, the objective bounds how far this step moves; each is
    applied once. Otherwise the ratio is taken to pi_old, or to mu if pi_old is unknown. Objectives that are
    defined with mu always take it to mu. ``weigh``: None for the importance weight w. ``own``: the
    objective of ``actor.objective.type: plugin``, else None.
    """
    objective = actor.objective
    old_M = x.proximal_logp_M
    if old_M is None or objective.against_behaviour:
        old_M = x.behaviour_logp_M
    loss = _objective_loss(objective, x, old_M) if own is None else own(x, old_M)
    if weigh is not None:
        loss = weigh(loss)
    elif actor.use_decoupled_loss:
        weight_M = correction.importance_weight(_log_weight(x), actor.correction.weight_cap)
        loss = replace(loss, loss_T=weight_M * loss.loss_T)
    dropped = _dropped(actor, x)
    if dropped:
        anywhere_M = torch.stack(list(dropped.values())).any(dim=0)
        loss = replace(loss, loss_T=torch.where(anywhere_M, 0.0, loss.loss_T), masked=loss.masked | dropped)
    return loss


def _objective_loss(objective: Objective, x: Tokens, old_M: Tensor) -> PolicyLoss:
    """Return the loss of the objective alone; ``old_M``: the log-probs that its ratio is taken to."""
    inputs = x.logp_M, old_M, x.advantage_M
    match objective:
        case PPOObjective(clip_low=low, clip_high=high):
            return policy_loss.ppo(*inputs, clip_low=low, clip_high=high)
        case DualClipObjective(clip_low=low, clip_high=high, bound=bound):
            return policy_loss.dual_clip(*inputs, clip_low=low, clip_high=high, bound=bound)
        case DecayedClipObjective(clip_low=low, clip_high=high, decay=decay, floor=floor):
            return policy_loss.decayed_clip(
                *inputs, x.lag_M, clip_low=low, clip_high=high, decay=decay, floor=floor
            )
        case GSPOObjective(clip_low=low, clip_high=high):
            return policy_loss.gspo(*inputs, x.owner_M, x.owners, clip_low=low, clip_high=high)
        case CISPOObjective(clip_high=high):
            return policy_loss.truncated(*inputs, cap=1 + high)
        case AIPOObjective(cap=cap):
            return policy_loss.truncated(*inputs, cap=cap)
        case TOPRObjective():
            return policy_loss.tapered(*inputs, x.owner_M, x.owners)
        case SAPOObjective(tau_positive=positive, tau_negative=negative):
            return policy_loss.sapo(*inputs, tau_positive=positive, tau_negative=negative)
        case ReinforceObjective():
            return policy_loss.reinforce(*inputs)
        case M2POObjective(threshold=threshold):
            return policy_loss.m2po(*inputs, threshold=threshold)
        case DPPOObjective(mask_low=low, mask_high=high, kl=kl):
            return policy_loss.dppo(*inputs, mask_low=low, mask_high=high, kl=kl)
        case PluginObjective():
            raise ValueError(f"{objective.path} was not given: the rank makes it")
        case _:
            assert_never(objective)


def _dropped(actor: ActorConfig, x: Tokens) -> dict[str, Tensor]:
    """Return the tokens [M] that each correction in force drops."""
    dropped: dict[str, Tensor] = {}
    token, sequence, negative = actor.correction.token, actor.correction.sequence, actor.correction.negative
    if isinstance(token, TokenMask):
        dropped["token"] = correction.outside_band(_log_weight(x), low=token.low, high=token.high)
    if sequence is not None:
        dropped["sequence"] = _outside_bounds(sequence, x)
    if negative is not None:
        dropped["negative"] = correction.left_negative(
            x.logp_M,
            x.behaviour_logp_M,
            x.advantage_M,
            x.owner_M,
            x.owners,
            delta=negative.delta,
            errors=negative.errors,
            mismatch=x.mismatch,
        )
    return dropped


def _outside_bounds(sequence: SequenceCorrection, x: Tokens) -> Tensor:
    """Return the tokens [M] whose trajectory ``actor.correction.sequence`` drops."""
    inputs = _log_weight(x), x.owner_M, x.owners
    match sequence:
        case GeometricMask(low=low, high=high):
            return correction.geometric_outside_band(*inputs, low=low, high=high)
        case ProductMask(low=low, high=high):
            return correction.product_outside_band(*inputs, low=low, high=high)
        case KLMask(max=maximum):
            return correction.divergence_above(*inputs, maximum=maximum)
        case _:
            assert_never(sequence)


def _log_weight(x: Tokens) -> Tensor:
    if x.proximal_logp_M is None:
        raise ValueError(
            "the importance weight pi_old / mu needs proximal log-probs: set actor.recompute_logprobs "
            "or actor.interpolate_logprobs"
        )
    return x.proximal_logp_M - x.behaviour_logp_M
