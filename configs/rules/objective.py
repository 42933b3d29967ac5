"""Rules about the objective, its corrections and advantages, and the staleness of the data."""

from collections.abc import Iterator

from slipstream.configs.rules.rule import Rule
from slipstream.configs.schema import RunConfig
from slipstream.configs.schema.advantage import WHITENING
from slipstream.configs.violations import ABSENT, Violation


def decoupled_needs_proximal(config: RunConfig) -> Iterator[Violation]:
    actor = config.actor
    if actor.use_decoupled_loss and not (actor.recompute_logprobs or actor.interpolate_logprobs):
        yield Violation(
            "actor.recompute_logprobs",
            False,
            "the decoupled loss needs the log-probs of the proximal policy, which nothing would compute; "
            "set actor.recompute_logprobs to true, or actor.use_decoupled_loss to false, "
            "or actor.interpolate_logprobs to true for an estimate",
        )


def interpolation_is_of_use(config: RunConfig) -> Iterator[Violation]:
    actor = config.actor
    if actor.interpolate_logprobs and actor.recompute_logprobs:
        yield Violation(
            "actor.interpolate_logprobs",
            True,
            "the proximal log-probs would be both computed and estimated; "
            "set actor.recompute_logprobs to false to save the forward pass, or this to false",
        )
    if actor.interpolate_logprobs and not actor.use_decoupled_loss:
        yield Violation(
            "actor.interpolate_logprobs",
            True,
            "only the decoupled loss has a proximal policy to estimate; "
            "set actor.use_decoupled_loss to true, or this to false",
        )


def corrected_once(config: RunConfig) -> Iterator[Violation]:
    objective = config.actor.objective
    if not config.actor.use_decoupled_loss or objective.decouples:
        return
    if objective.against_behaviour:
        why = (
            "takes its ratio to the behaviour policy, which corrects for stale data; "
            "with the importance weight proximal / behaviour the data would be corrected twice"
        )
    else:
        why = "damps off-policy tokens by its own gate, for which no importance weight is defined"
    yield Violation(
        "actor.use_decoupled_loss",
        True,
        f"actor.objective.type: {objective.type} {why}; set this to false, or choose ppo, dual_clip, "
        "decayed_clip, gspo or cispo as actor.objective.type",
    )


def stale_data_is_bounded(config: RunConfig) -> Iterator[Violation]:
    """Stale data needs a bound on pi / mu. A bound on what one training step changes is not enough.

    A ratio to the proximal policy is exactly 1 at the first update of a step. With ``actor.minibatches: 1``
    that is the only update, and a clip of this ratio never acts.
    """
    if config.rollout.max_head_offpolicyness == 0 or config.actor.objective.against_behaviour:
        return
    if config.actor.use_decoupled_loss:
        yield from _importance_weight_is_bounded(config)
    else:
        yield from _ratio_is_bounded(config)


def _importance_weight_is_bounded(config: RunConfig) -> Iterator[Violation]:
    """The decoupled loss of every token is multiplied by pi_old / mu."""
    token = config.actor.correction.token
    if token is not None and token.type == "raw":
        yield Violation(
            "actor.correction.token",
            token.type,
            f"{_stale(config)}, and nothing bounds the importance weight proximal / behaviour of a token, so "
            "that a few tokens can decide an update: actor.objective bounds only the ratio current / "
            "proximal, and actor.correction.sequence only whole sequences; set this to type cap (of any "
            "actor.correction.token.cap) or mask, or rollout.max_head_offpolicyness to 0",
        )


def _ratio_is_bounded(config: RunConfig) -> Iterator[Violation]:
    """Without the decoupled loss, the ratio is pi / pi_old if pi_old is recomputed, else pi / mu."""
    actor, objective = config.actor, config.actor.objective
    token, sequence = actor.correction.token, actor.correction.sequence
    if sequence is not None or (token is not None and token.type == "mask"):
        return
    if not objective.bounded:
        yield Violation(
            "actor.objective.type",
            objective.type,
            f"{_stale(config)}, and nothing bounds their effect; choose an objective with a trust region, "
            "such as ppo, or set actor.use_decoupled_loss to true with actor.correction.token of type cap or "
            "mask, or set actor.correction.sequence, or rollout.max_head_offpolicyness to 0",
        )
    elif actor.recompute_logprobs:
        decoupled = "actor.use_decoupled_loss to true, or " if objective.decouples else ""
        yield Violation(
            "actor.recompute_logprobs",
            True,
            f"{_stale(config)}, and nothing compares the policy with the one that sampled them: the ratio of "
            f"actor.objective.type: {objective.type} is taken to the recomputed log-probs, so that it is "
            "exactly 1 at the first update of a training step, where its bound cannot act; with "
            f"actor.minibatches: {actor.minibatches} that is {_updates(actor.minibatches)}; set {decoupled}"
            "this to false for a ratio to the behaviour policy, or actor.correction.token to type mask, or "
            "actor.correction.sequence, or rollout.max_head_offpolicyness to 0",
        )


def _stale(config: RunConfig) -> str:
    bound = config.rollout.max_head_offpolicyness
    return f"tokens may be {bound} versions old (rollout.max_head_offpolicyness)"


def _updates(minibatches: int) -> str:
    return "the only one" if minibatches == 1 else f"one of {minibatches}"


def token_correction_has_a_weight(config: RunConfig) -> Iterator[Violation]:
    token = config.actor.correction.token
    if token is not None and token.type in ("cap", "raw") and not config.actor.use_decoupled_loss:
        yield Violation(
            "actor.correction.token",
            token.type,
            "it applies to the importance weight proximal / behaviour, which only the decoupled loss has; "
            "set actor.use_decoupled_loss to true, or leave this out",
        )


def masks_need_proximal(config: RunConfig) -> Iterator[Violation]:
    actor = config.actor
    if actor.recompute_logprobs or actor.interpolate_logprobs:
        return
    for name, correction in (("token", actor.correction.token), ("sequence", actor.correction.sequence)):
        if correction is not None and correction.type not in ("cap", "raw"):
            yield Violation(
                f"actor.correction.{name}",
                correction.type,
                "it masks by proximal / behaviour, and there are no proximal log-probs; "
                "set actor.recompute_logprobs to true, or leave this out; actor.correction.negative with "
                "errors: null and actor.objective.type: dppo do without them",
            )


def sequence_ratio_keeps_its_tokens(config: RunConfig) -> Iterator[Violation]:
    objective, token = config.actor.objective, config.actor.correction.token
    if objective.by_sequence and token is not None and token.type == "mask":
        yield Violation(
            "actor.correction.token",
            token.type,
            f"actor.objective.type: {objective.type} gives a sequence one ratio, so single tokens cannot be "
            "masked; use actor.correction.sequence, or an objective that takes its ratio by token",
        )


def negative_needs_a_measured_mismatch(config: RunConfig) -> Iterator[Violation]:
    actor = config.actor
    negative = actor.correction.negative
    if negative is not None and negative.errors is not None and not actor.recompute_logprobs:
        yield Violation(
            "actor.correction.negative.errors",
            negative.errors,
            "the mismatch between trainer and engine is measured by recomputed log-probs; set "
            "actor.recompute_logprobs to true, or this to null for a threshold that is delta alone",
        )


def drift_is_measured_and_limited(config: RunConfig) -> Iterator[Violation]:
    drift = config.actor.drift
    if drift is None:
        return
    if not config.actor.recompute_logprobs:
        yield Violation(
            "actor.drift",
            "set",
            "the drift is measured by recomputed log-probs; set actor.recompute_logprobs to true, or leave "
            "this out",
        )
    if drift.kl is None and drift.ess is None:
        yield Violation("actor.drift", "no limit", "set a limit in kl or ess, or leave this out")


def shift_is_of_trajectories(config: RunConfig) -> Iterator[Violation]:
    term = config.actor.reward_term
    if term is not None and term.shift and term.estimator == "gae":
        yield Violation(
            "actor.advantage.shift",
            term.shift,
            "it is added to advantages of trajectories, and estimator: gae gives each token its own; leave "
            "this out, or choose another estimator",
        )


def normalization_is_of_use(config: RunConfig) -> Iterator[Violation]:
    actor, term = config.actor, config.actor.reward_term
    norm = actor.advantage_norm
    if norm is None:
        return
    if not norm.mean and not norm.deviation:
        yield Violation(
            "actor.advantage_norm",
            norm.model_dump(),
            "it neither subtracts the mean nor divides by the deviation; set one of them to true, or leave "
            "this out",
        )
    if term is None:
        return
    if norm.mean and term.shift:
        yield Violation(
            "actor.advantage_norm.mean",
            True,
            "it takes away again what actor.advantage.shift adds; set this to false, or leave the shift out",
        )
    is_alone = all(each.type in ("reward", "teacher_topk") for each in actor.advantage)
    after_turns = actor.turns is not None and term.estimator != "gae"
    if term.estimator in WHITENING and is_alone and not after_turns:
        yield Violation(
            "actor.advantage_norm",
            norm.model_dump(),
            f"estimator: {term.estimator} normalizes over the tokens of the batch already; leave this out, "
            "or choose an estimator that does not, such as dr_grpo",
        )
    hooks = config.rollout.hooks
    if hooks is not None and hooks.custom_advantage_function is not None:
        yield Violation(
            "actor.advantage_norm",
            norm.model_dump(),
            "rollout.hooks.custom_advantage_function replaces the advantages; leave this out, and let the "
            "function normalize them",
        )


def constant_averaging_has_a_length(config: RunConfig) -> Iterator[Violation]:
    averaging, length = config.actor.averaging, config.actor.averaging_length
    if averaging == "constant" and length is None:
        yield Violation(
            "actor.averaging_length",
            ABSENT,
            "expected the number of tokens by which actor.averaging: constant divides the sum over a "
            "trajectory; Dr. GRPO takes the largest length of a completion (rollout.sampling.max_new_tokens)",
        )
    elif averaging != "constant" and length is not None:
        reason = f"only actor.averaging: constant divides by it, and actor.averaging is {averaging}"
        yield Violation("actor.averaging_length", length, f"{reason}; leave this out, or set constant there")


def overlong_has_a_slope(config: RunConfig) -> Iterator[Violation]:
    overlong = config.actor.overlong
    if overlong is not None and overlong.end <= overlong.start:
        yield Violation(
            "actor.overlong.end", overlong.end, f"expected more than actor.overlong.start ({overlong.start})"
        )


def terms_come_once(config: RunConfig) -> Iterator[Violation]:
    types = [term.type for term in config.actor.advantage]
    if repeated := sorted({type_ for type_ in types if types.count(type_) > 1}):
        yield Violation(
            "actor.advantage",
            types,
            f"two terms are of the type {' and '.join(repeated)}; keep one of each type, and set its weight",
        )


def critic_is_of_use(config: RunConfig) -> Iterator[Violation]:
    estimator = config.actor.estimator
    if estimator == "gae" and config.critic is None:
        yield Violation(
            "actor.advantage",
            "gae",
            "it takes values from a critic, and there is none; add a `critic` section (`critic: {}` is a "
            "critic that starts from model.path), or choose an estimator from rewards alone",
        )
    if config.critic is not None and estimator != "gae":
        yield Violation(
            "actor.advantage",
            estimator,
            "a critic would be trained and never used; set the estimator of the term of type reward to gae, "
            "or leave `critic` out",
        )


def rewards_reach_the_advantage(config: RunConfig) -> Iterator[Violation]:
    actor = config.actor
    if actor.reward_term is not None:
        return
    why = "rewards have no effect, because actor.advantage has no term of the type reward; add one, or"
    if actor.kl is not None and actor.kl.where == "reward":
        yield Violation("actor.kl.where", "reward", f"{why} set this to loss")
    if actor.turns is not None:
        yield Violation("actor.turns", actor.turns.model_dump(), f"{why} leave this out")
    if actor.overlong is not None:
        yield Violation("actor.overlong", actor.overlong.model_dump(), f"{why} leave this out")


def values_are_of_the_same_rewards(config: RunConfig) -> Iterator[Violation]:
    """A critic learns a single scale of rewards and a single discount."""
    turns = config.actor.turns
    if turns is None or config.actor.estimator != "gae":
        return
    if turns.baseline != "none":
        yield Violation(
            "actor.turns.baseline",
            turns.baseline,
            "the baseline of the estimator gae is the critic, which must learn rewards that do not depend "
            "on the other trajectories of a group; set this to none",
        )
    if turns.discount != 1:
        yield Violation(
            "actor.turns.discount",
            turns.discount,
            "the estimator gae discounts by token; set critic.discount, and this to 1",
        )


def penalty_has_one_estimate(config: RunConfig) -> Iterator[Violation]:
    kl = config.actor.kl
    if kl is not None and kl.penalty is not None and "estimator" in kl.model_fields_set:
        reason = "it has no effect, because actor.kl.penalty estimates the divergence; leave one of them out"
        yield Violation("actor.kl.estimator", kl.estimator, reason)


RULES = (
    Rule(
        decoupled_needs_proximal,
        ("actor.use_decoupled_loss", "actor.recompute_logprobs", "actor.interpolate_logprobs"),
    ),
    Rule(
        interpolation_is_of_use,
        ("actor.interpolate_logprobs", "actor.recompute_logprobs", "actor.use_decoupled_loss"),
    ),
    Rule(corrected_once, ("actor.use_decoupled_loss", "actor.objective")),
    Rule(
        stale_data_is_bounded,
        (
            "actor.objective",
            "actor.correction",
            "actor.use_decoupled_loss",
            "actor.recompute_logprobs",
            "actor.minibatches",
            "rollout.max_head_offpolicyness",
        ),
    ),
    Rule(token_correction_has_a_weight, ("actor.correction.token", "actor.use_decoupled_loss")),
    Rule(
        masks_need_proximal,
        ("actor.correction", "actor.recompute_logprobs", "actor.interpolate_logprobs"),
    ),
    Rule(negative_needs_a_measured_mismatch, ("actor.correction.negative", "actor.recompute_logprobs")),
    Rule(
        drift_is_measured_and_limited,
        ("actor.drift", "actor.recompute_logprobs"),
    ),
    Rule(shift_is_of_trajectories, ("actor.advantage",)),
    Rule(sequence_ratio_keeps_its_tokens, ("actor.objective", "actor.correction.token")),
    Rule(
        normalization_is_of_use,
        (
            "actor.advantage_norm",
            "actor.advantage",
            "actor.turns",
            "rollout.hooks.custom_advantage_function",
        ),
    ),
    Rule(constant_averaging_has_a_length, ("actor.averaging", "actor.averaging_length")),
    Rule(overlong_has_a_slope, ("actor.overlong",)),
    Rule(terms_come_once, ("actor.advantage",)),
    Rule(penalty_has_one_estimate, ("actor.kl.estimator", "actor.kl.penalty")),
    Rule(critic_is_of_use, ("actor.advantage", "critic")),
    Rule(rewards_reach_the_advantage, ("actor.kl", "actor.advantage", "actor.turns", "actor.overlong")),
    Rule(values_are_of_the_same_rewards, ("actor.advantage", "actor.turns")),
)
