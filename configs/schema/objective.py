"""``actor.objective`` and ``actor.correction``: what is minimised, and what is done about stale data.

mu is the behaviour policy that sampled a token, pi_old the proximal one, pi the one being trained.
docs/objectives.md has the formulas and says when to use which.
"""

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from slipstream.configs.schema.base import Section


class _Objective(Section):
    against_behaviour: ClassVar[bool] = False
    """The ratio is pi / mu: it corrects for stale data itself, so no behaviour weight may be added."""
    bounded: ClassVar[bool] = True
    """A token that the policy has moved away from loses its gradient, or the weight of it is capped."""
    decouples: ClassVar[bool] = True
    """Can be weighted by pi_old / mu (``actor.use_decoupled_loss``)."""
    by_sequence: ClassVar[bool] = False
    """All tokens of a sequence share one ratio."""


class _Clipped(_Objective):
    clip_low: float = Field(0.2, gt=0, lt=1, description="The ratio is clipped from below at 1 - clip_low.")
    clip_high: float = Field(0.28, gt=0, description="The ratio is clipped from above at 1 + clip_high.")


class PPOObjective(_Clipped):
    """PPO's clipped surrogate. Equal clip ranges are plain PPO; a wider upper one is DAPO's clip-higher."""

    type: Literal["ppo"] = "ppo"


class DualClipObjective(_Clipped):
    """PPO whose loss is bounded for negative advantages as well."""

    type: Literal["dual_clip"] = "dual_clip"
    bound: float = Field(3.0, gt=1, description="With a negative advantage A the loss is at most -bound * A.")


class DecayedClipObjective(_Clipped):
    """PPO whose clip range shrinks with the lag of the token."""

    type: Literal["decayed_clip"] = "decayed_clip"
    decay: float = Field(0.95, gt=0, lt=1, description="Factor of both clip ranges for each version of lag.")
    floor: float = Field(0.1, gt=0, le=1, description="Smallest factor of both clip ranges.")


class GSPOObjective(_Objective):
    """PPO on the ratio of whole sequences, the geometric mean over their tokens."""

    type: Literal["gspo"] = "gspo"
    by_sequence: ClassVar[bool] = True
    clip_low: float = Field(3e-4, gt=0, lt=1, description="The ratio is clipped from below at 1 - clip_low.")
    clip_high: float = Field(4e-4, gt=0, description="The ratio is clipped from above at 1 + clip_high.")


class CISPOObjective(_Objective):
    """Policy gradient weighted by the ratio, which is capped; every token keeps a gradient."""

    type: Literal["cispo"] = "cispo"
    clip_high: float = Field(4.0, gt=0, description="The weight is at most 1 + clip_high.")


class SAPOObjective(_Objective):
    """A smooth gate of the ratio instead of a clip."""

    type: Literal["sapo"] = "sapo"
    decouples: ClassVar[bool] = False
    tau_positive: float = Field(1.0, gt=0, description="Steepness of the gate for advantages above 0.")
    tau_negative: float = Field(1.05, gt=0, description="Steepness of the gate for all others.")


class M2POObjective(_Objective):
    """Drops the tokens that have moved most, until the second moment of the others' log-ratios is small."""

    type: Literal["m2po"] = "m2po"
    against_behaviour: ClassVar[bool] = True
    decouples: ClassVar[bool] = False
    threshold: float = Field(
        0.04, gt=0, description="Largest mean of log(pi / mu)^2 over the tokens kept of a micro-batch."
    )


class DPPOObjective(_Objective):
    """Drops tokens whose probability has moved too far the way that their advantage pushes it."""

    type: Literal["dppo"] = "dppo"
    against_behaviour: ClassVar[bool] = True
    decouples: ClassVar[bool] = False
    mask_low: float = Field(
        0.2, gt=0, le=1, description="Largest fall pi - mu of a probability, advantage not above 0."
    )
    mask_high: float = Field(
        0.2, gt=0, le=1, description="Largest rise pi - mu of a probability, advantage above 0."
    )
    kl: float = Field(1e-3, ge=0, description="Coefficient of log(pi / mu)^2, which is added to the loss.")


class AIPOObjective(_Objective):
    """Truncated importance sampling: policy gradient weighted by pi / mu, capped."""

    type: Literal["aipo"] = "aipo"
    against_behaviour: ClassVar[bool] = True
    decouples: ClassVar[bool] = False
    cap: float = Field(5.0, ge=1, description="Largest weight pi / mu.")


class ReinforceObjective(_Objective):
    """Plain policy gradient; the baseline is in the advantage."""

    type: Literal["reinforce"] = "reinforce"
    bounded: ClassVar[bool] = False


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
    | ReinforceObjective,
    Field(discriminator="type"),
]


class TokenCap(Section):
    """The behaviour weight of a token is capped (truncated importance sampling)."""

    type: Literal["cap"] = "cap"
    cap: float = Field(5.0, ge=1, description="Largest behaviour weight.")


class TokenMask(Section):
    """Tokens with pi_old / mu outside a band get no loss; the weight of the others stays (IcePop)."""

    type: Literal["mask"] = "mask"
    low: float = Field(0.5, gt=0, le=1, description="Smallest pi_old / mu of a token that is trained.")
    high: float = Field(5.0, ge=1, description="Largest pi_old / mu of a token that is trained.")


class TokenRaw(Section):
    """The behaviour weight as it is."""

    type: Literal["raw"] = "raw"


TokenCorrection = Annotated[TokenCap | TokenMask | TokenRaw, Field(discriminator="type")]


class GeometricMask(Section):
    """Drops sequences whose geometric mean of pi_old / mu is outside a band."""

    type: Literal["geometric"] = "geometric"
    low: float = Field(0.999, gt=0, le=1, description="Smallest value of a sequence.")
    high: float = Field(1.002, ge=1, description="Largest value of a sequence.")


class ProductMask(Section):
    """Drops sequences whose product of pi_old / mu is outside a band."""

    type: Literal["product"] = "product"
    low: float = Field(0.5, gt=0, le=1, description="Smallest value of a sequence.")
    high: float = Field(2.0, ge=1, description="Largest value of a sequence.")


class KLMask(Section):
    """Drops sequences whose mean of exp(x) - 1 - x, x = log(pi_old / mu), is too large."""

    type: Literal["kl"] = "kl"
    max: float = Field(0.01, gt=0, description="Largest estimated KL divergence of a sequence, per token.")


SequenceCorrection = Annotated[GeometricMask | ProductMask | KLMask, Field(discriminator="type")]


class NegativeMask(Section):
    """Drops sequences of negative advantage that the policy has left (DeepSeek-V3.2)."""

    delta: float = Field(
        1e-4, gt=0, description="Largest mean of log(mu / pi) over a sequence; pi: the policy being trained."
    )


class CorrectionConfig(Section):
    """What is done about tokens and sequences that another policy sampled. All parts can be combined."""

    token: TokenCorrection | None = Field(
        None, description="Of single tokens; null: `cap` with use_decoupled_loss, else nothing."
    )
    sequence: SequenceCorrection | None = Field(None, description="Of whole sequences; null: nothing.")
    negative: NegativeMask | None = Field(None, description="Of sequences to unlearn; null: nothing.")

    @property
    def weight_cap(self) -> float | None:
        """Where the behaviour weight is capped; None: nowhere."""
        token = self.token or TokenCap()
        return token.cap if isinstance(token, TokenCap) else None


class TurnsConfig(Section):
    """Rewards of single turns besides the episode's, from the workflow (`Trajectory.turn_rewards`)."""

    coefficient: float = Field(1.0, gt=0, description="How much the part from turns counts.")
    reward_coefficient: float = Field(
        1.0, ge=0, description="How much the advantage from the episode's reward counts; 0: only turns."
    )
    baseline: Literal["none", "group"] = Field(
        "group",
        description="group: (reward - mean) / standard deviation over all turns of a prompt's answers, as "
        "GRPO has it for processes; none: rewards as they are.",
    )
    discount: float = Field(
        1.0, ge=0, le=1, description="A token has the rewards from its turn on, each later turn counts less."
    )


class OverlongConfig(Section):
    """A penalty that grows linearly with the length of an answer (DAPO's soft overlong punishment)."""

    start: int = Field(ge=0, description="Sampled tokens up to which nothing is subtracted from the reward.")
    end: int = Field(ge=1, description="Sampled tokens from which the whole penalty is subtracted.")
    penalty: float = Field(1.0, gt=0, description="The whole penalty.")
