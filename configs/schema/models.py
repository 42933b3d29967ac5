"""The models besides the policy, each of them there only if the objective asks for it."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from slipstream.configs.schema.base import Section
from slipstream.configs.schema.optimizer import OptimizerConfig


class CheckpointReference(Section):
    """A model that stays as it is."""

    type: Literal["checkpoint"] = "checkpoint"
    path: Path | None = Field(None, description="HF checkpoint directory; null: `model.path`.")


class AverageReference(Section):
    """The exponential moving average of the policy's own weights, in single precision."""

    type: Literal["average"] = "average"
    decay: float = Field(
        0.99, gt=0, lt=1, description="The average is decay * average + (1 - decay) * policy after each step."
    )


Reference = Annotated[CheckpointReference | AverageReference, Field(discriminator="type")]


class KLConfig(Section):
    """Keeps the policy near a reference model."""

    coefficient: float = Field(1e-3, gt=0, description="How much the divergence counts.")
    where: Literal["loss", "reward"] = Field(
        "loss",
        description="loss: added to it, with the ratio pi / mu that makes the gradient unbiased. reward: "
        "subtracted from the reward, of each token with `advantage: gae`, else of the trajectory.",
    )
    estimator: Literal["k1", "k2", "k3"] = Field(
        "k3", description="From x = log pi - log ref: k1 = x, k2 = x^2 / 2, k3 = exp(-x) - 1 + x."
    )
    reference: Reference = CheckpointReference()


class TeacherConfig(Section):
    """On-policy distillation: log pi_teacher - log pi of each token is added to its advantage."""

    path: Path = Field(description="HF checkpoint directory of a model with the policy's vocabulary.")
    coefficient: float = Field(1.0, gt=0, description="How much the teacher's part counts.")
    reward_coefficient: float = Field(
        0.0, ge=0, description="How much the advantage from rewards counts; 0: only the teacher."
    )


class CriticOptimizerConfig(OptimizerConfig):
    lr: float = Field(1e-5, gt=0, description="Learning rate after warm-up.")


class CriticConfig(Section):
    """A model with one value per token, trained beside the policy in the same layout."""

    path: Path | None = Field(
        None,
        description="HF checkpoint directory to start from, a language model or one for sequence "
        "classification with one label; null: `model.path`. Without such a head values start at 0.",
    )
    optimizer: CriticOptimizerConfig = CriticOptimizerConfig()
    discount: float = Field(1.0, gt=0, le=1, description="Of rewards, per token.")
    gae_lambda: float = Field(
        1.0, ge=0, le=1, description="1: returns minus values; lower: less variance, more bias."
    )
    value_clip: float | None = Field(
        0.2, gt=0, description="How far a value may move in a training step; null: any distance."
    )
    warmup_steps: int = Field(
        0, ge=0, description="First training steps in which only the critic is trained."
    )
