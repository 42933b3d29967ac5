"""The table of causes: the sign of each, where it is seen, and what to do. Pure."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from slipstream.backend.monitor.diagnosis import signs
from slipstream.backend.monitor.diagnosis.evidence import Evidence
from slipstream.backend.monitor.diagnosis.signs import Sign


@dataclass(frozen=True)
class Cause:
    """A cause for which a reward may not rise."""

    name: str
    words: str
    metric: str
    """The tag to look at, as ``slipstream metrics`` explains it."""
    advice: str
    sign: Callable[[Evidence], Sign | None]
    is_end_of_learning: bool = False
    """A run that has learned shows the sign as well: nothing is said while the reward rises."""


@dataclass(frozen=True)
class LikelyCause:
    """A cause whose sign a run shows."""

    cause: Cause
    weight: float
    figures: str


CAUSES = (
    Cause(
        "skipped-updates",
        "updates are skipped",
        "train/skipped_updates",
        "driver.log names the trajectories or parameters that are not finite; a lower actor.optimizer.lr "
        "and a look at your objective or reward help.",
        signs.skipped_updates,
    ),
    Cause(
        "reward-timeouts",
        "the reward takes too long",
        "rollout/groups_failed",
        "Make the reward quicker, or raise rollout.judging.timeout_s. `slipstream try` shows its times.",
        partial(signs.failures, late=True),
    ),
    Cause(
        "failing-groups",
        "episodes or rewards fail",
        "rollout/groups_failed",
        "`slipstream try` shows the traceback; the groups that are left are a biased sample.",
        partial(signs.failures, late=False),
    ),
    Cause(
        "masked",
        "nearly everything is masked",
        "train/masked_token_fraction",
        "Widen the band of that correction, or lower rollout.max_head_offpolicyness.",
        signs.masked,
    ),
    Cause(
        "truncated",
        "responses are cut off",
        "rollout/truncated_fraction",
        "Raise rollout.sampling.max_new_tokens, ask for shorter answers, or set actor.overlong.",
        signs.truncated,
    ),
    Cause(
        "rate-too-high",
        "the learning rate is too high",
        "train/approx_kl",
        "Lower actor.optimizer.lr to a third, and begin again from a checkpoint of before.",
        signs.rate_too_high,
    ),
    Cause(
        "low-entropy",
        "the policy no longer explores",
        "train/entropy",
        "Set rollout.sampling.temperature to 1, raise clip_high or actor.entropy_bonus, lower "
        "actor.optimizer.lr.",
        signs.low_entropy,
        is_end_of_learning=True,
    ),
    Cause(
        "all-wrong",
        "every answer is wrong",
        "reward/mean",
        "Compare texts and labels with `slipstream try`: often the reward looks for another form of answer. "
        "Otherwise take easier prompts, or run `slipstream sft` first.",
        partial(signs.every_reward, fits=lambda value: value <= 0),
    ),
    Cause(
        "all-right",
        "every answer is right",
        "reward/mean",
        "Take harder prompts, or a stricter reward.",
        partial(signs.every_reward, fits=lambda value: value >= 1),
        is_end_of_learning=True,
    ),
    Cause(
        "constant-reward",
        "the reward is the same for every answer",
        "reward/std",
        "Give `slipstream try` answers that you would judge differently: the judge or its parser is broken.",
        partial(signs.every_reward, fits=lambda value: 0 < value < 1),
    ),
    Cause(
        "equal-groups",
        "rewards within a group are equal",
        "train/zero_advantage_fraction",
        "Raise rollout.n_samples_per_prompt, take prompts that are sometimes solved, or a reward with "
        "steps between wrong and right.",
        signs.equal_groups,
        is_end_of_learning=True,
    ),
    Cause(
        "filtered",
        "the group filter rejects most groups",
        "rollout/groups_filtered",
        "Take prompts that are sometimes solved, or loosen rollout.group_filter.",
        signs.filtered,
    ),
    Cause(
        "mismatch",
        "engine and trainer compute different policies",
        "mismatch/logprob_abs_mean",
        "Use the same model.dtype and chat template; a workflow must not change sampled tokens or "
        "log-probs; take rollout.engine.args back one at a time.",
        signs.mismatch,
    ),
    Cause(
        "stale",
        "the data is too old",
        "staleness/head_mean",
        "Lower rollout.max_head_offpolicyness or actor.optimizer.lr, and shorten what is slow: rewards, "
        "longest responses. Turns of live users live longer with a larger live.max_wait_s or "
        "rollout.max_head_offpolicyness.",
        signs.stale,
    ),
    Cause(
        "drift-limit",
        "the limit of drift slows training",
        "staleness/kl",
        "Raise actor.drift.kl, or lower rollout.max_head_offpolicyness.",
        signs.drift_limit,
    ),
    Cause(
        "clipped",
        "the objective's bound stops most tokens",
        "train/clip_fraction",
        "Widen the bound of actor.objective, or lower actor.minibatches.",
        signs.clipped,
    ),
    Cause(
        "rate-too-low",
        "the learning rate is too low",
        "train/approx_kl",
        "Raise actor.optimizer.lr three times; look at actor.optimizer.warmup_steps.",
        signs.rate_too_low,
    ),
    Cause(
        "few-prompts",
        "there are few different prompts",
        "eval/reward",
        "Add prompts: the policy learns these by heart, and held-out prompts do not follow.",
        signs.few_prompts,
    ),
)
"""Where several signs are strong, the cause that stands first here is named first. Causes come before their
effects."""

STRONG = 0.7
"""Weight from which a sign alone explains a reward that does not rise."""


def likely_causes(evidence: Evidence) -> list[LikelyCause]:
    """Return the causes whose signs a run shows, the likeliest first."""
    rises = signs.rises(evidence)
    found = [
        LikelyCause(cause, *sign)
        for cause in CAUSES
        if not (rises and cause.is_end_of_learning) and (sign := cause.sign(evidence)) is not None
    ]
    return sorted(found, key=lambda each: each.weight < STRONG)
