"""``actor.objective`` and ``actor.correction``: the loss, and its corrections for stale data.

mu is the behaviour policy that sampled a token, pi_old the proximal policy, pi the policy being trained.
docs/objectives.md has the formulas and says when to use which.
"""

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from slipstream.configs.schema.base import Section
from slipstream.configs.schema.plugin import PluginConfig


class _Objective(Section):
    against_behaviour: ClassVar[bool] = False
    """The ratio is pi / mu, which corrects for stale data. An importance weight would correct twice."""
    bounded: ClassVar[bool] = True
    """A token that the policy has left loses its gradient, or has a capped weight."""
    decouples: ClassVar[bool] = True
    """The loss can be multiplied by the importance weight pi_old / mu (``actor.use_decoupled_loss``)."""
    by_sequence: ClassVar[bool] = False
    """All tokens of a sequence share one ratio."""


class _Clipped(_Objective):
    clip_low: float = Field(
        default=0.2, gt=0, lt=1, description="The ratio is clipped from below at 1 - clip_low."
    )
    clip_high: float = Field(
        default=0.28, gt=0, description="The ratio is clipped from above at 1 + clip_high."
    )


class PPOObjective(_Clipped):
    """PPO's clipped surrogate. Equal clip ranges are plain PPO, and a larger upper range is DAPO's
    clip-higher."""

    type: Literal["ppo"] = "ppo"


class DualClipObjective(_Clipped):
    """PPO whose loss is also bounded for negative advantages."""

    type: Literal["dual_clip"] = "dual_clip"
    bound: float = Field(
        default=3.0, gt=1, description="With a negative advantage A the loss is at most -bound * A."
    )


class DecayedClipObjective(_Clipped):
    """PPO with clip ranges that shrink with the lag of the token."""

    type: Literal["decayed_clip"] = "decayed_clip"
    decay: float = Field(
        default=0.95, gt=0, lt=1, description="Factor of both clip ranges per policy version of lag."
    )
    floor: float = Field(default=0.1, gt=0, le=1, description="Smallest factor of both clip ranges.")


class GSPOObjective(_Objective):
    """PPO on the ratio of a whole sequence, which is the geometric mean of the ratios of its tokens."""

    type: Literal["gspo"] = "gspo"
    by_sequence: ClassVar[bool] = True
    clip_low: float = Field(
        default=3e-4, gt=0, lt=1, description="The ratio is clipped from below at 1 - clip_low."
    )
    clip_high: float = Field(
        default=4e-4, gt=0, description="The ratio is clipped from above at 1 + clip_high."
    )


class CISPOObjective(_Objective):
    """Policy gradient weighted by the capped ratio. Every token keeps a gradient."""

    type: Literal["cispo"] = "cispo"
    clip_high: float = Field(
        default=4.0, gt=0, description="The ratio is clipped from above at 1 + clip_high."
    )


class SAPOObjective(_Objective):
    """Policy gradient through a smooth gate of the ratio instead of a clip."""

    type: Literal["sapo"] = "sapo"
    decouples: ClassVar[bool] = False
    tau_positive: float = Field(
        default=1.0, gt=0, description="Steepness of the gate for positive advantages."
    )
    tau_negative: float = Field(
        default=1.05, gt=0, description="Steepness of the gate for all other advantages."
    )


class M2POObjective(_Objective):
    """Drops the tokens with the largest log(pi / mu)^2 until the mean over the remaining tokens is small."""

    type: Literal["m2po"] = "m2po"
    against_behaviour: ClassVar[bool] = True
    decouples: ClassVar[bool] = False
    threshold: float = Field(
        default=0.04,
        gt=0,
        description="Largest mean of log(pi / mu)^2 over the remaining tokens of a micro-batch.",
    )


class DPPOObjective(_Objective):
    """Drops tokens whose probability has moved too far in the direction of their advantage."""

    type: Literal["dppo"] = "dppo"
    against_behaviour: ClassVar[bool] = True
    decouples: ClassVar[bool] = False
    mask_low: float = Field(
        default=0.2,
        gt=0,
        le=1,
        description="Largest fall mu - pi of the probability of a token with an advantage of at most 0.",
    )
    mask_high: float = Field(
        default=0.2,
        gt=0,
        le=1,
        description="Largest rise pi - mu of the probability of a token with a positive advantage.",
    )
    kl: float = Field(
        default=1e-3, ge=0, description="Coefficient of log(pi / mu)^2, which is added to the loss."
    )


class AIPOObjective(_Objective):
    """Truncated importance sampling: policy gradient weighted by the capped ratio pi / mu."""

    type: Literal["aipo"] = "aipo"
    against_behaviour: ClassVar[bool] = True
    decouples: ClassVar[bool] = False
    cap: float = Field(default=5.0, ge=1, description="Largest ratio pi / mu.")


class TOPRObjective(_Objective):
    """Tapered off-policy REINFORCE: failures are weighted by the ratio pi / mu of their sequence, at most 1.
    Successes have the weight 1, whatever their age."""

    type: Literal["topr"] = "topr"
    against_behaviour: ClassVar[bool] = True
    decouples: ClassVar[bool] = False


class ReinforceObjective(_Objective):
    """Plain policy gradient. The baseline is part of the advantage."""

    type: Literal["reinforce"] = "reinforce"
    bounded: ClassVar[bool] = False


class PluginObjective(PluginConfig):
    """An objective of your own (docs/customization.md): a class with the method `loss` of
    `slipstream.TokenObjective`."""

    type: Literal["plugin"] = "plugin"
    corrects_staleness: bool = Field(
        default=False,
        description="The objective takes its ratio to the behaviour policy, which corrects for stale data, "
        "so no importance weight is applied to it. A class may state the same in an attribute of this name.",
    )
    bounded: bool = Field(
        default=False,
        description="The objective has a trust region: a token outside of it loses its gradient or has a "
        "capped weight.",
    )
    by_sequence: bool = Field(default=False, description="All tokens of a sequence share one ratio.")

    @property
    def against_behaviour(self) -> bool:
        """As of the objectives that come with Slipstream."""
        return self.corrects_staleness

    @property
    def decouples(self) -> bool:
        """As of the objectives that come with Slipstream."""
        return not self.corrects_staleness


Objective = Annotated[
    PPOObjective
    | DualClipObjective
    | DecayedClipObjective
    | GSPOObjective
    | CISPOObjective
    | SAPOObjective
    | M2POObjective
    | DPPOObjective
    | AIPOObjective
    | TOPRObjective
    | ReinforceObjective
    | PluginObjective,
    Field(discriminator="type"),
]


class TokenCap(Section):
    """The importance weight of a token is capped (truncated importance sampling)."""

    type: Literal["cap"] = "cap"
    cap: float = Field(default=5.0, ge=1, description="Largest importance weight.")


class TokenMask(Section):
    """Tokens with pi_old / mu outside a band get no loss. The importance weights of the other tokens stay
    (IcePop)."""

    type: Literal["mask"] = "mask"
    low: float | None = Field(
        default=0.5,
        gt=0,
        le=1,
        description="Smallest pi_old / mu of a token that is trained; null: no lower limit.",
    )
    high: float = Field(default=5.0, ge=1, description="Largest pi_old / mu of a token that is trained.")


class TokenRaw(Section):
    """The importance weight is neither capped nor masked. Only for synchronous runs."""

    type: Literal["raw"] = "raw"


class GeometricMask(Section):
    """Drops sequences whose geometric mean of pi_old / mu is outside a band."""

    type: Literal["geometric"] = "geometric"
    low: float = Field(
        default=0.999, gt=0, le=1, description="Smallest statistic of a sequence that is trained."
    )
    high: float = Field(default=1.002, ge=1, description="Largest statistic of a sequence that is trained.")


class ProductMask(Section):
    """Drops sequences whose product of pi_old / mu is outside a band."""

    type: Literal["product"] = "product"
    low: float = Field(
        default=0.5, gt=0, le=1, description="Smallest statistic of a sequence that is trained."
    )
    high: float = Field(default=2.0, ge=1, description="Largest statistic of a sequence that is trained.")


class KLMask(Section):
    """Drops sequences whose mean of exp(x) - 1 - x, with x = log(pi_old / mu), is too large."""

    type: Literal["kl"] = "kl"
    max: float = Field(
        default=0.01, gt=0, description="Largest mean of exp(x) - 1 - x with x = log(pi_old / mu)."
    )


SequenceCorrection = Annotated[GeometricMask | ProductMask | KLMask, Field(discriminator="type")]


class NegativeMask(Section):
    """Drops sequences with a negative advantage from which the policy has moved away (DeepSeek-V3.2)."""

    delta: float = Field(
        default=1e-4,
        ge=0,
        description="Largest mean of log(mu / pi) over a sequence, beyond what the mismatch between "
        "trainer and engine explains.",
    )
    errors: float | None = Field(
        default=2.0,
        ge=0,
        description="Number of standard errors of the mismatch by which the mean may exceed delta. With v, "
        "the mean of log(pi_old / mu)^2 over tokens of lag 0, a sequence of T tokens is dropped above "
        "delta + v / 2 + errors * sqrt(v / T). null: above delta, as DeepSeek-V3.2 does; with a bfloat16 "
        "engine this drops nearly half of the fresh failures.",
    )


class CorrectionConfig(Section):
    """Corrections for tokens and sequences that another policy sampled. The three can be combined."""

    token: Annotated[TokenCap | TokenMask | TokenRaw, Field(discriminator="type")] | None = Field(
        default=None,
        description="Correction of single tokens. Without the section: `{type: cap}` with "
        "`actor.use_decoupled_loss`, and no correction otherwise.",
    )
    sequence: SequenceCorrection | None = Field(
        default=None,
        description="Correction of whole sequences, by a statistic of pi_old / mu over their "
        "trained tokens. Without the section there is none.",
    )
    negative: NegativeMask | None = Field(
        default=None, description="Without the section there is no such correction."
    )

    @property
    def weight_cap(self) -> float | None:
        """Largest importance weight; None: it is not capped."""
        token = self.token or TokenCap()
        return token.cap if isinstance(token, TokenCap) else None


class TurnsConfig(Section):
    """Rewards of single turns, which the workflow sets in `Trajectory.turn_rewards`
    (docs/objectives.md#rewards-of-turns)."""

    coefficient: float = Field(
        default=1.0, gt=0, description="Coefficient of the turns' part of the advantage."
    )
    reward_coefficient: float = Field(
        default=1.0,
        ge=0,
        description="Coefficient of the advantage from the episode's reward; 0 trains on turns alone.",
    )
    baseline: Literal["none", "group"] = Field(
        default="group",
        description="`group`: (reward - mean) / standard deviation over all turns of the group, which is "
        "GRPO's process supervision. `none`: the rewards themselves.",
    )
    discount: float = Field(
        default=1.0,
        ge=0,
        le=1,
        description="Discount of later rewards, per turn. A token gets the rewards of its own turn and of "
        "all later ones.",
    )


class OverlongConfig(Section):
    """A penalty that grows linearly with the length of a trajectory (DAPO's soft overlong punishment). Logged
    and filtered rewards do not include it."""

    start: int = Field(ge=0, description="Largest number of sampled tokens without a penalty.")
    end: int = Field(
        ge=1,
        description="Number of sampled tokens from which the whole penalty is subtracted from the reward.",
    )
    penalty: float = Field(default=1.0, gt=0, description="The whole penalty.")
