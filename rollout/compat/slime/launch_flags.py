"""Translates slime's flags into settings of a recipe, and reports on each flag of a script.

Four tables: settings with the same meaning, settings that need more than one flag (functions), flags that
Slipstream needs nothing for, and flags that it refuses. Whatever is in none of them is unknown.
"""

import json
from collections.abc import Callable
from typing import cast

from slipstream.rollout.compat.imports.launch_script import LaunchScript


class FlagError(ValueError):
    """The value of a flag cannot be said in a recipe."""


def _whole(text: str) -> int:
    try:
        return int(text.replace("_", ""))
    except ValueError:
        raise FlagError(f"{text!r} is no whole number") from None


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise FlagError(f"{text!r} is no number") from None


def _text(text: str) -> str:
    if not text:
        raise FlagError("it has no value")
    return text


def _yes(text: str) -> bool:
    return text.lower() not in ("false", "0", "no")


def _one_of(**names: object) -> Callable[[str], object]:
    def convert(text: str) -> object:
        if text not in names:
            raise FlagError(f"{text!r} has no counterpart; these have: {', '.join(names)}")
        return names[text]

    return convert


def _object(text: str) -> dict[str, object]:
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise FlagError(f"expected a JSON object, found {text!r}")
    return cast("dict[str, object]", value)


PIPELINE = ("sglang-pp-size", "sglang-pp", "sglang-pipeline-parallel-size")
DATA = ("sglang-dp-size", "sglang-dp", "sglang-data-parallel-size")
"""Flags of one setting, by every name that SGLang has for it."""

Setting = tuple[str, Callable[[str], object]]

SETTINGS: dict[str, Setting] = {
    "hf-checkpoint": ("model.path", _text),
    "num-rollout": ("run.steps", _whole),
    "seed": ("run.seed", _whole),
    "rollout-batch-size": ("rollout.batch_size", _whole),
    "n-samples-per-prompt": ("rollout.n_samples_per_prompt", _whole),
    "rollout-temperature": ("rollout.sampling.temperature", _number),
    "rollout-max-response-len": ("rollout.sampling.max_new_tokens", _whole),
    "rollout-top-p": ("rollout.sampling.top_p", _number),
    "rollout-top-k": ("rollout.sampling.top_k", _whole),
    **dict.fromkeys(
        ("sglang-ep-size", "sglang-ep", "sglang-expert-parallel-size"),
        ("rollout.engine.expert_parallel", _whole),
    ),
    **dict.fromkeys(PIPELINE, ("rollout.engine.pipeline_parallel", _whole)),
    "rollout-max-context-len": ("rollout.engine.args.context_length", _whole),
    "colocate": ("rollout.engine.colocated", _yes),
    "use-rollout-routing-replay": (
        "actor.routing_replay",
        lambda text: "rollout" if _yes(text) else "off",
    ),
    "tensor-model-parallel-size": ("actor.parallel.tensor", _whole),
    "pipeline-model-parallel-size": ("actor.parallel.pipeline", _whole),
    "context-parallel-size": ("actor.parallel.context", _whole),
    "expert-model-parallel-size": ("actor.parallel.expert", _whole),
    "expert-tensor-parallel-size": ("actor.parallel.expert_tensor", _whole),
    "recompute-granularity": ("actor.recompute", _one_of(full="full", selective="selective")),
    "lr": ("actor.optimizer.lr", _number),
    "weight-decay": ("actor.optimizer.weight_decay", _number),
    "adam-beta1": ("actor.optimizer.beta1", _number),
    "adam-beta2": ("actor.optimizer.beta2", _number),
    "adam-eps": ("actor.optimizer.eps", _number),
    "clip-grad": ("actor.optimizer.clip_grad", _number),
    "lr-warmup-iters": ("actor.optimizer.warmup_steps", _whole),
    "use-distributed-optimizer": ("actor.optimizer.distributed", _yes),
    "overlap-grad-reduce": ("actor.optimizer.overlap_grad_reduce", _yes),
    "entropy-coef": ("actor.entropy_bonus", _number),
    "num-steps-per-rollout": ("actor.minibatches", _whole),
    "num-critic-only-steps": ("critic.warmup_steps", _whole),
    "gamma": ("critic.discount", _number),
    "lambd": ("critic.gae_lambda", _number),
    "value-clip": ("critic.value_clip", _number),
    "save-interval": ("checkpoint.every", _whole),
    "eval-interval": ("eval.every", _whole),
    "n-samples-per-eval-prompt": ("eval.n_samples_per_prompt", _whole),
    "skip-eval-before-train": ("eval.before_training", lambda text: not _yes(text)),
    "eval-max-response-len": ("eval.sampling.max_new_tokens", _whole),
    "eval-min-new-tokens": ("eval.sampling.min_new_tokens", _whole),
    "eval-temperature": ("eval.sampling.temperature", _number),
    "eval-top-p": ("eval.sampling.top_p", _number),
    "eval-top-k": ("eval.sampling.top_k", _whole),
    "eval-max-prompt-len": ("eval.max_prompt_tokens", _whole),
    "eval-input-key": ("eval.columns.prompt", _text),
    "eval-label-key": ("eval.columns.label", _text),
    "input-key": ("data.columns.prompt", _text),
    "label-key": ("data.columns.label", _text),
    "metadata-key": ("data.columns.metadata", _text),
    "rollout-max-prompt-len": ("data.max_prompt_tokens", _whole),
    "apply-chat-template-kwargs": ("model.template_args", _object),
    "group-rm": ("rollout.hooks.group_rm", _yes),
    "rm-type": ("rollout.hooks.rm_type", _text),
    "rm-url": ("rollout.hooks.rm_url", _text),
    "reward-key": ("rollout.reward_key", _text),
    "custom-config-path": ("rollout.hooks.custom_config_path", _text),
    "gradient-checkpointing": ("actor.recompute", lambda text: "full" if _yes(text) else "none"),
    "lora-rank": ("actor.lora.rank", _whole),
    "lora-alpha": ("actor.lora.alpha", _whole),
    "transformer-impl": (
        "actor.layer_spec",
        _one_of(transformer_engine="transformer_engine", local="local"),
    ),
    "no-rope-fusion": ("actor.megatron.apply_rope_fusion", lambda _: False),
}
"""The setting of a flag, and how its value is read."""

HOOKS = {
    "rollout-function-path": "rollout_function",
    "eval-function-path": "eval_function",
    "custom-generate-function-path": "custom_generate_function",
    "custom-rm-path": "custom_rm",
    "data-source-path": "data_source",
    "dynamic-sampling-filter-path": "dynamic_sampling_filter",
    "buffer-filter-path": "buffer_filter",
    "rollout-sample-hook-path": "rollout_sample_hook",
    "rollout-sample-filter-path": "rollout_sample_filter",
    "rollout-all-samples-process-path": "rollout_all_samples_process",
    "rollout-data-postprocess-path": "rollout_data_postprocess",
    "custom-reward-post-process-path": "custom_reward_post_process",
    "custom-convert-samples-to-train-data-path": "custom_convert_samples_to_train_data",
    "custom-rollout-log-function-path": "custom_rollout_log_function",
    "custom-eval-rollout-log-function-path": "custom_eval_rollout_log_function",
    "custom-advantage-function-path": "custom_advantage_function",
    "custom-loss-function-path": "custom_loss_function",
    "custom-tis-function-path": "custom_tis_function",
    "custom-pg-loss-reducer-function-path": "custom_pg_loss_reducer_function",
    "custom-megatron-init-path": "custom_megatron_init",
    "custom-megatron-before-log-prob-hook-path": "custom_megatron_before_log_prob_hook",
    "custom-megatron-before-train-step-hook-path": "custom_megatron_before_train_step_hook",
    "custom-model-provider-path": "custom_model_provider",
    "custom-update-weight-post-write-path": "custom_update_weight_post_write",
}
"""The name in ``rollout.hooks`` of a flag that names code."""

OWN_HOOKS = {
    "slime.rollout.on_policy_distillation.reward_func": (
        "slipstream.rollout.compat.slime.teacher_server.taught_by_server"
    ),
}
"""Code of slime whose place other code takes, because the contract of the hook is a different one here."""

TEACHER_READ = "slime.rollout.on_policy_distillation.post_process_rewards"
"""Reads the reply of a teacher's server, which the ``custom_rm`` has read here."""

DEFAULT_HOOKS = (
    "slime.rollout.sglang_rollout.generate_rollout",
    "slime.rollout.data_source.RolloutDataSourceWithBuffer",
    "slime.rollout.sglang_rollout.generate",
)
"""Code that does what Slipstream does without a hook."""


_OF_CHECKPOINT = "the model's config.json says it"
_ALWAYS = "Slipstream always does so"
_TENSORBOARD = "Slipstream writes metrics for TensorBoard into the run folder"
_FOLDER = "the run folder holds checkpoints: run.root and run.name"


def _each(reason: str, names: str) -> dict[str, str]:
    """Return ``reason`` for each of the names in a text."""
    return dict.fromkeys(names.split(), reason)


NEEDLESS = {
    **_each(
        _OF_CHECKPOINT,
        """
        add-qkv-bias apply-layernorm-1p attention-output-gate disable-bias-linear ffn-hidden-size
        group-query-attention hidden-size kv-channels kv-lora-rank make-vocab-size-divisible-by
        max-position-embeddings moe-ffn-hidden-size moe-layer-freq moe-router-enable-expert-bias
        moe-router-group-topk moe-router-num-groups moe-router-score-function moe-router-topk
        moe-router-topk-scaling-factor moe-shared-expert-gate moe-shared-expert-intermediate-size
        mscale mscale-all-dim multi-latent-attention no-position-embedding norm-epsilon
        normalization num-attention-heads num-experts num-layers num-query-groups
        position-embedding-type post-mlp-layernorm post-self-attn-layernorm q-lora-rank qk-head-dim
        qk-layernorm qk-pos-emb-head-dim rope-type rotary-base rotary-interleaved rotary-percent
        rotary-scaling-factor rotary-seq-len-interpolation-factor seq-length spec squared-relu
        swiglu untie-embeddings-and-output-weights use-gated-attention use-rope-scaling
        use-rotary-position-embeddings v-head-dim vocab-size moe-router-pre-softmax model-name
        padded-vocab-size
        """,
    ),
    **_each(
        _ALWAYS,
        """
        balance-by-flops no-check-for-nan-in-loss-and-grad get-mismatch-metrics
        accumulate-allreduce-grads-in-fp32 balance-data use-dynamic-batch-size apply-chat-template
        use-fault-tolerance bf16 moe-grouped-gemm attention-softmax-in-fp32 offload
        offload-train offload-rollout
        """,
    ),
    **_each(
        _TENSORBOARD,
        """
        wandb-key wandb-host wandb-dir
        wandb-run-id disable-wandb-random-suffix wandb-always-use-train-step use-tensorboard tb-project-name
        tb-experiment-name log-passrate log-multi-turn log-reward-category log-correct-samples
        """,
    ),
    **_each(
        _FOLDER,
        """
        save load async-save no-save-optim save-hf
        """,
    ),
    **_each(
        "weights.transport says how weights travel",
        """
        update-weight-transport update-weight-disk-dir update-weight-disk-keep-files
        update-weight-local-checkpoint-dir update-weight-delta-encoding update-weight-delta-checksum
        update-weight-transfer-mode
        """,
    ),
    "loss-mask-type": "the loss covers exactly the tokens that the policy sampled",
    "use-unbiased-kl": "the KL estimate in the loss is always unbiased",
    "ref-load": "the reference of the KL penalty is model.path",
    "micro-batch-size": "micro-batches are packed: actor.microbatch_tokens",
    "ref-micro-batch-size": "micro-batches are packed: actor.microbatch_tokens",
    "log-probs-chunk-size": "the LM head never holds all logits",
    "log-probs-max-tokens-per-gpu": "the LM head never holds all logits",
    "recompute-method": "actor.recompute: full recomputes every layer",
    "recompute-num-layers": "actor.recompute: full recomputes every layer",
    "update-weight-buffer-size": "weights.transport.bucket_mb has a default",
    **_each(
        "rollout.engine.answer_timeout_s says when an engine is given up",
        "rollout-health-check-interval rollout-health-check-timeout rollout-health-check-first-wait",
    ),
    **_each(
        "checkpoints of Hugging Face have no steps",
        "ref-ckpt-step opd-teacher-ckpt-step auto-detect-ckpt-format",
    ),
    "megatron-to-hf-mode": "ranks read the checkpoint of Hugging Face",
    **_each(
        "the run's processes find each other",
        "http-proxy use-distributed-post distributed-backend rollout-data-transport",
    ),
    "distributed-timeout-minutes": "run.step_timeout_s bounds a step",
    "use-lora": "--lora-rank says it",
    "tensorboard-dir": _TENSORBOARD,
    "start-rollout-id": "`--resume` goes on where the run has ended",
    "recompute-loss-function": "the LM head never holds all logits",
    "data-pad-size-multiplier": "packs are as long as their tokens",
    "qwen-gdn-backend": "actor.layer_spec chooses the layers",
    "train-backend": "the trainer is Megatron",
    "num-gpus-per-node": "the cluster says it",
    "optimizer": "",
    "attention-dropout": "",
    "hidden-dropout": "",
    "lora-dropout": "",
    "kl-loss-type": "",
    "kl-loss-coef": "",
    "kl-coef": "",
    "use-kl-loss": "",
    "lr-decay-style": "",
    "min-lr": "",
    "lr-warmup-fraction": "",
    "lr-decay-iters": "",
    **_each("", "use-wandb wandb-project wandb-group wandb-team wandb-mode"),
    **_each("", "tis-clip tis-clip-low use-opsm opsm-delta"),
    "num-epoch": "",
    **_each("", "use-opd opd-type opd-kl-coef opd-teacher-load normalize-advantages"),
}
"""Flags that a recipe needs nothing for, and why. An empty reason: ``launch_recipe`` decides by the value."""

_DEVELOPERS = "it is a tool of slime's developers"
_STATES = "all parameters are trained by one Adam, whose state is kept; adapters: actor.lora"
_ALIKE = "all engines are alike, and each run starts its own"
_BUFFER = "Slipstream collects by itself, without a server of rollouts"

REFUSED = {
    "loss-type": "Slipstream trains `policy_loss` by reinforcement, and supervised by `slipstream sft`",
    **_each(
        "an evaluation takes each prompt as a rollout does",
        "eval-max-context-len eval-reward-key eval-tool-key",
    ),
    "train-env-vars": "set them where the run is started: its processes inherit them",
    "rollout-skip-special-tokens": "hooks get the text with its special tokens",
    "tool-key": "a workflow has the tools: docs/agents.md",
    "disable-rollout-global-dataset": "prompts come from data.path",
    "disable-compute-advantages-and-returns": "a custom_loss_function may leave advantages alone",
    "ref-update-interval": "set actor.kl (docs/objectives.md)",
    **_each(
        _STATES,
        """
        freeze-params-name-list only-train-params-name-list freeze-indexer reset-optimizer-states
        use-stateless-adam
        """,
    ),
    **_each(
        "set actor.lora.targets, in Megatron's names: linear_qkv, linear_proj, linear_fc1, linear_fc2",
        "target-modules lora-target-modules",
    ),
    "use-rollout-entropy": "entropies are those of the trainer: train/entropy",
    "mask-offpolicy-in-partial-rollout": "set rollout.consumption.on_stale: mask",
    **_each(
        "with rollout.engine.colocated, trainer and engines are offloaded in turns, and otherwise neither",
        "release-train no-offload no-offload-train no-offload-rollout",
    ),
    "allgather-cp": "Transformer Engine exchanges keys and values of context parallelism",
    "enable-experimental": "experimental parts of Megatron are off",
    "megatron-config-path": "set actor.megatron, which holds for the critic too",
    "eval-config": "name the files in eval.sets, and how they are sampled in eval.sampling",
    "partial-rollout": "unfinished episodes always go on, and on_stale decides about old tokens",
    "optimizer-cpu-offload": "the optimizer stays on the GPUs",
    "overlap-cpu-optimizer-d2h-h2d": "the optimizer stays on the GPUs",
    **_each("the trainer computes in model.dtype, not in fp8", "fp8-format fp8-recipe"),
    "use-precision-aware-optimizer": "the optimizer's state is float32",
    "use-routing-replay": "with `actor.minibatches` of 2 or more, set `actor.routing_replay: recompute`",
    **_each(
        _DEVELOPERS,
        """
        debug-train-only debug-rollout-only ci-test ci-disable-kl-checker ci-load-grad-norm ci-save-grad-norm
        ci-train-rollout-logprob-abs-diff-threshold check-weight-update-equal load-debug-rollout-data
        load-debug-rollout-data-subsample load-forge-rollout-data save-debug-train-data
        megatron-deepgemm-forward-layers megatron-deepgemm-forward-modules
        megatron-deepgemm-moe-forward-layers megatron-deepgemm-moe-forward-modules
        memory-recorder memory-snapshot-dir memory-snapshot-num-steps profile-target record-memory-history
        """,
    ),
    "save-debug-rollout-data": "the ledger holds every trajectory: `slipstream audit`",
    "dump-details": "the ledger holds every trajectory: `slipstream audit`",
    "enable-mtp-training": "multi-token prediction is not trained",
    "mtp-num-layers": "multi-token prediction is not trained",
    "mtp-loss-scaling-factor": "multi-token prediction is not trained",
    "keep-old-actor": "the proximal log-probs are those of the step's first weights",
    **_each(
        _BUFFER,
        "rollout-buffer-url fetch-trajectory-retry-times min-batch-collection-ratio rollout-task-type",
    ),
    "multimodal-keys": "prompts are text",
    **_each(_ALIKE, "sglang-config prefill-num-servers rollout-external-engine-addrs"),
}
"""Flags that a recipe has no setting for, and what to do."""

SFT = "sft_loss"


def is_supervised(script: LaunchScript) -> bool:
    """Return whether a script trains on responses that it is given."""
    return any(flag.name == "loss-type" and flag.text == SFT for flag in script.flags)
