"""``optimizer`` of the actor and of the critic."""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from slipstream.configs.schema.base import Section


class ConstantRate(Section):
    """The learning rate stays where the warm-up has brought it."""

    type: Literal["constant"] = "constant"


class _Decaying(Section):
    min_lr: float = Field(0.0, ge=0, description="Learning rate after the decay.")
    start: int = Field(
        0,
        ge=0,
        description="Training step that it stays up to; less than the warm-up: none is added to that.",
    )
    steps: int | None = Field(
        None,
        ge=1,
        description="Training step, warm-up included, that has come down to min_lr; null: run.steps.",
    )


class LinearDecay(_Decaying):
    """The learning rate falls in a straight line."""

    type: Literal["linear"] = "linear"


class CosineDecay(_Decaying):
    """The learning rate falls like half a cosine."""

    type: Literal["cosine"] = "cosine"


def _by_type(value: Any) -> Any:
    return {"type": value} if isinstance(value, str) else value


Decay = Annotated[
    Annotated[ConstantRate | LinearDecay | CosineDecay, Field(discriminator="type")],
    BeforeValidator(_by_type),
]
"""``constant``, ``linear`` or ``cosine``; or ``{type: cosine, min_lr: 1e-7}``."""


class OptimizerConfig(Section):
    """Adam as Megatron's optimizer runs it, with a linear warm-up and then a decay of the learning rate."""

    lr: float = Field(1e-6, gt=0, description="Learning rate after warm-up.")
    warmup_steps: int = Field(0, ge=0, description="Training steps of linear warm-up.")
    decay: Decay = Field(ConstantRate(), description="How the learning rate goes on after warm-up.")
    weight_decay: float = Field(0.0, ge=0, description="Of matrices; norms and biases have none.")
    beta1: float = Field(0.9, ge=0, lt=1)
    beta2: float = Field(0.95, ge=0, lt=1)
    eps: float = Field(1e-8, gt=0)
    clip_grad: float = Field(1.0, ge=0, description="Largest global gradient norm; 0 switches clipping off.")
    distributed: bool = Field(
        False, description="Shard the optimizer state over data-parallel ranks (DistributedOptimizer)."
    )
    overlap_grad_reduce: bool = Field(
        False, description="Sum gradients over data-parallel ranks while the backward pass goes on."
    )
    overlap_param_gather: bool = Field(
        False,
        description="Gather the weights of one update during the forward pass of the next one of the same "
        "training step (needs distributed, overlap_grad_reduce and minibatches > 1).",
    )
