"""``optimizer`` of the actor and of the critic."""

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from slipstream.configs.schema.base import Section


class ConstantRate(Section):
    """After the warm-up the learning rate stays at `lr`."""

    type: Literal["constant"] = "constant"


class _Decaying(Section):
    min_lr: float = Field(default=0.0, ge=0, description="Learning rate after the decay. Less than `lr`.")
    start: int = Field(
        default=0,
        ge=0,
        description="Training step, warm-up included, after which the decay begins. The decay never begins "
        "before the end of the warm-up.",
    )
    steps: int | None = Field(
        default=None,
        ge=1,
        description="Training step, warm-up included, after which the learning rate is `min_lr`. More than "
        "`warmup_steps` and `start`. null: `run.steps`.",
    )


class LinearDecay(_Decaying):
    """The learning rate falls linearly from `lr` to `min_lr`."""

    type: Literal["linear"] = "linear"


class CosineDecay(_Decaying):
    """The learning rate falls from `lr` to `min_lr` along half a cosine."""

    type: Literal["cosine"] = "cosine"


Decay = Annotated[
    Annotated[ConstantRate | LinearDecay | CosineDecay, Field(discriminator="type")],
    BeforeValidator(lambda value: {"type": value} if isinstance(value, str) else value),
]
"""``constant``, ``linear`` or ``cosine``; or ``{type: cosine, min_lr: 1e-7}``."""


class OptimizerConfig(Section):
    """Megatron's Adam. The learning rate rises linearly over `warmup_steps` and then follows `decay`. It
    depends on the training step alone, so a resumed run continues where it stopped. Norms and biases, the
    parameters of one dimension, have no weight decay, and frozen weights have none either: with `actor.lora`,
    only the adapters decay. `actor.megatron: {apply_wd_to_qk_layernorm: true}` applies weight decay to the
    norms of queries and keys.

    The two `overlap` settings change when ranks communicate, but not what they compute. They are useful on
    GPUs and work on CPUs. With `overlap_grad_reduce`, the gradient of the output layer takes as much
    additional memory as that layer, in `model.dtype`.
    """

    lr: float = Field(default=1e-6, gt=0, le=1, description="Peak learning rate, reached after the warm-up.")
    warmup_steps: int = Field(
        default=0, ge=0, description="Number of training steps over which the learning rate rises linearly."
    )
    decay: Decay = Field(
        default=ConstantRate(),
        description="The learning rate after the warm-up. `decay: "
        "cosine` is short for a type with its defaults.",
    )
    weight_decay: float = Field(
        default=0.0,
        ge=0,
        description="Decoupled weight decay (AdamW) of matrices. Norms and biases have none.",
    )
    beta1: float = Field(default=0.9, ge=0, lt=1, description="Decay rate of Adam's first moment.")
    beta2: float = Field(default=0.95, ge=0, lt=1, description="Decay rate of Adam's second moment.")
    eps: float = Field(
        default=1e-8, gt=0, description="Constant added to the square root of Adam's second moment."
    )
    clip_grad: float = Field(
        default=1.0, ge=0, description="Largest global gradient norm; 0 switches clipping off."
    )
    distributed: bool = Field(
        default=False,
        description="Shard the optimizer state over data-parallel ranks (Megatron's DistributedOptimizer).",
    )
    overlap_grad_reduce: bool = Field(
        default=False,
        description="Sum gradients over data-parallel ranks during the backward pass instead of after it.",
    )
    overlap_param_gather: bool = Field(
        default=False,
        description="Gather the updated weights during the next forward pass of the same training step. "
        "Needs `distributed`, `overlap_grad_reduce` and `actor.minibatches` of at least 2.",
    )
