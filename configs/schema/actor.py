"""``actor``: the policy being trained."""

from typing import Literal

from pydantic import Field

from slipstream.configs.schema.advantage import (
    AdvantageNorm,
    AdvantageTerm,
    Estimator,
    ModelScores,
    PluginTerm,
    RewardTerm,
    TeacherTerm,
    TopTokensTerm,
)
from slipstream.configs.schema.base import PathSetting, Section
from slipstream.configs.schema.drift import DriftConfig
from slipstream.configs.schema.models import KLConfig
from slipstream.configs.schema.objective import (
    CorrectionConfig,
    Objective,
    OverlongConfig,
    PPOObjective,
    TurnsConfig,
)
from slipstream.configs.schema.optimizer import OptimizerConfig
from slipstream.configs.schema.plugin import Plugin

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
    "in_proj",
    "out_proj",
]
"""Megatron's names of linear layers. In attention: the fused query, key and value projection, and the
output projection. In dense and expert feed-forward layers: the fused gate and up projection, and the down
projection. ``in_proj`` and ``out_proj`` are those of linear attention. The other names replace
``linear_qkv`` in latent attention."""


class ParallelConfig(Section):
    """The layout of the trainer, which has tensor * context * pipeline * data ranks."""

    tensor: int = Field(default=1, ge=1, description="Number of tensor-parallel ranks.")
    pipeline: int = Field(default=1, ge=1, description="Number of pipeline stages.")
    virtual_pipeline: int = Field(
        default=1,
        ge=1,
        description="Number of model parts on each pipeline stage (interleaved schedule).",
    )
    layers: list[int] | None = Field(
        default=None,
        description="Number of layers of each model part, in order: `pipeline * virtual_pipeline` numbers; "
        "null: the same number in each.",
    )
    data: int = Field(default=1, ge=1, description="Number of data-parallel replicas.")
    sequence: bool = Field(
        default=False, description="Use sequence parallelism inside the tensor-parallel group."
    )
    context: int = Field(
        default=1,
        ge=1,
        description="Number of ranks that share the tokens of each trajectory. More than 1 needs "
        "`actor.layer_spec: transformer_engine`.",
    )
    expert: int = Field(default=1, ge=1, description="Number of ranks over which the experts are spread.")
    expert_tensor: int | None = Field(
        default=None, ge=1, description="Number of tensor-parallel ranks of each expert; null: `tensor`."
    )

    @property
    def microbatch_multiple(self) -> int:
        """Divisor of the number of micro-batches of a rank. The interleaved schedule needs a multiple of the
        number of pipeline stages."""
        return self.pipeline if self.virtual_pipeline > 1 else 1

    @property
    def trajectory_multiple(self) -> int:
        """Divisor of the tokens of a padded trajectory: context parallelism cuts it into equal chunks."""
        return 2 * self.context if self.context > 1 else 1

    @property
    def length_multiple(self) -> int:
        """Divisor of the tokens of a micro-batch: sequence parallelism splits a rank's share of it."""
        return self.trajectory_multiple * (self.tensor if self.sequence else 1)

    @property
    def world_size(self) -> int:
        """Number of ranks of the trainer."""
        return self.tensor * self.context * self.pipeline * self.data


class LoraConfig(Section):
    """Low-rank adapters of linear layers, W + alpha / rank * B A. The model's own weights are not trained."""

    rank: int = Field(ge=1, description="Rank of the adapters: the rows of A and the columns of B.")
    alpha: float = Field(gt=0, description="Scale of the adapters: their output is times alpha / rank.")
    targets: list[LinearLayer] | None = Field(
        default=None,
        min_length=1,
        description="Megatron's names of the layers to adapt; null: all linear layers of the decoder.",
    )
    path: PathSetting | None = Field(
        default=None,
        description="Folder of an adapter in PEFT's format, with which training begins; null: a new adapter, "
        "whose output is 0.",
    )
    serve: Literal["merged", "adapter"] = Field(
        default="merged",
        description="What the engines get of a version. `merged`: all weights, with the adapter merged into "
        "them. `adapter`: A and B alone, which SGLang applies beside the weights of `model.path`. It needs "
        "`weights.interrupt` to be `abort` or `drain`.",
    )


class TrainedConfig(Section):
    """Settings of the trainer that do not depend on what the model is trained for."""

    parallel: ParallelConfig = Field(default=ParallelConfig(), description="Layout of the trainer.")
    optimizer: OptimizerConfig = Field(default=OptimizerConfig(), description="Optimizer of the model.")
    lora: LoraConfig | None = Field(
        default=None, description="Low-rank adapters; null: all weights are trained."
    )
    averaging: Literal["token", "sequence", "prompt", "constant"] = Field(
        default="token",
        description="Unit with equal weight in the loss of a mini-batch: a token, a trajectory "
        "(`sequence`) or a prompt. `constant`: the mean over trajectories of the sum over their tokens / "
        "`averaging_length` (Dr. GRPO).",
    )
    averaging_length: int | None = Field(
        default=None,
        ge=1,
        description="Number of tokens by which `averaging: constant` divides the sum over a trajectory. "
        "Dr. GRPO takes the largest length of a completion (`rollout.sampling.max_new_tokens`). null: for "
        "the other values of `averaging`.",
    )
    microbatch_tokens: int = Field(
        default=8192,
        ge=1,
        description="Largest number of tokens in a micro-batch, for all ranks of one data-parallel replica "
        "together. A longer trajectory has a micro-batch of its own.",
    )
    fp32_lm_head: bool = Field(
        default=False,
        description="Keep the logits of a bfloat16 model in float32. Has no effect on a float32 model.",
    )
    lm_head: Literal["auto", "triton", "chunked"] = Field(
        default="auto",
        description="What the LM head does with the logits of one slice of the vocabulary after another: one "
        "Triton kernel forward and one backward, or PyTorch's operations (`chunked`), which take more time "
        "and memory. `auto` takes the kernels on GPUs where Triton is installed.",
    )
    layer_spec: Literal["auto", "transformer_engine", "local"] = Field(
        default="auto",
        description="Implementation of the layers: Transformer Engine's, or plain PyTorch (`local`). `auto` "
        "takes Transformer Engine's on GPUs where it is installed, for bfloat16 models without adapters or "
        "sparse attention.",
    )
    recompute: Literal["none", "selective", "full"] = Field(
        default="none",
        description="Activations that the backward pass recomputes instead of keeping them in memory: none, "
        "the ones inside attention (`selective`), or all except the input of each layer (`full`).",
    )
    megatron: dict[str, object] = Field(
        default={},
        description="Further fields of Megatron's TransformerConfig and OptimizerConfig, under their own "
        "names.",
    )


class ActorConfig(TrainedConfig):
    """The policy being trained."""

    objective: Objective = Field(
        default=PPOObjective(), description="Function that training minimises (docs/objectives.md)."
    )
    correction: CorrectionConfig = Field(
        default=CorrectionConfig(), description="Corrections for stale tokens and sequences."
    )
    use_decoupled_loss: bool = Field(
        default=True,
        description="Take the ratio to the proximal policy, and multiply the loss by the importance weight "
        "proximal / behaviour (AReaL).",
    )
    recompute_logprobs: bool = Field(
        default=True,
        description="Compute the proximal log-probs of a batch with the weights that the training step "
        "starts from. The first mini-batch needs no forward pass for it: its own training pass gives them.",
    )
    interpolate_logprobs: bool = Field(
        default=False,
        description="Estimate the proximal log-probs instead of computing them, by interpolating between "
        "behaviour and current log-probs according to lag (A-3PO). Saves the forward pass that "
        "`recompute_logprobs` makes for every mini-batch but the first.",
    )
    drift: DriftConfig | None = Field(
        default=None,
        description="Limits on how far the policy may leave the one that sampled its data; null: none.",
    )
    advantage: list[AdvantageTerm] = Field(
        default=[RewardTerm()],
        min_length=1,
        description="Terms that add up to the advantage of a token, each type at most once.",
    )
    advantage_norm: AdvantageNorm | None = Field(
        default=None,
        description="Normalization of the sum of all terms over the tokens of the batch; null: none.",
    )
    overlong: OverlongConfig | None = Field(
        default=None, description="Penalty for long trajectories; null: none."
    )
    turns: TurnsConfig | None = Field(
        default=None, description="Rewards of single turns; null: only episodes have rewards."
    )
    kl: KLConfig | None = Field(
        default=None, description="Penalty for leaving a reference model; null: none is loaded."
    )
    entropy_bonus: float = Field(
        default=0.0,
        ge=0,
        description="Coefficient of the policy's entropy, which is subtracted from the loss.",
    )
    minibatches: int = Field(
        default=1,
        ge=1,
        description="Number of mini-batches, and so of optimizer updates, in a training step.",
    )

    transforms: list[Plugin] = Field(
        default=[],
        description="Import paths of classes with the method `transform` of `slipstream.BatchTransform`, "
        "which change a batch before it is packed, in this order.",
    )
    metrics: list[Plugin] = Field(
        default=[],
        description="Import paths of classes with the method `metrics` of `slipstream.BatchMetrics`, which "
        "return further metrics of a training step.",
    )

    @property
    def serves_adapter(self) -> bool:
        """True if the engines get the adapter of a version beside weights that stay as they are."""
        return self.lora is not None and self.lora.serve == "adapter"

    @property
    def reward_term(self) -> RewardTerm | None:
        """The term from rewards; None: rewards train nothing."""
        return next((term for term in self.advantage if isinstance(term, RewardTerm)), None)

    @property
    def estimator(self) -> Estimator | None:
        """The estimator of the term from rewards; None: there is no such term."""
        term = self.reward_term
        return None if term is None else term.estimator

    @property
    def teacher_term(self) -> TeacherTerm | None:
        """The term from a teacher's log-probs of the sampled tokens; None: there is none."""
        return next((term for term in self.advantage if isinstance(term, TeacherTerm)), None)

    @property
    def teacher_model(self) -> ModelScores | None:
        """The teacher that the trainer holds; None: there is none."""
        term = self.teacher_term
        return term.scores if term is not None and isinstance(term.scores, ModelScores) else None

    @property
    def plugin_term(self) -> PluginTerm | None:
        """The term that code of the user's computes; None: there is none."""
        return next((term for term in self.advantage if isinstance(term, PluginTerm)), None)

    @property
    def top_tokens_term(self) -> TopTokensTerm | None:
        """The term from a teacher's likeliest tokens; None: there is none."""
        return next((term for term in self.advantage if isinstance(term, TopTokensTerm)), None)
