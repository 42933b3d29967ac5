"""``actor.advantage``: the terms that add up to the advantage of each token."""

from typing import Annotated, Literal

from pydantic import Field

from slipstream.configs.schema.base import ModelSetting, Section
from slipstream.configs.schema.plugin import PluginConfig

Estimator = Literal["grpo", "dr_grpo", "rloo", "reinforce_pp", "reinforce_pp_baseline", "gae", "reward"]

WHITENING: tuple[Estimator, ...] = ("reinforce_pp", "reinforce_pp_baseline", "gae")
"""Estimators that normalize over the tokens of the batch by themselves."""

WEIGHT = "Factor of the term in the sum of all terms."


class RewardTerm(Section):
    """The advantage from rewards: those of trajectories, and those of turns with `actor.turns`."""

    type: Literal["reward"] = "reward"
    weight: float = Field(default=1.0, gt=0, description=WEIGHT)
    estimator: Estimator = Field(
        default="grpo",
        description="Advantage of a trajectory, from its reward. `grpo`: (reward - group mean) / group "
        "standard deviation. `dr_grpo`: reward - group mean. `rloo`: reward - mean of the other "
        "trajectories of the group. `reinforce_pp`: reward, whitened over the tokens of the batch. "
        "`reinforce_pp_baseline`: reward - group mean, whitened in the same way. `gae`: an advantage per "
        "token from the critic's values, whitened. `reward`: the reward itself.",
    )
    shift: float = Field(
        default=0.0,
        ge=0,
        description="Number that is added to the advantage of every trajectory. Above 0, successes weigh "
        "more than failures: the baseline of asymmetric REINFORCE (arXiv:2506.20520), for stale data.",
    )


class TrajectoryScores(Section):
    """Log-probs that come with the trajectory: `TeacherScores`, which a workflow sets (`Trajectory.teacher`),
    or which a reward (`Judgement.teacher`) or a judge of live users (`Verdict.teacher`) returns. Their
    teacher may have seen a hint that the policy has not seen. Scores with a missing value fail their episode
    or turn, and never count as 0."""

    type: Literal["trajectory"] = "trajectory"


class ModelScores(Section):
    """Log-probs of a model that the trainer holds, in the policy's layout. It may be larger than the
    policy."""

    type: Literal["model"] = "model"
    path: ModelSetting = Field(
        description="Hugging Face checkpoint directory of a model with the policy's vocabulary."
    )


class TeacherTerm(Section):
    """On-policy distillation: log pi_teacher - log pi_old of each sampled token."""

    type: Literal["teacher"] = "teacher"
    weight: float = Field(default=1.0, gt=0, description=WEIGHT)
    clip: float | None = Field(
        default=5.0,
        gt=0,
        description="Largest absolute value of log pi_teacher - log pi_old; null: unlimited.",
    )
    scores: Annotated[TrajectoryScores | ModelScores, Field(discriminator="type")] = Field(
        default=TrajectoryScores()
    )


class TopTokensTerm(Section):
    """Reverse KL divergence from the teacher over its likeliest tokens and the rest of the vocabulary. It is
    added to the loss, with a gradient of its own, and is not part of the advantage of a token. It needs
    scores that come with the trajectory."""

    type: Literal["teacher_topk"] = "teacher_topk"
    weight: float = Field(default=1.0, gt=0, description=WEIGHT)


class PluginTerm(PluginConfig):
    """A term of your own: a class with the method `advantage` of `slipstream.TokenAdvantage`."""

    type: Literal["plugin"] = "plugin"
    weight: float = Field(default=1.0, gt=0, description=WEIGHT)
    needs_logprobs: bool = Field(
        default=False,
        description="The term reads the log-probs of the policy that the training step starts from, so "
        "every mini-batch gets a forward pass for them.",
    )


AdvantageTerm = Annotated[RewardTerm | TeacherTerm | TopTokensTerm | PluginTerm, Field(discriminator="type")]


class AdvantageNorm(Section):
    """Normalization of the advantage over the whole batch (docs/objectives.md#normalization-over-the-batch):
    AReaL's `adv_norm`, slime's `--normalize-advantages`. The statistics are those of all tokens that carry
    loss, over all ranks. Tokens of live users are left as they are."""

    mean: bool = Field(default=True, description="Subtract the mean of the batch.")
    deviation: bool = Field(
        default=True, description="Divide by the standard deviation of the batch, plus `eps`."
    )
    eps: float = Field(default=1e-5, gt=0, description="Number that is added to the standard deviation.")
