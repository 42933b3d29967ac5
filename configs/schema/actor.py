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
from slipstream.configs.schema.base import ModelSetting, Section
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


class DriftConfig(Section):
    """Slows training while the policy at the start of a training step is too far from the policy that sampled
    its batch. Formulas: docs/objectives.md#limits-of-drift."""

    kl: float | None = Field(
        default=0.01,
        gt=0,
        description="Largest KL(mu, pi_old), in nats per token (`staleness/kl`); null: unlimited.",
    )
    ess: float | None = Field(
        default=None,
        gt=0,
        lt=1,
        description="Smallest effective sample size of the importance weights pi_old / mu, as a fraction of "
        "the tokens (`train/ess`); null: unlimited.",
    )
    slows: Literal["learning_rate", "admission"] = Field(
        default="learning_rate",
        description="Quantity that is reduced to hold the limits. `learning_rate`: the factor of the "
        "learning rate. `admission`: the number of groups that may be in flight, so that tokens become "
        "less stale while the learning rate stays.",
    )
    floor: float = Field(
        default=0.05,
        gt=0,
        le=1,
        description="Smallest factor of the learning rate, or smallest fraction of the groups in flight. "
        "One batch may always be in flight.",
    )


RoutingReplay = Literal["off", "recompute", "rollout"]

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
    """The layout of the trainer, which has `tensor * context * pipeline * data` ranks. Experts are spread
    over the `tensor * context * data` ranks of a pipeline stage in a grid of their own: `expert *
    expert_tensor` ranks hold one copy of all experts."""

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
        description="Number of ranks that share the tokens of each trajectory, for trajectories that are "
        "too long for one GPU. A trajectory is padded to a multiple of `2 * context` tokens and cut into "
        "`2 * context` chunks, of which each rank gets an early and a late one. Log-probs are gathered "
        "before the loss, so that losses over whole trajectories work too. The ranks hold the same "
        "weights, and a `distributed` optimizer state is sharded over `context * data` ranks. More than 1 "
        "needs `actor.layer_spec: transformer_engine`.",
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
    """Low-rank adapters of linear layers, `W + alpha / rank * B A`. The model's own weights are not trained:
    gradients, optimizer state and their collectives exist for A and B only.

    ```yaml
    actor:
      lora: {rank: 16, alpha: 32, targets: [linear_qkv, linear_proj]}
      optimizer: {lr: 1.0e-5}
    ```

    A is initialised as in peft, with the same values in every layout, and B to zero. There is no dropout.
    Routers, norms, embeddings, the output layer, and the convolution and decays of linear attention are not
    adapted. A checkpoint holds the model and the adapters, and loads in any layout with the same `rank`,
    `alpha` and `targets`. A reference (`actor.kl`) is `model.path` without the adapter.

    **PEFT.** A run ends with `checkpoint-hf/`, into whose weights the adapter is merged, and
    `checkpoint-peft/`, the adapter alone, which `PeftModel.from_pretrained(model, "checkpoint-peft")` loads.
    `slipstream convert megatron-to-peft` writes the same from any checkpoint. The adapters of a fused layer
    have the same A in each of its modules. In a model with experts, PEFT 0.21 under transformers 5 loads
    adapters of attention, and those of experts only if every layer has experts and none has shared ones.
    """

    rank: int = Field(ge=1, description="Rank of the adapters: the rows of A and the columns of B.")
    alpha: float = Field(gt=0, description="Scale of the adapters: their output is times alpha / rank.")
    targets: list[LinearLayer] | None = Field(
        default=None,
        min_length=1,
        description="Megatron's names of the layers to adapt; null: all linear layers of the decoder. "
        "`linear_qkv`: `q_proj`, `k_proj` and `v_proj`, which share A. `linear_proj`: `o_proj`. "
        "`linear_fc1`: `gate_proj` and `up_proj`, which share A, of dense layers, shared experts and each "
        "expert. `linear_fc2`: `down_proj` of the same. Latent attention has `linear_q_proj` (`q_proj`), "
        "or `linear_q_down_proj` and `linear_q_up_proj` (`q_a_proj` and `q_b_proj`), and "
        "`linear_kv_down_proj` and `linear_kv_up_proj` (`kv_a_proj_with_mqa` and `kv_b_proj`). Linear "
        "attention has `in_proj` (`in_proj_qkvz` and `in_proj_ba`, or four `in_proj_*`, which share A) and "
        "`out_proj`.",
    )
    path: ModelSetting | None = Field(
        default=None,
        description="Folder of an adapter in PEFT's format, with which training begins; null: a new "
        "adapter, whose output is 0. The folder is loaded in any layout, and bit for bit if `rank`, "
        "`alpha` and `model.dtype` are those of the adapter. PEFT trains an A for each module, while a "
        "layer here has one A: an adapter of PEFT's needs the sum of the ranks of the modules that a layer "
        "fuses, so `rank: 48` for r = 16 on `q_proj`, `k_proj` and `v_proj`. Rows of A that the folder "
        "does not fill are drawn, with columns of B that are zero, and B makes up for another `alpha / "
        "rank`: the policy begins exactly as the adapter describes it. Only plain LoRA of linear layers is "
        "read: no DoRA, no biases, no modules that are saved whole. The adapter is part of version 0, so "
        "`slipstream try`, and `slipstream serve` without training, refuse it.",
    )
    serve: Literal["merged", "adapter"] = Field(
        default="merged",
        description="Weights of a version that the engines get. `merged`: all weights, with the adapter "
        "merged into them in float32 and rounded once. In bfloat16 this rounding loses a part of a small "
        "adapter, so the trainer's log-probs differ slightly more from the engines' than without adapters; "
        "`actor.recompute_logprobs` keeps the difference out of the clipped ratio. `adapter`: A and B "
        "alone, which SGLang applies beside the weights of `model.path` and loads while it generates "
        "(docs/publishing.md#an-adapter-alone): nothing is lost in a rounding. It needs "
        "`weights.interrupt: abort` or `drain`, and a model of the type `llama`, `mistral`, `qwen2` or "
        "`qwen3`; it is refused where engines take turns with the trainer.",
    )


class TrainedConfig(Section):
    """The model that is trained, and how."""

    parallel: ParallelConfig = Field(default=ParallelConfig())
    optimizer: OptimizerConfig = Field(default=OptimizerConfig())
    lora: LoraConfig | None = Field(default=None, description="Without the section all weights are trained.")
    averaging: Literal["token", "sequence", "prompt", "constant"] = Field(
        default="token",
        description="Unit with equal weight in the loss of a mini-batch: a token, a trajectory "
        "(`sequence`) or a prompt. `constant`: for each trajectory the sum over its tokens / "
        "`averaging_length`, and the mean of these over the trajectories (Dr. GRPO).",
    )
    averaging_length: int | None = Field(
        default=None,
        ge=1,
        description="Number of tokens by which `averaging: constant` divides the sum over a trajectory. "
        "Dr. GRPO takes the largest length of a completion (`rollout.sampling.max_new_tokens`). null: with "
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
        description="Keep the logits of a bfloat16 model in float32, which reduces the trainer's share of "
        "the difference between its log-probs and the engines'. `rollout.engine.args: "
        "{enable_fp32_lm_head: true}` reduces the engines' share (ScaleRL, arXiv:2510.13786). Softmax and "
        "entropy are computed in float32 in any case, and the precision of the gradients does not change. "
        "The setting costs little on a GPU; on a CPU it makes the forward pass of the head about 2.5 times "
        "as long. It has no effect on a float32 model.",
    )
    lm_head: Literal["auto", "triton", "chunked"] = Field(
        default="auto",
        description="Implementation of the LM head, which computes the logits of one slice of the "
        "vocabulary after another. `triton`: one Triton kernel forward and one backward. `chunked`: "
        "PyTorch's operations, which take more time and memory. `auto`: the kernels on GPUs where Triton "
        "is installed.",
    )
    layer_spec: Literal["auto", "transformer_engine", "local"] = Field(
        default="auto",
        description="Implementation of the layers. `transformer_engine`: Transformer Engine's, whose "
        "attention needs bfloat16 and whose layers take no adapters. `local`: plain PyTorch. `auto`: "
        "Transformer Engine's on GPUs where it is installed, for bfloat16 models without adapters or "
        "sparse attention, and without `share_prefixes`. Checkpoints and the weights that the engines "
        "receive do not depend on this setting.",
    )
    share_prefixes: Literal["auto", "off"] = Field(
        default="off",
        description="Tokens with which trajectories of a micro-batch begin alike: the prompt of a group, the "
        "history of an agent's branches. `auto`: computed once where this saves a tenth of the FLOPs, with "
        "the same losses and gradients. Trajectories in other mini-batches share nothing. It needs layers of "
        "the local spec, which `layer_spec: auto` then takes, and a model without linear or sparse "
        "attention. On GPUs torch compiles their attention in the first steps, once for each of the few "
        "lengths to which micro-batches are padded.",
    )

    recompute: Literal["none", "selective", "full"] = Field(
        default="none",
        description="Activations that the backward pass computes again instead of keeping them in memory. "
        "This trades time for memory and does not change gradients. `selective`: those inside attention, "
        "or in the modules of `actor.megatron: {recompute_modules: [...]}`. `full`: all except the input "
        "of each layer; with `actor.megatron: {recompute_method: block, recompute_num_layers: n}` only in "
        "the first n layers of each pipeline part.",
    )
    megatron: dict[str, object] = Field(
        default={},
        description="Further fields of Megatron's TransformerConfig and OptimizerConfig, under their own "
        "names. On GPUs the layers use fused kernels where they are legal: rotary embeddings "
        "(`apply_rope_fusion`), SwiGLU (`bias_activation_fusion`) and the permutation of tokens by expert "
        "(`moe_permute_fusion`). A kernel can be turned off here; turning on one that is not legal is an "
        "error. Fields that Slipstream sets itself, that change the model, or that cannot work are refused: "
        "configs/installed/megatron_fields.py lists every field.",
    )
    untested: list[str] = Field(
        default=[],
        description="Names of fields in `megatron` that nobody has tried with Slipstream, and that are "
        "passed on nevertheless. The start of the run, its report and its summary name them.",
    )


class ActorConfig(TrainedConfig):
    """The policy being trained."""

    objective: Objective = Field(
        default=PPOObjective(),
        description="The loss (docs/objectives.md). mu is the behaviour policy, "
        "pi_old the proximal policy, pi the policy being trained. `slipstream settings actor.correction` "
        "has the corrections for stale data.",
    )
    correction: CorrectionConfig = Field(default=CorrectionConfig())
    use_decoupled_loss: bool = Field(
        default=True,
        description="Take the ratio to the proximal policy, and multiply the loss by the importance weight "
        "proximal / behaviour (AReaL). Needs `actor.recompute_logprobs` or `actor.interpolate_logprobs`.",
    )
    recompute_logprobs: bool = Field(
        default=True,
        description="Compute the proximal log-probs of a batch with the weights that the training step "
        "starts from. The first mini-batch needs no forward pass for this: its own training pass gives "
        "them. AReaL's spelling `actor.recompute_logprob` is read too.",
    )
    interpolate_logprobs: bool = Field(
        default=False,
        description="Estimate the proximal log-probs instead of computing them, by interpolating between "
        "behaviour and current log-probs according to lag (A-3PO). This saves the forward pass that "
        "`actor.recompute_logprobs` makes for every mini-batch but the first. Only with "
        "`actor.use_decoupled_loss`.",
    )
    routing_replay: RoutingReplay = Field(
        default="off",
        description="Mixtures of experts. `recompute`: each update sends a token to the experts that it took "
        "in the pass for its proximal log-probs, so that the ratio to them does not jump where the router "
        "chooses others. The first mini-batch has no such pass and needs none. `rollout`: every pass of the "
        "policy sends a token to the experts that it took in the engine, prompts included, so that trainer "
        "and engine compute with the same ones. After an interruption these are the ones with which the "
        "engine went on. It costs layers * experts of a token in bytes for each token, and four times that "
        "for each token of the KV cache in an engine's host memory. Tokens without routes "
        "(`mismatch/unrouted`: of users and agents, of an engine that ended before it told) go where the "
        "router sends them. Gates, gradients and auxiliary losses are those of the present router.",
    )

    drift: DriftConfig | None = Field(
        default=None,
        description="Without the section the drift has no limit.",
    )
    advantage: list[AdvantageTerm] = Field(
        default=[RewardTerm()],
        min_length=1,
        description="A list of terms that add up to the advantage of each token, each type at most once: "
        "`advantage: [{type: reward, estimator: grpo}, {type: teacher, weight: 0.5, scores: {type: model, "
        "path: models/teacher}}]`. An override gives the whole list: `actor.advantage=[...]`. A teacher's "
        "term trains the tokens for which the teacher has a log-prob; all other tokens have the other "
        "terms alone. Without a term of type `reward`, rewards are metrics and train nothing. Formulas: "
        "docs/objectives.md#advantages. Each term is a metric of its own: `slipstream metrics advantage`.",
    )
    advantage_norm: AdvantageNorm | None = Field(
        default=None,
        description="Without the section there is no such normalization; `{}` turns it on with its defaults.",
    )
    overlong: OverlongConfig | None = Field(
        default=None, description="Without the section there is no penalty."
    )
    turns: TurnsConfig | None = Field(
        default=None, description="Without the section only episodes have rewards."
    )
    kl: KLConfig | None = Field(default=None, description="Without the section no reference model is loaded.")
    entropy_bonus: float = Field(
        default=0.0,
        ge=0,
        description="Coefficient of the policy's entropy. The product is subtracted from the loss.",
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

    def largest_microbatch(self, new_tokens: int) -> int:
        """Return the tokens of the largest micro-batch that is planned for. ``new_tokens``: of the longest
        completion.

        A trajectory that is longer than the budget has a micro-batch of its own. The lengths of prompts are
        unknown; a completion alone may take ``new_tokens``.
        """
        return max(self.microbatch_tokens, new_tokens)

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
