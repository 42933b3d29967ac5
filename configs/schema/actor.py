"""``actor``: the policy being trained."""

from typing import Any, Literal

from pydantic import AliasChoices, Field

from slipstream.configs.schema.base import Section
from slipstream.configs.schema.models import KLConfig, TeacherConfig
from slipstream.configs.schema.objective import (
    CorrectionConfig,
    Objective,
    OverlongConfig,
    PPOObjective,
    TurnsConfig,
)
from slipstream.configs.schema.optimizer import OptimizerConfig

LinearLayer = Literal[
    "linear_qkv",
    "linear_proj",
    "linear_fc1",
    "linear_fc2",
    "linear_q_proj",
    "linear_q_down_proj",
    "linear_q_up_proj",
    "linear_kv_down_proj",
    "linear_kv_up_proj",
]
"""Attention: fused query, key, value; output. Feed-forward, dense and of experts: fused gate and up; down.
Latent attention has the others instead of linear_qkv."""


class ParallelConfig(Section):
    """How many ways the model is split. The trainer has tensor * context * pipeline * data ranks."""

    tensor: int = Field(1, ge=1, description="Tensor-parallel ranks.")
    pipeline: int = Field(1, ge=1, description="Pipeline stages.")
    virtual_pipeline: int = Field(
        1, ge=1, description="Parts of the model that each pipeline stage holds (interleaved schedule)."
    )
    layers: list[int] | None = Field(
        None,
        description="Layers of each part of the pipeline, in order: `pipeline * virtual_pipeline` numbers; "
        "null: the same in each.",
    )
    data: int = Field(1, ge=1, description="Data-parallel replicas.")
    sequence: bool = Field(False, description="Sequence parallelism inside the tensor-parallel group.")
    context: int = Field(
        1,
        ge=1,
        description="Ranks that share the tokens of each trajectory (needs layer_spec: transformer_engine).",
    )
    expert: int = Field(1, ge=1, description="Ranks that different experts are spread over.")
    expert_tensor: int | None = Field(
        None, ge=1, description="Tensor-parallel ranks of each expert; null: as `tensor`."
    )

    @property
    def microbatch_multiple(self) -> int:
        """A rank's micro-batches come in multiples of this: interleaved, there is one for each stage."""
        return self.pipeline if self.virtual_pipeline > 1 else 1

    @property
    def trajectory_multiple(self) -> int:
        """The tokens of a padded trajectory are a multiple of this: context parallelism cuts it evenly."""
        return 2 * self.context if self.context > 1 else 1

    @property
    def length_multiple(self) -> int:
        """Those of a micro-batch of this: sequence parallelism splits what a rank has of it."""
        return self.trajectory_multiple * (self.tensor if self.sequence else 1)

    @property
    def world_size(self) -> int:
        return self.tensor * self.context * self.pipeline * self.data


class LoraConfig(Section):
    """Train low-rank adapters of linear layers, W + alpha / rank * B A, and leave the model itself as it is.

    Engines get merged weights.
    """

    rank: int = Field(ge=1, description="Rows of A and columns of B.")
    alpha: float = Field(gt=0, description="Adapters count alpha / rank times.")
    targets: list[LinearLayer] | None = Field(
        None,
        min_length=1,
        description="Megatron's names of the layers; null: all linear layers of the decoder.",
    )


Advantage = Literal["grpo", "dr_grpo", "rloo", "reinforce_pp", "reinforce_pp_baseline", "gae", "reward"]


class TrainedConfig(Section):
    """How a model is trained, whatever for."""

    parallel: ParallelConfig = ParallelConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    lora: LoraConfig | None = Field(None, description="null: train all weights.")
    averaging: Literal["token", "sequence", "prompt"] = Field(
        "token",
        description="What has equal weight in the loss of a minibatch: tokens, trajectories or prompts.",
    )
    microbatch_tokens: int = Field(
        8192, ge=1, description="Token budget of one packed forward pass on one data-parallel rank."
    )
    fp32_lm_head: bool = Field(
        False,
        description="Do not round a bfloat16 model's logits to bfloat16. No effect on a float32 model.",
    )
    layer_spec: Literal["auto", "transformer_engine", "local"] = Field(
        "auto",
        description="Layers of Transformer Engine, or plain PyTorch ones; auto: the former on GPUs where "
        "it is installed, for bfloat16 models without adapters.",
    )
    recompute: Literal["none", "selective", "full"] = Field(
        "none",
        description="Activations that the backward pass computes again instead of keeping them: none, those "
        "inside of attention, or all but the input of each layer.",
    )
    megatron: dict[str, Any] = Field(
        default_factory=dict,
        description="Further fields of Megatron's TransformerConfig and OptimizerConfig, by their own names.",
    )


class ActorConfig(TrainedConfig):
    objective: Objective = Field(PPOObjective(), description="What is minimised (docs/objectives.md).")
    correction: CorrectionConfig = CorrectionConfig()
    use_decoupled_loss: bool = Field(
        True,
        description="Take the ratio to the proximal policy, weight by proximal / behaviour (AReaL).",
    )
    recompute_logprobs: bool = Field(
        True,
        validation_alias=AliasChoices("recompute_logprobs", "recompute_logprob"),
        description="Recompute the log-probs of a batch with the weights that the step starts from.",
    )
    interpolate_logprobs: bool = Field(
        False,
        description="Estimate the proximal log-probs of the decoupled loss instead, between behaviour and "
        "current ones according to lag (A-3PO): no forward pass.",
    )
    advantage: Advantage = Field(
        "grpo",
        description="From rewards to advantages. grpo: (reward - mean) / standard deviation within a group; "
        "dr_grpo: not divided; rloo: reward - mean of the others in the group; reinforce_pp: whitened "
        "over the tokens of the batch, with _baseline after subtracting the mean of the group; gae: of each "
        "token from the `critic`'s values, whitened; reward: as it is.",
    )
    overlong: OverlongConfig | None = Field(None, description="Penalty for long answers; null: none.")
    turns: TurnsConfig | None = Field(None, description="Rewards of single turns; null: only the episode's.")
    kl: KLConfig | None = Field(
        None, description="Keeps the policy near a reference model; null: no such model."
    )
    teacher: TeacherConfig | None = Field(None, description="Distillation; null: no such model.")
    entropy_bonus: float = Field(
        0.0, ge=0, description="Coefficient of the policy's entropy, which is subtracted from the loss."
    )
    minibatches: int = Field(1, ge=1, description="Optimizer updates per training step.")
