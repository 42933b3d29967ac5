"""Fields of Megatron and SGLang that Slipstream sets, each with the setting to use instead.

A second value for the same field would be ignored, or would silently win, so a recipe must not write one.
SGLang's fields are listed under the names of their command-line flags too.
"""

from collections.abc import Mapping


def _all(names: str, instead: str) -> dict[str, str]:
    return dict.fromkeys(names.split(), instead)


def _use(setting: str) -> str:
    return f"Slipstream sets this field; use {setting} instead"


_ADAM = "Slipstream trains with Adam; its settings are in actor.optimizer"
_FROM_MODEL = "the value follows from config.json in model.path and cannot change for a trained checkpoint"
_NO_LAYOUT = "Slipstream builds the process groups from actor.parallel, which does not have this dimension"
_BY_SLIPSTREAM = "Slipstream sets this field, and the loss and the batches depend on it"

MEGATRON_OWNED: Mapping[str, str] = {
    "tensor_model_parallel_size": _use("actor.parallel.tensor"),
    "pipeline_model_parallel_size": _use("actor.parallel.pipeline"),
    "sequence_parallel": _use("actor.parallel.sequence"),
    "virtual_pipeline_model_parallel_size": _use("actor.parallel.virtual_pipeline"),
    "expert_model_parallel_size": _use("actor.parallel.expert"),
    "expert_tensor_parallel_size": _use("actor.parallel.expert_tensor"),
    "context_parallel_size": _use("actor.parallel.context"),
    **_all("hierarchical_context_parallel_sizes hybrid_context_parallel", _NO_LAYOUT),
    "lr": _use("actor.optimizer.lr and actor.optimizer.warmup_steps"),
    "min_lr": _use("actor.optimizer.decay.min_lr"),
    **_all(
        "decoupled_lr decoupled_min_lr",
        "Slipstream trains all weights with one learning rate, actor.optimizer.lr",
    ),
    "weight_decay": _use("actor.optimizer.weight_decay"),
    "adam_beta1": _use("actor.optimizer.beta1"),
    "adam_beta2": _use("actor.optimizer.beta2"),
    "adam_eps": _use("actor.optimizer.eps"),
    "clip_grad": _use("actor.optimizer.clip_grad"),
    "use_distributed_optimizer": _use("actor.optimizer.distributed"),
    "overlap_param_gather": _use("actor.optimizer.overlap_param_gather"),
    "overlap_param_gather_with_optimizer_step": "Slipstream gathers all weights before it publishes them",
    "optimizer": _ADAM,
    **_all("bf16 fp16 params_dtype pipeline_dtype enable_autocast autocast_dtype", _use("model.dtype")),
    **_all(
        "num_layers hidden_size ffn_hidden_size num_attention_heads num_query_groups kv_channels "
        "normalization layernorm_epsilon layernorm_zero_centered_gamma add_bias_linear add_qkv_bias "
        "gated_linear_unit activation_func qk_layernorm qk_l2_norm multi_latent_attention "
        "rotary_interleaved window_size window_attn_skip_freq softmax_scale softmax_type num_moe_experts "
        "moe_ffn_hidden_size moe_layer_freq moe_router_topk moe_router_score_function "
        "moe_router_pre_softmax moe_router_enable_expert_bias moe_router_topk_scaling_factor "
        "moe_router_num_groups moe_router_group_topk moe_shared_expert_intermediate_size",
        _FROM_MODEL,
    ),
    **_all(
        "hidden_dropout attention_dropout",
        "Slipstream trains without dropout: the engines have none, and their log-probs would not agree",
    ),
    **_all(
        "num_layers_in_first_pipeline_stage num_layers_in_last_pipeline_stage pipeline_model_parallel_layout "
        "account_for_embedding_in_pipeline_split account_for_loss_in_pipeline_split",
        _use("actor.parallel.layers"),
    ),
    "moe_grouped_gemm": _use("actor.layer_spec"),
    "recompute_granularity": _use("actor.recompute"),
    **_all("calculate_per_token_loss variable_seq_lengths use_cpu_initialization", _BY_SLIPSTREAM),
}

_OF_ADAPTERS = _all(
    "enable_lora max_lora_rank lora_target_modules lora_paths max_loras_per_batch max_loaded_loras",
    _use("actor.lora.serve"),
)
_QUANTIZING = _all(
    "quantization modelopt_quant quantize_and_serve rl_quant_profile",
    "the trainer sends weights as rollout.engine.quantization says; use that setting instead",
)

SGLANG_OWNED: Mapping[str, str] = {
    **_all("model_path model tokenizer_path", _use("model.path")),
    "device": _use("cluster.device"),
    "dtype": _use("model.dtype"),
    **_all("tp_size tp tensor_parallel_size", _use("rollout.engine.tensor_parallel")),
    **_all("dp_size dp data_parallel_size enable_dp_attention", _use("rollout.engine.data_parallel")),
    **_all("ep_size ep expert_parallel_size", _use("rollout.engine.expert_parallel")),
    **_all("pp_size pp pipeline_parallel_size", _use("rollout.engine.pipeline_parallel")),
    "nnodes": _use("rollout.engine.nodes"),
    "random_seed": _use("run.seed"),
    **_all("preferred_sampling_params sampling_defaults", _use("rollout.sampling")),
    **_all(
        "host port nccl_port dist_init_addr node_rank base_gpu_id gpu_id_step",
        "Slipstream places the engines and chooses their addresses",
    ),
    **_all(
        "api_key admin_api_key",
        "every start of an engine draws a key of its own, which Slipstream's clients send",
    ),
    **_all(
        "tokenizer_worker_num grpc_port grpc_mode smg_grpc_mode smg_http_sidecar_port sidecar use_ray "
        "encoder_only",
        "the engine would answer requests that its key does not protect",
    ),
    **_OF_ADAPTERS,
    "weight_version": "Slipstream sets this field whenever it publishes a policy version",
    **_QUANTIZING,
    "skip_server_warmup": "Slipstream sets this field, and waits until the engine is healthy instead",
}

_ONE_COMPLETION = "a request has one completion; rollout.n_samples_per_prompt says how many a prompt has"
_FROM_IDS = "Slipstream reads token ids, and makes the text of them itself"
_INSIDE = "SGLang sets this field itself"

SAMPLING_OWNED: Mapping[str, str] = {
    **{
        name: _use(f"rollout.sampling.{name}")
        for name in [
            "temperature",
            "top_p",
            "top_k",
            "max_new_tokens",
            "min_new_tokens",
            "stop",
            "stop_token_ids",
            "ignore_eos",
        ]
    },
    "sampling_seed": _use("rollout.sampling.seed"),
    "stream_interval": _use("rollout.engine.stream_interval"),
    **_all("n beam_width", _ONE_COMPLETION),
    **_all("skip_special_tokens spaces_between_special_tokens no_stop_trim", _FROM_IDS),
    **_all(
        "stop_strs stop_regex_strs stop_str_max_len stop_regex_max_len is_normalized ebnf_full_assistant",
        _INSIDE,
    ),
}
"""Fields of SGLang's SamplingParams."""

JUDGE_OWNED: Mapping[str, str] = {
    **{
        name: instead for name, instead in SGLANG_OWNED.items() if name not in {**_OF_ADAPTERS, **_QUANTIZING}
    },
    **_all("model_path model tokenizer_path", _use("judge.endpoint.path")),
    "dtype": _use("judge.endpoint.dtype"),
    **_all("tp_size tp tensor_parallel_size", _use("judge.endpoint.tensor_parallel")),
    **_all("dp_size dp data_parallel_size enable_dp_attention", _use("judge.endpoint.count")),
    **_all(
        "pp_size pp pipeline_parallel_size ep_size ep expert_parallel_size nnodes",
        "Slipstream splits the judge's engines by tensor parallelism only; use "
        "judge.endpoint.tensor_parallel instead",
    ),
    **_all("preferred_sampling_params sampling_defaults", _use("judge.temperature")),
    "weight_version": "the judge's weights have no versions: they never change",
}
