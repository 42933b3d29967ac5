"""The models besides the policy. Each of them is loaded only if the recipe has its section."""

from typing import Annotated, Literal

from pydantic import Field

from slipstream.configs.schema.base import ModelSetting, Section
from slipstream.configs.schema.optimizer import OptimizerConfig
from slipstream.configs.schema.plugin import Plugin


class CheckpointReference(Section):
    """A reference model whose weights never change."""

    type: Literal["checkpoint"] = "checkpoint"
    path: ModelSetting | None = Field(
        default=None, description="Hugging Face checkpoint directory; null: `model.path`."
    )


class AverageReference(Section):
    """The exponential moving average of the policy's own weights, in float32. The run's checkpoints contain
    it."""

    type: Literal["average"] = "average"
    decay: float = Field(
        default=0.99,
        gt=0,
        lt=1,
        description="After each training step the average becomes decay * average + (1 - decay) * policy.",
    )


Reference = Annotated[CheckpointReference | AverageReference, Field(discriminator="type")]


class KLConfig(Section):
    """A penalty for the divergence of the policy from a reference model
    (docs/objectives.md#models-besides-the-policy)."""

    coefficient: float = Field(default=1e-3, gt=0, description="Coefficient of the KL estimate.")
    where: Literal["loss", "reward"] = Field(
        default="loss",
        description="`loss`: the coefficient times the estimate is added to the loss of each token, times "
        "pi / mu, which makes its gradient unbiased. `reward`: it is subtracted from rewards before "
        "advantages are computed: from the reward of each token with GAE, and as a sum from the reward of "
        "the trajectory otherwise.",
    )
    estimator: Literal["k1", "k2", "k3"] = Field(
        default="k3",
        description="KL estimate from x = log pi - log ref: k1 = x, k2 = x^2 / 2, k3 = exp(-x) - 1 + x.",
    )
    penalty: Plugin | None = Field(
        default=None,
        description="Import path of a class with the method `estimate` of `slipstream.ReferencePenalty`, "
        "which replaces `estimator`; null: `estimator` is used.",
    )
    reference: Reference = Field(
        default=CheckpointReference(), description="Model from which the divergence is measured."
    )


class CriticOptimizerConfig(OptimizerConfig):
    """As `actor.optimizer`, with a higher learning rate."""

    lr: float = Field(default=1e-5, gt=0, le=1, description="Peak learning rate, reached after the warm-up.")


class CriticConfig(Section):
    """The value model of `estimator: gae` in `actor.advantage`: it predicts one value per token. It is
    trained beside the policy, with the policy's layout and micro-batches."""

    path: ModelSetting | None = Field(
        default=None,
        description="Hugging Face checkpoint directory of the initial critic: a language model, whose value "
        "head starts at 0, or a model for sequence classification with one label (`score.weight`); "
        "null: `model.path`.",
    )
    optimizer: CriticOptimizerConfig = Field(default=CriticOptimizerConfig())
    discount: float = Field(default=1.0, gt=0, le=1, description="Discount of later rewards, per token.")
    gae_lambda: float = Field(
        default=1.0,
        ge=0,
        le=1,
        description="Lambda of GAE. With 1, advantages are returns minus values; a smaller lambda has less "
        "variance and more bias.",
    )
    value_clip: float | None = Field(
        default=0.2,
        gt=0,
        description="Largest change of a value within a training step (PPO's clipped value loss); null: "
        "unlimited.",
    )
    warmup_steps: int = Field(
        default=0,
        ge=0,
        description="Number of training steps at the start of the run that train only the critic.",
    )
