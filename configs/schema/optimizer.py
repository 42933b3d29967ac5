"""``optimizer`` of the actor and of the critic."""

from pydantic import Field

from configs.schema.base import Section


class OptimizerConfig(Section):
    """Adam as Megatron's optimizer runs it, with a linear warm-up to a constant learning rate."""

    lr: float = Field(1e-6, gt=0, description="Learning rate after warm-up.")
    warmup_steps: int = Field(0, ge=0, description="Training steps of linear warm-up.")
    weight_decay: float = Field(0.0, ge=0)
    beta1: float = Field(0.9, ge=0, lt=1)
    beta2: float = Field(0.95, ge=0, lt=1)
    eps: float = Field(1e-8, gt=0)
    clip_grad: float = Field(1.0, ge=0, description="Largest global gradient norm; 0 switches clipping off.")
    distributed: bool = Field(
        False, description="Shard the optimizer state over data-parallel ranks (DistributedOptimizer)."
    )
